"""Cells of top-k routing: enumeration, walls, witnesses and closed forms."""
