"""The graph of cells and facets: pieces, diameter, degrees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int16, Int64, Integer
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from moegeom.studies.cells.graph._searches import searched


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


#: Facets that searches for the diameter pass at most, each 64 searches at once: some seconds.
MOST_PASSED = 2**31


@dataclass(frozen=True)
class FacetGraph:
    """Cells as nodes, facets as edges.

    ``diameter`` is the largest number of facets between two cells of one piece, a lower bound
    unless it ``is_diameter_exact``. Degrees are facets of a cell.
    """

    num_cells: int
    num_facets: int
    num_components: int
    largest_component: int
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
        num_cells=cells,
        num_facets=len(facets),
        num_components=int(pieces),
        largest_component=int(sizes.max()),
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
    starts, neighbour = graph.indptr.astype(np.int32), graph.indices.astype(np.int32)
    cells, size = len(starts) - 1, max(1, len(neighbour))
    bits, fresh, wider = np.empty((3, cells), np.uint64)
    is_left, longest, passed = np.ones(cells, bool), _far_apart(graph, start), 0
    while is_left.any():
        left = np.flatnonzero(is_left)
        some = left[:: -(-len(left) // 64)]
        nowhere = np.full(len(some), -1)
        most = (most_passed - passed) // size
        if most < 1:
            return longest, False
        farthest, steps = searched(
            starts, neighbour, some, nowhere, most, bits, fresh, wider, is_left
        )
        passed += steps * size
        longest = max(longest, int(farthest.max()))
        if steps > most:
            return longest, False
        is_left[some] = False
        reach = longest - farthest
        _, steps = searched(
            starts, neighbour, some, reach, int(reach.max()), bits, fresh, wider, is_left
        )
        passed += steps * size
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
