"""The graph of cells and facets: pieces, diameter, degrees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from moegeom.core.shapes import Int16, Int64, Integer


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
    unless it ``is_diameter_exact``. ``degrees`` are the least, mean and most facets of a cell.
    """

    num_components: int
    degrees: tuple[int, float, int]
    diameter: int
    is_diameter_exact: bool


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
    degrees = int(degree.min()), 2.0 * len(facets) / cells, int(degree.max())
    return FacetGraph(int(pieces), degrees, diameter, is_exact)


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


@dataclass(frozen=True)
class Visited:
    """The graph of the expert sets that tokens chose: pieces of sets that differ in one expert.

    ``largest_share`` of all tokens are in the piece that most of them visit; nan without tokens.
    ``is_whole`` is False where only the most visited of ``num_expert_sets`` became nodes: then
    those left out may join the pieces. ``shares`` of the tokens are in the 1, 2, 4 ... most visited
    of all sets, the last in all of them.
    """

    num_expert_sets: int
    num_edges: int
    num_components: int
    largest_share: float
    is_whole: bool
    shares: tuple[float, ...] = ()


def visited_graph(chosen: Integer[np.ndarray, "tokens k"], most_slots: int = MOST_SLOTS) -> Visited:
    r"""The graph of the expert sets in ``chosen``: :math:`|S \cap S'| = k - 1` joins two of them.

    Two such expert sets share one set of k - 1 experts and no other, so that sorting those sets
    finds every edge once, and no list of edges is kept: time and memory grow as nodes times k.
    Where that is over ``most_slots`` the expert sets with the most tokens become nodes, of equals
    the first in order. Experts of a row are distinct, in any order.

    Oracle in tests: all pairs.
    """
    k = chosen.shape[1]
    rows, tokens = np.unique(np.sort(chosen, axis=1), axis=0, return_counts=True)
    total, room = len(rows), max(1, most_slots // max(1, k))
    within = np.cumsum(np.sort(tokens)[::-1])
    counts = 2 ** np.arange(max(total - 1, 0).bit_length() + 1) if total else np.empty(0, np.int64)
    if total > room:
        most_visited = np.sort(np.argsort(-tokens, kind="stable")[:room])
        rows, tokens = rows[most_visited], tokens[most_visited]
    # each slot is a node without one of its experts; those with equal rests share a bucket
    node, bucket = np.repeat(np.arange(len(rows)), k), _buckets(rows)
    size = np.bincount(bucket)
    joined = csr_array(
        (np.ones(len(node), np.int8), (node, len(rows) + bucket)),
        shape=(len(rows) + len(size),) * 2,
    )
    pieces, component = connected_components(joined, directed=False)
    shares = np.bincount(component[: len(rows)], weights=tokens, minlength=1)
    return Visited(
        num_expert_sets=total,
        num_edges=int((size * (size - 1)).sum()) // 2,
        num_components=int(pieces),
        largest_share=float(shares.max()) / len(chosen) if len(chosen) else float("nan"),
        is_whole=total == len(rows),
        shares=tuple((within[np.minimum(counts, total) - 1] / len(chosen)).tolist()),
    )


def _buckets(rows: Integer[np.ndarray, "nodes k"]) -> Int64[np.ndarray, "slots"]:
    """For each node and each of its experts left out the number of what remains."""
    nodes, k = rows.shape
    if nodes == 0 or k == 1:
        return np.zeros(nodes * k, np.int64)
    others = np.array([[c for c in range(k) if c != left] for left in range(k)])
    rest = np.ascontiguousarray(rows[:, others].reshape(nodes * k, k - 1))
    keys = rest.view(np.dtype((np.void, rest.itemsize * (k - 1))))[:, 0]
    return np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)
