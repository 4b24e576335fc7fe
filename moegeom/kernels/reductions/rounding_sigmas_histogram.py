"""Nearest boundary in standard deviations of the rounding of each coordinate; for a sample."""

from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram

REDUCTION = histogram("rounding_sigmas", use=Use(on_prior=True, is_sampled=True))
