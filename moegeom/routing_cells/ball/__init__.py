"""Cells within a ball or a box, and distances to cells and facets."""
