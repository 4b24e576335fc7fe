"""Tokens, and those on an exact tie."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.quantities import Quantities
from moegeom.kernels.reduction import Kernels, Use
from moegeom.kernels.reductions._counters import counters

#: Columns of the counter array.
TOKENS, TIES = range(2)


def _fold(counts: np.ndarray, quantities: Quantities, kernels: Kernels) -> None:
    counts[..., TOKENS] += quantities.count_labels(len(counts))
    if quantities.tightness is not None:
        counts[..., TIES] += quantities.count_labels(len(counts), quantities.tightness == 0.0)


REDUCTION = counters(
    "token_counts",
    ("chosen",),
    lambda extent: (2,),
    _fold,
    use=Use(on_prior=True, of_switch=True, of_random_switch=True),
)
