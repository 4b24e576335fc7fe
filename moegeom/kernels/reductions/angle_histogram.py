"""Angle to the nearest boundary before the norm, in bins cut at powers of two; for a sample."""

from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram

REDUCTION = histogram("angle", use=Use(on_prior=True, is_sampled=True))
