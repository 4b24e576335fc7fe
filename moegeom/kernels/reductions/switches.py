"""Counts of what a variant changes about the choice."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters
from moegeom.kernels.reductions.bf16_switch import FIXED_POINT

#: Columns of the counter array; the sums of weight and of probability in units of 1 / FIXED_POINT.
TOKENS, SWITCHED, SURELY, PERHAPS, REORDERED, TIED, PROVED, DISPROVED, MOVED, PREDICTED = range(10)


def _fold(counts: np.ndarray, quantities: Quantities, kernels: Kernels) -> None:
    switch = quantities.switch
    assert switch is not None
    counted = {
        SWITCHED: switch.differs,
        SURELY: switch.surely,
        PERHAPS: switch.perhaps,
        REORDERED: switch.reordered,
        TIED: switch.tied,
        PROVED: switch.proved,
        DISPROVED: switch.proved & switch.differs,
        MOVED: np.rint(np.nan_to_num(switch.weight_moved) * FIXED_POINT),
    }
    if switch.predicted is not None:
        counted[PREDICTED] = np.rint(switch.predicted * FIXED_POINT)
    counts[..., TOKENS] += quantities.count_labels(len(counts))
    for column, values in counted.items():
        counts[..., column] += quantities.count_labels(len(counts), values)


REDUCTION = counters("switches", ("switch",), lambda extent: (10,), _fold)
