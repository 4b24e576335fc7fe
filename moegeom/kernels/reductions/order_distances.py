"""Distances to ties of more than two experts, of the tokens that were looked at more closely.

A few hundred tokens of a router at most, so that all are kept.
"""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import ORDERS, TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use
from moegeom.kernels.reductions._sample import joined, rows_of, token_hash


class _LookedAt:
    def __init__(self, extent: Extent) -> None:
        labels, ends = np.empty(0, np.int32), np.empty((0, len(ORDERS)))
        self._parts: list[State] = [
            {
                "key": np.empty(0, np.uint64),
                "population": labels,
                "block": labels,
                "lower": ends,
                "upper": ends,
            }
        ]

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        found = batch.order_distance
        assert found is not None
        self._parts.append(
            {
                "key": token_hash(batch.token[found.row]),
                "population": batch.population[found.row],
                "block": batch.block[found.row],
                "lower": found.lower,
                "upper": found.upper,
            }
        )

    def state(self) -> State:
        self._parts = [joined(self._parts)]
        return self._parts[0]


def _select(state: State, population: int | None, without: int | None) -> dict[str, np.ndarray]:
    row = rows_of(state, population, without)
    return {end: state[end][row] for end in ("lower", "upper")}


REDUCTION = Reduction(
    name="order_distances",
    needs=("order_distance",),
    start=_LookedAt,
    merge=lambda first, second: joined([first, second]),
    select=_select,
    use=Use(of_random_router=False, is_sampled=True),
)
