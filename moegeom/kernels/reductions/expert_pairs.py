"""Tokens by pair of experts chosen together, by block; the diagonal holds those of one expert."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State


class _Pairs:
    """Blocks only, no populations: a table for each domain would be hundreds of megabytes."""

    def __init__(self, extent: Extent) -> None:
        shape = (NUM_BLOCKS, extent.num_experts, extent.num_experts)
        self._counts = np.zeros(shape, dtype=np.int64)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        kernels["count_pairs"](self._counts, batch.chosen, batch.block)

    def state(self) -> State:
        return {"counts": self._counts}


def _select(
    state: State, population: int | None, without: int | None
) -> Int64[np.ndarray, "experts experts"]:
    """Symmetric table, N_ij tokens that chose both, N_ii those that chose i; zeros for domains."""
    counts = state["counts"]
    if population is not None:
        return np.zeros(counts.shape[1:], dtype=np.int64)
    upper = counts.sum(axis=0)
    if without is not None:
        upper = upper - counts[without]
    return upper + np.triu(upper, 1).T


REDUCTION = Reduction(
    name="expert_pairs",
    needs=("chosen",),
    start=_Pairs,
    merge=lambda first, second: {"counts": first["counts"] + second["counts"]},
    select=_select,
)
