"""Distances to the boundaries of non-linear scores, compiled."""
