"""Bounds on the exit times of a diffusion, for the tokens that were looked at more closely."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.arithmetic.float_bits import NUM_BINS
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters

#: Histograms of the state, one after the other.
EARLY, LATE = range(2)


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    noise = batch.noise
    assert noise is not None
    for which, times in ((EARLY, noise.exit_early), (LATE, noise.exit_late)):
        if times is not None:
            found = np.zeros((*counts.shape[:2], NUM_BINS), np.int64)
            labels = batch.population[noise.row], batch.block[noise.row]
            kernels["count_bins"](found, times, *labels)
            counts[..., which, :] += found


REDUCTION = counters(
    "exit_time_histograms",
    ("noise",),
    lambda extent: (2, NUM_BINS),
    _fold,
    use=Use(is_sampled=True),
)
