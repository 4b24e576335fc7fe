"""The same margins as ``tightness_histogram``, of the tokens that a variant switches."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.arithmetic.float_bits import NUM_BINS
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.switch is not None and batch.tightness is not None
    row = np.flatnonzero(batch.switch.differs)
    labels = batch.population[row], batch.block[row]
    kernels["count_bins"](counts, batch.tightness[row], *labels)


REDUCTION = counters(
    "switched_tightness_histogram",
    ("switch", "margin"),
    lambda extent: (NUM_BINS,),
    _fold,
    use=Use(of_switch=True),
)
