"""Visited expert sets: exact up to a million entries, then a hash sample of known rate.

An entry is one expert set in one population and block. The composite key holds 53 bits of the
expert set's hash, then 7 bits of population and 4 of block. Two of n expert sets collide with
probability about n^2 / 2^54, which is 1e-4 at full capacity.
"""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use

#: Entries kept. At most 2^20, so that memory stays flat however long the stream.
CAPACITY = 2**20

#: Tokens gathered before they are sorted into the state.
_PENDING = 2**16

_LABEL_BITS = 11
_BLOCK_BITS = 4


class _ExpertSets:
    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._state = _empty(extent.top_k)
        self._pending: list[State] = []
        self._waiting = 0

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        hashed = kernels["expert_set_key"](batch.chosen, self._extent.num_experts)
        label = (batch.population.astype(np.uint64) << np.uint64(_BLOCK_BITS)) | (
            batch.block.astype(np.uint64)
        )
        key = (hashed & ~np.uint64(2**_LABEL_BITS - 1)) | label
        # what the sample will drop need not wait for it
        kept = np.flatnonzero(key <= _largest_key(self._state))
        key = key[kept]
        self._pending.append(
            {
                "key": key,
                "count": np.ones(len(key), dtype=np.int64),
                "members": np.sort(batch.chosen[kept], axis=1).astype(np.int16),
                "halvings": np.zeros(1, dtype=np.int64),
            }
        )
        self._waiting += len(key)
        # As many again as the state holds, so that each token is sorted a bounded number of times.
        if self._waiting >= max(_PENDING, len(self._state["key"])):
            self._settle()

    def _settle(self) -> None:
        self._state = _compact([self._state, *self._pending])
        self._pending, self._waiting = [], 0

    def state(self) -> State:
        self._settle()
        return self._state


def _largest_key(state: State) -> np.uint64:
    return np.uint64(2 ** (64 - int(state["halvings"][0])) - 1)


def _empty(top_k: int) -> State:
    return {
        "key": np.empty(0, dtype=np.uint64),
        "count": np.empty(0, dtype=np.int64),
        "members": np.empty((0, top_k), dtype=np.int16),
        "halvings": np.zeros(1, dtype=np.int64),
    }


def _compact(states: list[State]) -> State:
    """Equal keys added up; when over capacity, keys whose upper bits are not 0 are dropped.

    The number of halvings depends on the set of keys alone, not on their order of arrival: it is
    the least that brings the whole set under capacity, and it can only grow with the set.
    """
    key = np.concatenate([state["key"] for state in states])
    order = np.argsort(key, kind="stable")
    key = key[order]
    starts = np.flatnonzero(np.append(True, key[1:] != key[:-1])) if len(key) else np.empty(0, int)
    count = np.concatenate([state["count"] for state in states])[order]
    members = np.concatenate([state["members"] for state in states])
    halvings = max(int(state["halvings"][0]) for state in states)
    key = key[starts]
    while True:
        limit = int(np.searchsorted(key, np.uint64(2 ** (64 - halvings) - 1), side="right"))
        if limit <= CAPACITY:
            break
        halvings += 1
    return {
        "key": key[:limit].copy(),  # a view would keep the longer array alive
        "count": np.add.reduceat(count, starts)[:limit].copy() if len(starts) else count,
        "members": members[order[starts[:limit]]],
        "halvings": np.array([halvings], dtype=np.int64),
    }


def _select(state: State, population: int | None, without: int | None) -> dict[str, np.ndarray]:
    """Count per expert set and the sampling rate, in the order of the hash.

    ``members[row[i]]`` are the experts of expert set i.
    """
    block = (state["key"] & np.uint64(2**_BLOCK_BITS - 1)).astype(np.int64)
    label = (state["key"] >> np.uint64(_BLOCK_BITS)) & np.uint64(2 ** (_LABEL_BITS - 4) - 1)
    kept = np.ones(len(block), dtype=bool) if without is None else block != without
    if population is not None:
        kept &= label == np.uint64(population)
    row = np.flatnonzero(kept)
    expert_set = (state["key"] >> np.uint64(_LABEL_BITS))[row]
    starts = np.flatnonzero(np.diff(expert_set, prepend=~expert_set[:1]))
    counts = state["count"][row]
    return {
        "count": np.add.reduceat(counts, starts) if len(starts) else counts,
        "row": row[starts],
        "members": state["members"],
        "rate": np.array(2.0 ** -float(state["halvings"][0])),
    }


REDUCTION = Reduction(
    name="expert_sets",
    needs=("chosen",),
    start=_ExpertSets,
    merge=lambda first, second: _compact([first, second]),
    select=_select,
    use=Use(of_random_router=False),
)
