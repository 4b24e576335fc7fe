"""What a router of given sizes could do at most: counts, bounds and costs from numbers alone."""
