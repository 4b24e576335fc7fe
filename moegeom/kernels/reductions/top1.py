"""First choices: how often each expert is one, and how often the next token repeats it."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters
from moegeom.kernels.reductions._neighbours import first_of_pairs


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    top1 = batch.chosen[:, 0]
    np.add.at(counts, (batch.population, batch.block, 2 + top1), 1)
    first = first_of_pairs(batch)
    repeated = top1[first] == top1[first + 1]
    at = (batch.population[first], batch.block[first])
    np.add.at(counts[..., 0], at, 1)
    np.add.at(counts[..., 1], at, repeated)


#: Last axis: pairs of neighbours, pairs with equal first choice, then tokens led by each expert.
#: A margin means that choices are in the order of their scores, which recorded ids need not be.
REDUCTION = counters(
    "top1",
    ("chosen", "margin", "document", "position"),
    lambda extent: (2 + extent.num_experts,),
    _fold,
)
