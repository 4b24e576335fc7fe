"""Which of the expert sets that tokens chose are neighbours, and into how many pieces they fall."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

#: Expert sets times k that are joined at once: some 100 bytes each.
MOST_SLOTS = 2**22


@dataclass(frozen=True, eq=False)
class VisitedGraph:
    """Distinct expert sets, joined where they differ in one expert.

    ``component`` numbers the pieces by falling share of tokens, from 0; ``degree`` counts the
    neighbours among the nodes. ``num_tokens`` are all tokens. ``is_whole`` is False where only the
    most visited expert sets became nodes: then those left out may join the pieces.
    """

    expert_set: Int64[np.ndarray, "nodes k"]
    tokens: Int64[np.ndarray, "nodes"]
    component: Int64[np.ndarray, "nodes"]
    degree: Int64[np.ndarray, "nodes"]
    num_tokens: int
    num_expert_sets: int
    is_whole: bool

    @property
    def num_edges(self) -> int:
        """Pairs of nodes that differ in one expert."""
        return int(self.degree.sum()) // 2

    @property
    def num_components(self) -> int:
        """Pieces."""
        return int(self.component.max(initial=-1)) + 1

    @property
    def largest_share(self) -> float:
        """Share of all tokens in the piece that most of them visit; nan without tokens."""
        return self._share(self.component == 0)

    def _share(self, some: Bool[np.ndarray, "nodes"]) -> float:
        return int(self.tokens[some].sum()) / self.num_tokens if self.num_tokens else float("nan")


def visited_graph(
    chosen: Integer[np.ndarray, "tokens k"], most_slots: int = MOST_SLOTS
) -> VisitedGraph:
    r"""The graph of the expert sets in ``chosen``: :math:`|S \cap S'| = k - 1` joins two of them.

    Two such expert sets share one set of k - 1 experts and no other, so that sorting those sets
    finds every edge once, and no list of edges is kept: time and memory grow as nodes times k.
    Where that is over ``most_slots`` the expert sets with the most tokens become nodes, of equals
    the first in order, and ``is_whole`` is False. Experts of a row are distinct, in any order.

    Oracle in tests: all pairs.
    """
    k = chosen.shape[1]
    rows, tokens = np.unique(np.sort(chosen, axis=1), axis=0, return_counts=True)
    rows, found = rows.astype(np.int64), len(rows)
    room = max(1, most_slots // max(1, k))
    if found > room:
        kept = np.sort(np.argsort(-tokens, kind="stable")[:room])
        rows, tokens = rows[kept], tokens[kept]
    node, bucket = _buckets(rows)
    size = np.bincount(bucket)
    degree = np.bincount(node, weights=size[bucket] - 1.0, minlength=len(rows)).astype(np.int64)
    component = _pieces(node, bucket, len(rows), len(size))
    weight = np.bincount(component, weights=tokens) if len(rows) else np.empty(0)
    place = np.empty(len(weight), np.int64)
    place[np.argsort(-weight, kind="stable")] = np.arange(len(weight))
    return VisitedGraph(
        expert_set=rows,
        tokens=tokens.astype(np.int64),
        component=place[component],
        degree=degree,
        num_tokens=len(chosen),
        num_expert_sets=found,
        is_whole=found == len(rows),
    )


def _buckets(
    rows: Int64[np.ndarray, "nodes k"],
) -> tuple[Int64[np.ndarray, "slots"], Int64[np.ndarray, "slots"]]:
    """For each node and each of its experts left out: the node, and the number of what remains.

    Sets are told apart by a sum of random words, and the sums are checked by the sets themselves.
    """
    nodes, k = rows.shape
    if nodes == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    experts, code = np.unique(rows, return_inverse=True)
    code = code.reshape(rows.shape)
    node = np.repeat(np.arange(nodes), k)
    seed = 0
    while True:
        key = _keys(code, len(experts), seed)
        _, first, bucket = np.unique(key, return_index=True, return_inverse=True)
        bucket = bucket.reshape(-1)
        if _is_same(rows, first[bucket]):
            return node, bucket.astype(np.int64)
        seed += 1


def _keys(
    code: Integer[np.ndarray, "nodes k"], num_experts: int, seed: int
) -> UInt64[np.ndarray, "slots"]:
    words = np.random.default_rng(seed).integers(0, 2**64, num_experts, np.uint64)
    own = words[code]
    return (own.sum(axis=1, dtype=np.uint64)[:, None] - own).reshape(-1)


def _is_same(rows: Int64[np.ndarray, "nodes k"], first: Int64[np.ndarray, "slots"]) -> bool:
    """Whether each slot has the same experts left as the slot it was put to."""
    nodes, k = rows.shape
    others = np.array([[c for c in range(k) if c != left] for left in range(k)], np.int64)
    step = max(1, 2**22 // (k * k))
    for start in range(0, nodes, step):
        stop = min(start + step, nodes)
        own = rows[start:stop][:, others].reshape((stop - start) * k, k - 1)
        slots = first[start * k : stop * k]
        if not np.array_equal(own, rows[(slots // k)[:, None], others[slots % k]]):
            return False
    return True


def _pieces(
    node: Int64[np.ndarray, "slots"],
    bucket: Int64[np.ndarray, "slots"],
    nodes: int,
    buckets: int,
) -> Int64[np.ndarray, "nodes"]:
    """Pieces of the graph in which every bucket is a node too, joined to its members."""
    total = nodes + buckets
    joined = csr_array((np.ones(len(node), np.int8), (node, nodes + bucket)), shape=(total, total))
    return connected_components(joined, directed=False)[1][:nodes].astype(np.int64)
