"""The graph of cells and facets: pieces, diameter, degrees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from moegeom.core.shapes import Int16, Int64, Integer, UInt64


@dataclass(frozen=True, eq=False)
class Swaps:
    """The experts that one of the two cells of a facet has and the other has not, ascending.

    ``num`` of them at each facet on either side: 1 but where several pairs tie on one hyperplane.
    Those that the first cell has are ``out``, facet after facet, those of the second ``into``.
    """

    num: Int64[np.ndarray, "facets"]
    out: Integer[np.ndarray, "swapped"]
    into: Integer[np.ndarray, "swapped"]

    @property
    def first(self) -> tuple[Int16[np.ndarray, "facets"], Int16[np.ndarray, "facets"]]:
        """The lowest expert of each side."""
        starts = np.cumsum(self.num) - self.num
        return self.out[starts].astype(np.int16), self.into[starts].astype(np.int16)


def swaps(
    expert_set: Integer[np.ndarray, "cells k"], facets: Int64[np.ndarray, "facets 2"]
) -> Swaps:
    """What the two cells of each facet do not share; rows of ``expert_set`` are ascending."""
    one, other = expert_set[facets[:, 0]], expert_set[facets[:, 1]]
    is_out, is_in = np.ones(one.shape, bool), np.ones(one.shape, bool)
    for c in range(one.shape[1]):
        is_out &= one != other[:, c, None]
        is_in &= other != one[:, c, None]
    return Swaps(is_out.sum(axis=1), one[is_out], other[is_in])


#: Facets that searches for the diameter pass at most, each 64 searches at once: some seconds; and
#: words of 64 bits that are held meanwhile.
MOST_PASSED, _MOST_WORDS = 2**31, 2**27


@dataclass(frozen=True)
class FacetGraph:
    """Cells as nodes, facets as edges.

    ``diameter`` is the largest number of facets between two cells of one piece, a lower bound
    unless it ``is_diameter_exact``. Degrees are facets of a cell.
    """

    num_components: int
    diameter: int
    is_diameter_exact: bool
    degree_min: int
    degree_mean: float
    degree_max: int


def facet_graph(
    cells: int, facets: Int64[np.ndarray, "facets 2"], most_passed: int = MOST_PASSED
) -> FacetGraph:
    """Figures of the graph whose edges are ``facets``, each given once, without loops.

    Where the diameter needs more than ``most_passed`` facets to be passed, it is the longest way
    that was found until then. Raises ValueError without cells. Oracle in tests: all pairs by
    Floyd-Warshall, networkx.
    """
    if cells == 0:
        raise ValueError("a graph of no cells")
    both = np.concatenate([facets, facets[:, ::-1]])
    graph = csr_array((np.ones(len(both)), (both[:, 0], both[:, 1])), shape=(cells, cells))
    pieces, label = connected_components(graph, directed=False)
    sizes = np.bincount(label)
    start = int(np.flatnonzero(label == np.argmax(sizes))[0])
    diameter, is_exact = _diameter(graph, start, most_passed)
    degree = np.bincount(both[:, 0], minlength=cells)
    return FacetGraph(
        num_components=int(pieces),
        diameter=diameter,
        is_diameter_exact=is_exact,
        degree_min=int(degree.min()),
        degree_mean=2.0 * len(facets) / cells,
        degree_max=int(degree.max()),
    )


def _diameter(graph: csr_array, start: int, most_passed: int) -> tuple[int, bool]:
    r"""The diameter from searches of some cells, or a lower bound of it.

    A cell v that is :math:`d(s, v)` facets from one searched before, whose farthest cell is
    :math:`e(s)` away, has none farther than :math:`d(s, v) + e(s)`. Where that is no more than the
    longest way found so far, v needs no search. Of those that do, 64 all over the list are next.
    Source: Takes and Kosters, "Determining the diameter of small world networks", 2011.
    """
    size, passed, longest = max(1, graph.nnz), 0, _far_apart(graph, start)
    neighbour, linked = graph.indices.astype(np.intp), np.flatnonzero(np.diff(graph.indptr))
    starts = graph.indptr[linked].astype(np.intp)
    is_left = np.ones(len(graph.indptr) - 1, bool)
    while is_left.any():
        left = np.flatnonzero(is_left)
        sources = left[:: -(-len(left) // 64)]
        most = min((most_passed - passed) // size, _MOST_WORDS // len(is_left))
        if most < 1:
            return longest, False
        own = np.uint64(1) << np.arange(len(sources), dtype=np.uint64)
        fresh = np.zeros(len(is_left), np.uint64)
        fresh[sources] = own
        # for 0, 1, 2 ... steps the sources that reach each cell, a bit each
        reached = [fresh]
        while fresh.any() and len(linked) and len(reached) <= most:
            wider = reached[-1].copy()
            wider[linked] |= np.bitwise_or.reduceat(fresh.take(neighbour), starts)
            fresh = wider ^ reached[-1]
            reached.append(wider)
        farthest = np.zeros(len(sources), np.int64)
        for steps, (before, after) in enumerate(pairwise(reached), 1):
            farthest[(np.bitwise_or.reduce(before ^ after) & own) != 0] = steps
        passed += size * len(reached)
        longest = max(longest, int(farthest.max()))
        if fresh.any() and len(linked):
            return longest, False
        reach = np.minimum(longest - farthest, len(reached) - 1)
        for steps in np.unique(reach).tolist():
            is_left &= (reached[steps] & np.bitwise_or.reduce(own[reach == steps])) == 0
    return longest, True


def _far_apart(graph: csr_array, cell: int) -> int:
    """Facets between two cells far apart: each of four is the farthest from the one before."""
    most = 0
    for _ in range(4):
        order, before = breadth_first_order(graph, cell)
        cell = at = int(order[-1])
        steps = 0
        while before[at] >= 0:
            at, steps = int(before[at]), steps + 1
        most = max(most, steps)
    return most


# ------------------------------------------------------------------------------------- visited sets
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
        first = int(self.tokens[self.component == 0].sum())
        return first / self.num_tokens if self.num_tokens else float("nan")


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
    rows, total = rows.astype(np.int64), len(rows)
    room = max(1, most_slots // max(1, k))
    if total > room:
        most_visited = np.sort(np.argsort(-tokens, kind="stable")[:room])
        rows, tokens = rows[most_visited], tokens[most_visited]
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
        num_expert_sets=total,
        is_whole=total == len(rows),
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
