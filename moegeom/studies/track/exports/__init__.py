"""Exports of a series for other tools, one file each."""
