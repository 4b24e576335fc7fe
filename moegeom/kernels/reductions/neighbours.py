"""How many experts a token shares with the next one of its document."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.reductions._counters import counters
from moegeom.kernels.reductions._neighbours import first_of_pairs

#: Last axis of the counters: pairs of tokens, experts in common, equal chosen sets.
PAIRS, SHARED, EQUAL = range(3)


def _fold(counts: np.ndarray, batch: TokenBatch, kernels: Kernels) -> None:
    first = first_of_pairs(batch)
    chosen = batch.chosen
    shared = kernels["num_shared"](chosen[first], chosen[first + 1])
    at = (batch.population[first], batch.block[first])
    np.add.at(counts[..., PAIRS], at, 1)
    np.add.at(counts[..., SHARED], at, shared)
    np.add.at(counts[..., EQUAL], at, shared == chosen.shape[1])


REDUCTION = counters("neighbours", ("chosen", "document", "position"), lambda extent: (3,), _fold)
