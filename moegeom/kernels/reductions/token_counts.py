"""Tokens, and those on an exact tie."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters

#: Columns of the counter array.
TOKENS, TIES = range(2)


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    counts[..., TOKENS] += batch.count_labels(len(counts))
    if batch.effective_margin is not None:
        counts[..., TIES] += batch.count_labels(len(counts), batch.effective_margin == 0.0)


REDUCTION = counters(
    "token_counts",
    ("chosen",),
    lambda extent: (2,),
    _fold,
    use=Use(on_prior=True, of_flip=True, of_random_flip=True),
)
