"""What noise on the router input does: sums of probabilities, and counts of a simulation."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters
from moegeom.kernels.reductions.bf16_flip import FIXED_POINT

#: Columns of the counter array; probabilities are summed in units of 1 / FIXED_POINT.
TOKENS, LOWER, ESTIMATE, UPPER, SIMULATED, DRAWN = range(6)


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    noise = batch.noise
    assert noise is not None
    counts[..., TOKENS] += batch.count_labels(len(counts))
    columns = {LOWER: noise.lower, ESTIMATE: noise.estimate, UPPER: noise.upper}
    for column, probability in columns.items():
        if probability is not None:
            units = np.rint(probability * FIXED_POINT)
            counts[..., column] += batch.count_labels(len(counts), units)
    flipped, drawn = np.zeros((2, len(batch.token)))
    flipped[noise.row], drawn[noise.row] = noise.flipped, noise.draws
    counts[..., SIMULATED] += batch.count_labels(len(counts), flipped)
    counts[..., DRAWN] += batch.count_labels(len(counts), drawn)


REDUCTION = counters(
    "noise_flips", ("noise",), lambda extent: (6,), _fold, use=Use(is_sampled=True)
)
