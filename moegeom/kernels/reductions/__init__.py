"""Reductions, one file each."""
