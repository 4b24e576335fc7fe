"""Cells of top-k routing: enumeration, facets, witnesses and closed forms."""
