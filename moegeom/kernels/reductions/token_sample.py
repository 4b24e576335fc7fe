"""Token ids and chosen experts of a sample of the tokens."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use
from moegeom.kernels.reductions._sample import TokenSample, joined, rows_of

#: Tokens kept, about.
SIZE = 16_384


class _Sample(TokenSample):
    def __init__(self, extent: Extent) -> None:
        labels = np.empty(0, dtype=np.int32)
        chosen = np.empty((0, extent.top_k), dtype=np.int16)
        names = ("population", "block", "token_id")
        empty = {**dict.fromkeys(names, labels), "chosen": chosen}
        super().__init__(SIZE, extent.num_tokens, empty)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.token_id is not None
        row = self.wanted(q.token)
        columns = {
            "population": q.population[row],
            "block": q.block[row],
            "token_id": q.token_id[row],
            "chosen": q.chosen[row].astype(np.int16),
        }
        self.add(q.token[row], columns)


def _select(state: State, population: int | None, without: int | None) -> dict[str, np.ndarray]:
    row = rows_of(state, population, without)
    return {"token_id": state["token_id"][row], "chosen": state["chosen"][row].astype(np.int32)}


REDUCTION = Reduction(
    name="token_sample",
    needs=("chosen", "token_id"),
    start=_Sample,
    merge=lambda first, second: joined([first, second]),
    select=_select,
    use=Use(of_random_router=False),
)
