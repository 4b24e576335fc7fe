"""Angle to the nearest wall before the norm, in bins cut at powers of two; for a sample."""

from moegeom.kernels.reductions._counters import histogram

REDUCTION = histogram("angle")
