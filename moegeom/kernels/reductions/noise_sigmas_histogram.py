"""Boundary distances in standard deviations of bfloat16 rounding of the input, in bins."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _sigmas(quantities: Quantities) -> np.ndarray:
    assert quantities.distance is not None and quantities.noise_scale is not None
    scale = np.where(quantities.noise_scale > 0.0, quantities.noise_scale, 1.0)
    sigmas = quantities.distance / scale
    return np.where((quantities.noise_scale > 0.0) | (quantities.distance == 0.0), sigmas, np.inf)


REDUCTION = histogram_of(
    "noise_sigmas_histogram",
    ("distance", "noise_scale", "input_norm"),
    _sigmas,
    use=Use(on_prior=True),
)
