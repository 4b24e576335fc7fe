"""The same margins as ``effective_margin_histogram``, of the tokens that a variant flips."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.arithmetic.float_bits import NUM_BINS
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.flip is not None and batch.effective_margin is not None
    row = np.flatnonzero(batch.flip.differs)
    labels = batch.population[row], batch.block[row]
    kernels["count_bins"](counts, batch.effective_margin[row], *labels)


REDUCTION = counters(
    "flipped_effective_margin_histogram",
    ("flip", "margin"),
    lambda extent: (NUM_BINS,),
    _fold,
    use=Use(of_flip=True),
)
