"""Cosines between the outputs of each two experts on the same token, added up."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use

#: Cosines are summed as integers of 2^-36: 2^27 tokens fit into one counter.
FIXED_POINT = 2.0**36


class _Cosines:
    """Blocks only, no populations; first the tokens, then the sums of each pair of experts."""

    def __init__(self, extent: Extent) -> None:
        self._tokens = np.zeros(NUM_BLOCKS, dtype=np.int64)
        shape = (NUM_BLOCKS, extent.num_experts, extent.num_experts)
        self._sums = np.zeros(shape, dtype=np.int64)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        outputs = batch.expert_output
        assert outputs is not None
        for token, block in enumerate(batch.block):
            rows = outputs[token].astype(np.float64)
            length = np.sqrt((rows**2).sum(axis=1))
            rows /= np.where(length > 0.0, length, 1.0)[:, None]
            self._sums[block] += np.rint(rows @ rows.T * FIXED_POINT).astype(np.int64)
        self._tokens += np.bincount(batch.block, minlength=NUM_BLOCKS)

    def state(self) -> State:
        return {"tokens": self._tokens, "sums": self._sums}


def _select(state: State, population: int | None, without: int | None) -> tuple[int, np.ndarray]:
    """Number of tokens, and mean cosine of each two experts (nan without tokens)."""
    kept = np.ones(NUM_BLOCKS, dtype=bool)
    if without is not None:
        kept[without] = False
    if population is not None:
        kept[:] = False
    tokens = int(state["tokens"][kept].sum())
    total = state["sums"][kept].sum(axis=0) / FIXED_POINT
    return tokens, total / tokens if tokens else np.full(total.shape, np.nan)


REDUCTION = Reduction(
    name="output_cosines",
    needs=("expert_output",),
    start=_Cosines,
    merge=lambda first, second: {name: first[name] + second[name] for name in first},
    select=_select,
    use=Use(of_random_router=False),
)
