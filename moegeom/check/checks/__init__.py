"""Checks, one file each."""
