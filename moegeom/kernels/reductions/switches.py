"""Counts of what a variant changes about the choice."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters
from moegeom.kernels.reductions.bf16_switch import FIXED_POINT

#: Sums, those of weight and of probability in units of 1 / FIXED_POINT.
TOKENS, SWITCHED, SURELY, PERHAPS, REORDERED, TIED, PROVED, DISPROVED, MOVED, PREDICTED = range(10)

#: Last axis of the counters: a sum, and the tokens of which its part is known.
SUM, KNOWN = range(2)


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    switch = batch.switch
    assert switch is not None
    counted = {
        SWITCHED: switch.differs,
        SURELY: switch.surely,
        PERHAPS: switch.perhaps,
        REORDERED: switch.reordered,
        TIED: switch.tied,
        PROVED: switch.proved,
        DISPROVED: None if switch.proved is None else switch.proved & switch.differs,
        MOVED: np.rint(np.nan_to_num(switch.weight_moved) * FIXED_POINT),
        PREDICTED: None if switch.predicted is None else np.rint(switch.predicted * FIXED_POINT),
    }
    tokens = batch.count_labels(len(counts))
    counts[..., TOKENS, :] += tokens[..., None]
    for column, values in counted.items():
        if values is not None:
            counts[..., column, SUM] += batch.count_labels(len(counts), values)
            counts[..., column, KNOWN] += tokens


REDUCTION = counters(
    "switches",
    ("switch",),
    lambda extent: (10, 2),
    _fold,
    use=Use(of_switch=True, of_random_switch=True),
)
