"""Tokens whose choice two correct float32 engines may make differently."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters

#: Columns of the counter array.
BOUNDED, AMBIGUOUS = range(2)


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    effective_margin, bound = batch.effective_margin, batch.float_bound
    assert effective_margin is not None and bound is not None
    counts[..., BOUNDED] += batch.count_labels(len(counts))
    counts[..., AMBIGUOUS] += batch.count_labels(len(counts), effective_margin <= bound)


REDUCTION = counters(
    "ambiguity",
    ("margin", "float_bound", "input_norm"),
    lambda extent: (2,),
    _fold,
    use=Use(on_prior=True),
)
