"""Boundary distances in standard deviations of bfloat16 rounding of the input, in bins."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Use
from moegeom.kernels.reductions._counters import histogram_of


def _sigmas(batch: TokenBatch) -> np.ndarray:
    assert batch.distance is not None and batch.noise_scale is not None
    scale = np.where(batch.noise_scale > 0.0, batch.noise_scale, 1.0)
    sigmas = batch.distance / scale
    return np.where((batch.noise_scale > 0.0) | (batch.distance == 0.0), sigmas, np.inf)


REDUCTION = histogram_of(
    "noise_sigmas_histogram",
    ("distance", "noise_scale", "input_norm"),
    _sigmas,
    use=Use(on_prior=True),
)
