"""Margins in bins cut at powers of two."""

from moegeom.kernels.reductions._counters import histogram

REDUCTION = histogram("margin")
