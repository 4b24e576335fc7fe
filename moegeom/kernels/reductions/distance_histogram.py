"""Boundary distances in bins cut at powers of two."""

from moegeom.kernels.reductions._histogram import histogram_of

REDUCTION = histogram_of("distance")
