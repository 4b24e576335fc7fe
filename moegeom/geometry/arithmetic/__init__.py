"""Number formats, roundings and sums."""
