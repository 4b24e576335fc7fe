"""Cells by a walk over vertices, compiled, in certified float64."""
