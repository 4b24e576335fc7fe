"""Cells within a ball, and distances to cells and facets."""
