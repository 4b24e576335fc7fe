"""How often each expert was chosen in each document, for a sample of at most 4096 documents.

Of more documents those with the smallest hashes stay. A document that stays in the end has never
been among the others, in no part of the stream, so its counts are whole. Kept where the experts of
the router have a capacity (``Rule.capacity``), which is what the counts are compared with.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Extent, Kernels, Reduction, State, Use
from moegeom.kernels.reductions._sample import token_hash

#: Documents kept.
DOCUMENTS = 4096


class _Documents:
    """A row for each document and population: most documents are of one domain."""

    def __init__(self, extent: Extent) -> None:
        empty = np.empty(0, dtype=np.int64)
        self._experts = extent.num_experts
        self._state: State = {
            "document": empty,
            "population": empty.astype(np.int32),
            "block": empty.astype(np.int32),
            "counts": np.empty((0, extent.num_experts), dtype=np.int64),
        }
        self._pending: list[State] = []
        self._waiting = 0

    def fold(self, batch: TokenBatch, kernels: Kernels) -> None:
        q = batch
        assert q.document is not None
        known = q.document >= 0
        document, population, block = (v[known] for v in (q.document, q.population, q.block))
        # tokens of a document mostly stand together: a row for each run of them
        is_other = (np.diff(document, prepend=-1) != 0) | (np.diff(population, prepend=-1) != 0)
        first, row = np.flatnonzero(is_other), np.cumsum(is_other) - 1
        chosen = q.chosen[known]
        cell = (row[:, None] * self._experts + chosen)[chosen >= 0]
        counts = np.bincount(cell, minlength=len(first) * self._experts)
        part = {
            "document": document[first],
            "population": population[first],
            "block": block[first],
            "counts": counts.reshape(-1, self._experts),
        }
        self._pending.append(part)
        self._waiting += len(first)
        if self._waiting >= DOCUMENTS:
            self._settle()

    def _settle(self) -> None:
        self._state = _joined([self._state, *self._pending])
        self._pending, self._waiting = [], 0

    def state(self) -> State:
        self._settle()
        return self._state


def _joined(states: list[State]) -> State:
    """Rows of one document and population added up, in the order of the documents' hashes."""
    rows = {name: np.concatenate([state[name] for state in states]) for name in states[0]}
    order = np.lexsort((rows["population"], token_hash(rows["document"])))
    document, population = rows["document"][order], rows["population"][order]
    is_other = (np.diff(document) != 0) | (np.diff(population) != 0)
    first = np.flatnonzero(np.concatenate([[True], is_other])) if len(order) else order
    place = np.cumsum(np.diff(document[first], prepend=document[:1]) != 0)
    kept = first[place < DOCUMENTS]
    counts = np.add.reduceat(rows["counts"][order], first) if len(order) else rows["counts"]
    return {
        "document": document[kept],
        "population": population[kept],
        "block": rows["block"][order][kept],
        "counts": counts[: len(kept)],
    }


def _select(
    state: State, population: int | None, without: int | None
) -> Int64[np.ndarray, "documents experts"]:
    """Counts of each document, of its tokens of one population only where one is given."""
    kept = np.ones(len(state["document"]), dtype=bool)
    if population is not None:
        kept &= state["population"] == population
    if without is not None:
        kept &= state["block"] != without
    document, counts = state["document"][kept], state["counts"][kept]
    if not len(document):
        return counts
    first = np.flatnonzero(np.diff(document, prepend=document[0] - 1))
    return np.add.reduceat(counts, first)


REDUCTION = Reduction(
    name="document_counts",
    needs=("chosen", "document", "capacity"),
    start=_Documents,
    merge=lambda first, second: _joined([first, second]),
    select=_select,
    use=Use(of_random_router=False),
)
