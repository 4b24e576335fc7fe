"""Cells in a plane: polygons, circles, pixels."""
