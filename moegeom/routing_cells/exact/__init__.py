"""Cells in exact arithmetic, and certificates that others can check."""
