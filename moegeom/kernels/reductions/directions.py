"""Sums of the unit vectors of the router inputs, by block; for a sample of tokens."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use

#: Coordinates (at most 1) are summed as integers of 2^-36: the sum of a batch of 2^14 tokens is
#: below 2^53, so exact in float64, and 2^27 tokens fit into one block.
FIXED_POINT = 2.0**36


class _Sums:
    """Blocks only, no populations: a sum for each domain would be as large as the router itself."""

    def __init__(self, extent: Extent) -> None:
        self._sums = np.zeros((NUM_BLOCKS, extent.hidden_size), dtype=np.int64)
        self._tokens = np.zeros(NUM_BLOCKS, dtype=np.int64)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        assert batch.direction is not None
        member = np.zeros((NUM_BLOCKS, len(batch.block)))
        member[batch.block, np.arange(len(batch.block))] = 1.0
        # whole numbers below 2^53: the product is exact in any order of summation
        self._sums += (member @ np.rint(batch.direction * FIXED_POINT)).astype(np.int64)
        self._tokens += np.bincount(batch.block, minlength=NUM_BLOCKS)

    def state(self) -> State:
        return {"sums": self._sums, "tokens": self._tokens}


def _merge(first: State, second: State) -> State:
    return {name: first[name] + second[name] for name in first}


def _select(state: State, population: int | None, without: int | None) -> tuple[np.ndarray, int]:
    """Sum of unit vectors and number of tokens; no token for a single population."""
    if population is not None:
        return np.zeros(state["sums"].shape[1]), 0
    kept = np.ones(NUM_BLOCKS, dtype=bool)
    if without is not None:
        kept[without] = False
    return state["sums"][kept].sum(axis=0) / FIXED_POINT, int(state["tokens"][kept].sum())


REDUCTION = Reduction(
    "directions",
    ("direction",),
    _Sums,
    _merge,
    _select,
    use=Use(of_random_router=False, is_sampled=True),
)
