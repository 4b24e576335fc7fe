"""Pairs (expert out, expert in) counted by population and block.

Most pairs never occur, so the state lists those that do, by a key in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from moegeom.kernels.batch import NUM_BLOCKS, TokenBatch
from moegeom.kernels.reduction import ANY_USE, Extent, Kernels, Reduction, State, Use

#: (row of the batch, expert out, expert in) of everything to be counted.
PairsOf = Callable[[TokenBatch], tuple[np.ndarray, np.ndarray, np.ndarray]]

#: Tokens gathered before they are sorted into the state.
_PENDING = 2**16


class _Pairs:
    def __init__(self, extent: Extent, pairs_of: PairsOf) -> None:
        self._extent, self._pairs_of = extent, pairs_of
        self._state = {**_counted([]), "shape": _shape(extent)}
        self._pending: list[State] = []
        self._waiting = 0

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        row, out, into = self._pairs_of(batch)
        _, experts = self._state["shape"]
        key = out.astype(np.int64) * experts + into
        key = key * self._extent.num_populations + batch.population[row]
        key = key * NUM_BLOCKS + batch.block[row]
        self._pending.append({"key": key, "count": np.ones(len(key), dtype=np.int64)})
        self._waiting += len(key)
        if self._waiting >= max(_PENDING, len(self._state["key"])):
            self._settle()

    def _settle(self) -> None:
        self._state = self._state | _counted([self._state, *self._pending])
        self._pending, self._waiting = [], 0

    def state(self) -> State:
        self._settle()
        return self._state


def _shape(extent: Extent) -> Int64[np.ndarray, "2"]:
    return np.array([extent.num_populations, extent.num_experts], dtype=np.int64)


def _counted(states: list[State]) -> State:
    """Equal keys added up."""
    empty = np.empty(0, dtype=np.int64)
    key = np.concatenate([empty, *(state["key"] for state in states)])
    count = np.concatenate([empty, *(state["count"] for state in states)])
    unique, place = np.unique(key, return_inverse=True)
    total = np.zeros(len(unique), dtype=np.int64)
    np.add.at(total, place, count)
    return {"key": unique, "count": total}


def _select(
    state: State, population: int | None, without: int | None
) -> Int64[np.ndarray, "experts experts"]:
    populations, experts = state["shape"]
    pair, label = np.divmod(state["key"], populations * NUM_BLOCKS)
    kept = np.ones(len(label), dtype=bool) if without is None else label % NUM_BLOCKS != without
    if population is not None:
        kept &= label // NUM_BLOCKS == population
    counts = np.zeros(experts * experts, dtype=np.int64)
    np.add.at(counts, pair[kept], state["count"][kept])
    return counts.reshape(experts, experts)


def pair_counts(
    name: str, needs: tuple[str, ...], pairs_of: PairsOf, use: Use = ANY_USE
) -> Reduction:
    """A reduction that counts pairs of experts."""
    return Reduction(
        name=name,
        needs=needs,
        start=lambda extent: _Pairs(extent, pairs_of),
        merge=lambda first, second: {**_counted([first, second]), "shape": first["shape"]},
        select=_select,
        use=use,
    )
