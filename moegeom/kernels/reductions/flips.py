"""Counts of what a variant changes about the choice."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters
from moegeom.kernels.reductions.bf16_flip import FIXED_POINT

#: Sums, those of weight and of probability in units of 1 / FIXED_POINT.
TOKENS, FLIPPED, SURELY, PERHAPS, REORDERED, TIED, PROVED, DISPROVED, MOVED, PREDICTED = range(10)

#: Last axis of the counters: a sum, and the tokens of which its part is known.
SUM, KNOWN = range(2)


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    flip = batch.flip
    assert flip is not None
    counted = {
        FLIPPED: flip.differs,
        SURELY: flip.surely,
        PERHAPS: flip.perhaps,
        REORDERED: flip.reordered,
        TIED: flip.tied,
        PROVED: flip.proved,
        DISPROVED: None if flip.proved is None else flip.proved & flip.differs,
        MOVED: np.rint(np.nan_to_num(flip.weight_moved) * FIXED_POINT),
        PREDICTED: None if flip.predicted is None else np.rint(flip.predicted * FIXED_POINT),
    }
    tokens = batch.count_labels(len(counts))
    counts[..., TOKENS, :] += tokens[..., None]
    for column, values in counted.items():
        if values is not None:
            counts[..., column, SUM] += batch.count_labels(len(counts), values)
            counts[..., column, KNOWN] += tokens


REDUCTION = counters(
    "flips",
    ("flip",),
    lambda extent: (10, 2),
    _fold,
    use=Use(of_flip=True, of_random_flip=True),
)
