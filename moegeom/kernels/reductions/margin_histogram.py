"""Margins in bins cut at powers of two."""

from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram

REDUCTION = histogram("margin", use=Use(on_prior=True))
