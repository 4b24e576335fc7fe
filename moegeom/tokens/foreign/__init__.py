"""Arrays of one's own."""
