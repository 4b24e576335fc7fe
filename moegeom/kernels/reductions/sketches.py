"""Bounded samples of what may be too many to count: chosen sets, documents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moegeom.core.shapes import Int64
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use
from moegeom.kernels.reference import token_hash


class _PendingJoins:
    """A state, and parts of batches that wait until joining them is worth it."""

    def __init__(self, state: State, join: Callable[[list[State]], State]) -> None:
        self._state, self._join = state, join
        self._pending: list[State] = []
        self._waiting = 0

    def _add(self, part: State, rows: int, enough: int) -> None:
        """A part of ``rows`` rows; from ``enough`` of them on, those that wait are joined."""
        self._pending.append(part)
        self._waiting += rows
        if self._waiting >= enough:
            self.state()

    def state(self) -> State:
        self._state = self._join([self._state, *self._pending])
        self._pending, self._waiting = [], 0
        return self._state


# --------------------------------------------------------------------------------------------- sets
#: Entries kept. At most 2^20, so that memory stays flat however long the stream.
CAPACITY = 2**20

#: Tokens gathered before they are sorted into the state.
_PENDING = 2**16

_LABEL_BITS = 11
_BLOCK_BITS = 4


class _ExpertSets(_PendingJoins):
    """An entry is one expert set in one population and block.

    The composite key holds 53 bits of the expert set's hash, then 7 bits of population and 4 of
    block. Two of n expert sets collide with probability about n^2 / 2^54: 1e-4 at full capacity.
    """

    def __init__(self, extent: Extent) -> None:
        super().__init__(_empty(extent.top_k), _compact)
        self._extent = extent

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        hashed = kernels["expert_set_key"](batch.chosen, self._extent.num_experts)
        label = (batch.population.astype(np.uint64) << np.uint64(_BLOCK_BITS)) | (
            batch.block.astype(np.uint64)
        )
        key = (hashed & ~np.uint64(2**_LABEL_BITS - 1)) | label
        # what the sample will drop need not wait for it
        rows = np.flatnonzero(key <= _largest_key(self._state))
        key = key[rows]
        part = {
            "key": key,
            "count": np.ones(len(key), dtype=np.int64),
            "members": np.sort(batch.chosen[rows], axis=1).astype(np.int16),
            "halvings": np.zeros(1, dtype=np.int64),
        }
        # As many again as the state holds, so that each token is sorted a bounded number of times.
        self._add(part, len(key), max(_PENDING, len(self._state["key"])))


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
    # at full capacity a column has megabytes: none is held longer than it is needed
    key = np.concatenate([state["key"] for state in states])
    order = np.argsort(key, kind="stable")
    key = key[order]
    starts = np.flatnonzero(np.append(True, key[1:] != key[:-1])) if len(key) else np.empty(0, int)
    halvings = max(int(state["halvings"][0]) for state in states)
    key = key[starts]
    while True:
        limit = int(np.searchsorted(key, np.uint64(2 ** (64 - halvings) - 1), side="right"))
        if limit <= CAPACITY:
            break
        halvings += 1
    count = np.concatenate([state["count"] for state in states])[order]
    count = np.add.reduceat(count, starts)[:limit].copy() if len(starts) else count
    first = order[starts[:limit]]
    del order, starts
    return {
        "key": key[:limit].copy(),  # a view would keep the longer array alive
        "count": count,
        "members": np.concatenate([state["members"] for state in states])[first],
        "halvings": np.array([halvings], dtype=np.int64),
    }


def _select_sets(
    state: State, population: int | None, without: int | None
) -> dict[str, np.ndarray]:
    """Count per expert set and the sampling rate, in the order of the hash.

    ``members[row[i]]`` are the experts of expert set i.
    """
    block = (state["key"] & np.uint64(2**_BLOCK_BITS - 1)).astype(np.int64)
    label = (state["key"] >> np.uint64(_BLOCK_BITS)) & np.uint64(2 ** (_LABEL_BITS - 4) - 1)
    is_selected = np.ones(len(block), dtype=bool) if without is None else block != without
    if population is not None:
        is_selected &= label == np.uint64(population)
    row = np.flatnonzero(is_selected)
    expert_set = (state["key"] >> np.uint64(_LABEL_BITS))[row]
    starts = np.flatnonzero(np.diff(expert_set, prepend=~expert_set[:1]))
    counts = state["count"][row]
    return {
        "count": np.add.reduceat(counts, starts) if len(starts) else counts,
        "row": row[starts],
        "members": state["members"],
        "rate": np.array(2.0 ** -float(state["halvings"][0])),
    }


#: Visited expert sets: exact up to a million entries, then a hash sample of known rate.
EXPERT_SETS = Reduction(
    name="expert_sets",
    needs=("chosen",),
    start=_ExpertSets,
    merge=lambda first, second: _compact([first, second]),
    select=_select_sets,
    use=Use(of_random_router=False),
)


# ---------------------------------------------------------------------------------------- documents
#: Documents kept.
DOCUMENTS = 4096


class _Documents(_PendingJoins):
    """A row for each document and population: most documents are of one domain.

    Of more documents those with the smallest hashes stay. A document that stays in the end has
    never been among the others, in no part of the stream, so its counts are whole. Kept where the
    experts of the router have a capacity (``Rule.capacity``), which they are compared with.
    """

    def __init__(self, extent: Extent) -> None:
        empty = np.empty(0, dtype=np.int64)
        self._experts = extent.num_experts
        nothing: State = {
            "document": empty,
            "population": empty.astype(np.int32),
            "block": empty.astype(np.int32),
            "counts": np.empty((0, extent.num_experts), dtype=np.int64),
        }
        super().__init__(nothing, _joined)

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.document is not None
        has_document = q.document >= 0
        document, population, block = (v[has_document] for v in (q.document, q.population, q.block))
        # tokens of a document mostly stand together: a row for each run of them
        is_other = (np.diff(document, prepend=-1) != 0) | (np.diff(population, prepend=-1) != 0)
        first, row = np.flatnonzero(is_other), np.cumsum(is_other) - 1
        chosen = q.chosen[has_document]
        cell = (row[:, None] * self._experts + chosen)[chosen >= 0]
        counts = np.bincount(cell, minlength=len(first) * self._experts)
        part = {
            "document": document[first],
            "population": population[first],
            "block": block[first],
            "counts": counts.reshape(-1, self._experts),
        }
        self._add(part, len(first), DOCUMENTS)


def _joined(states: list[State]) -> State:
    """Rows of one document and population added up, in the order of the documents' hashes."""
    rows = {name: np.concatenate([state[name] for state in states]) for name in states[0]}
    order = np.lexsort((rows["population"], token_hash(rows["document"])))
    document, population = rows["document"][order], rows["population"][order]
    is_other = (np.diff(document) != 0) | (np.diff(population) != 0)
    first = np.flatnonzero(np.concatenate([[True], is_other])) if len(order) else order
    place = np.cumsum(np.diff(document[first], prepend=document[:1]) != 0)
    head = first[place < DOCUMENTS]
    counts = np.add.reduceat(rows["counts"][order], first) if len(order) else rows["counts"]
    return {
        "document": document[head],
        "population": population[head],
        "block": rows["block"][order][head],
        "counts": counts[: len(head)],
    }


def _select_documents(
    state: State, population: int | None, without: int | None
) -> Int64[np.ndarray, "documents experts"]:
    """Counts of each document, of its tokens of one population only where one is given."""
    is_selected = np.ones(len(state["document"]), dtype=bool)
    if population is not None:
        is_selected &= state["population"] == population
    if without is not None:
        is_selected &= state["block"] != without
    document, counts = state["document"][is_selected], state["counts"][is_selected]
    if not len(document):
        return counts
    first = np.flatnonzero(np.diff(document, prepend=document[0] - 1))
    return np.add.reduceat(counts, first)


#: How often each expert was chosen in each document, for a sample of at most 4096 documents.
DOCUMENT_COUNTS = Reduction(
    name="document_counts",
    needs=("chosen", "document", "capacity"),
    start=_Documents,
    merge=lambda first, second: _joined([first, second]),
    select=_select_documents,
    use=Use(of_random_router=False),
)
