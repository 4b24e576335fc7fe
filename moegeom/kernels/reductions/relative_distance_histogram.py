"""Boundary distances over the length of the router input, in bins cut at powers of two."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _relative(quantities: Quantities) -> np.ndarray:
    assert quantities.distance is not None and quantities.input_norm is not None
    # an input of zeros is as far from a wall as it likes, in units of its length
    length = np.where(quantities.input_norm > 0.0, quantities.input_norm, 1.0)
    relative = quantities.distance / length
    return np.where((quantities.input_norm > 0.0) | (quantities.distance == 0.0), relative, np.inf)


REDUCTION = histogram_of(
    "relative_distance_histogram", ("distance", "input_norm"), _relative, use=Use(on_prior=True)
)
