"""Sums of each expert's probability."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters

#: Probabilities are summed as integers of 2^-36: 2^27 tokens fit into one counter.
FIXED_POINT = 2.0**36


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    assert batch.probability is not None
    kernels["add_scores"](counts, batch.probability, batch.population, batch.block)


REDUCTION = counters("score_sums", ("probability",), lambda extent: (extent.num_experts,), _fold)
