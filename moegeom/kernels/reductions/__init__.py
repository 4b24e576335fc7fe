"""Reductions, several to a module: every record at the top of one is found by its name."""
