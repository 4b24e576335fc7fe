"""Which cells touch."""
