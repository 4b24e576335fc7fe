"""Reporters, one file each."""
