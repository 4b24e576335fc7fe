"""Checks of one checkpoint, in rooms of their subject."""
