"""The graph of cells and facets: pieces, diameter, degrees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int16, Int64, Integer
from scipy.sparse import csr_array, eye_array
from scipy.sparse.csgraph import connected_components, dijkstra


def exchanged(
    expert_set: Int16[np.ndarray, "cells k"], facets: Int64[np.ndarray, "facets 2"]
) -> tuple[Int64[np.ndarray, "facets"], Int64[np.ndarray, "facets"]]:
    """The first expert that only a facet's first cell has, and the first that only its second has.

    The only ones but where several pairs tie on one hyperplane.
    """
    rows = expert_set.astype(np.int64)
    members = np.zeros((len(rows), int(rows.max(initial=0)) + 1), dtype=bool)
    members[np.arange(len(rows))[:, None], rows] = True
    first, second = members[facets[:, 0]], members[facets[:, 1]]
    return (first & ~second).argmax(axis=1), (second & ~first).argmax(axis=1)


#: Cells up to which the diameter is found by searches from every one of them.
MOST_SEARCHED = 2**14

#: Numbers that a batch of searches holds at once.
_BATCH = 2**22


@dataclass(frozen=True)
class FacetGraph:
    """Cells as nodes, facets as edges.

    ``diameter`` is the largest number of facets between two cells of one piece; of a graph of more
    than ``most_searched`` cells it is a lower bound. Degrees are facets of a cell.
    ``one_swap_share`` is that of facets at which one expert is exchanged, nan without facets.
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
    one_swap_share: float


def facet_graph(
    expert_set: Integer[np.ndarray, "cells k"],
    facets: Int64[np.ndarray, "facets 2"],
    most_searched: int = MOST_SEARCHED,
) -> FacetGraph:
    """Figures of the graph whose edges are ``facets``, each given once, without loops.

    The diameter by breadth-first searches from every cell; beyond ``most_searched`` cells from four
    cells of the largest piece, each the farthest from the one before, which gives a lower bound.
    Raises ValueError without cells. Oracle in tests: all pairs by Floyd-Warshall.
    """
    cells, count = len(expert_set), len(facets)
    if cells == 0:
        raise ValueError("a graph of no cells")
    both = np.concatenate([facets, facets[:, ::-1]])
    graph = csr_array((np.ones(len(both)), (both[:, 0], both[:, 1])), shape=(cells, cells))
    pieces, label = connected_components(graph, directed=False)
    sizes = np.bincount(label)
    is_exact = cells <= most_searched
    if is_exact:
        diameter = _diameter(graph, cells)
    else:
        start = int(np.flatnonzero(label == np.argmax(sizes))[0])
        diameter = _far_apart(graph, start)
    degree = np.bincount(both[:, 0], minlength=cells)
    swaps = is_one_swap(expert_set, facets)
    return FacetGraph(
        num_cells=cells,
        num_facets=count,
        num_components=int(pieces),
        largest_component=int(sizes.max()),
        diameter=diameter,
        is_diameter_exact=is_exact,
        degree_min=int(degree.min()),
        degree_mean=2.0 * count / cells,
        degree_max=int(degree.max()),
        one_swap_share=float(swaps.mean()) if count else float("nan"),
    )


def is_one_swap(
    expert_set: Integer[np.ndarray, "cells k"], facets: Int64[np.ndarray, "facets 2"]
) -> Bool[np.ndarray, "facets"]:
    """Whether the two cells of each facet differ in one expert."""
    found = np.zeros(len(facets), bool)
    k = expert_set.shape[1]
    step = max(1, _BATCH // (k * k))
    for start in range(0, len(facets), step):
        some = slice(start, start + step)
        one, other = expert_set[facets[some, 0]], expert_set[facets[some, 1]]
        found[some] = (one[:, :, None] == other[:, None, :]).sum(axis=(1, 2)) == k - 1
    return found


def _diameter(graph: csr_array, cells: int) -> int:
    """The number of steps after which no cell reaches further ones, 64 sources to a word."""
    closed = csr_array(graph + eye_array(cells), dtype=np.float64)
    neighbour, starts = closed.indices, closed.indptr[:-1]
    words = max(1, _BATCH // len(neighbour))
    most = 0
    for first in range(0, cells, 64 * words):
        sources = np.arange(first, min(first + 64 * words, cells))
        bits = np.zeros((cells, (len(sources) + 63) // 64), np.uint64)
        place = sources - first
        bits[sources, place // 64] = np.uint64(1) << (place % 64).astype(np.uint64)
        steps = -1
        is_growing = True
        while is_growing:
            wider = np.bitwise_or.reduceat(bits[neighbour], starts, axis=0)
            is_growing = not np.array_equal(wider, bits)
            bits, steps = wider, steps + 1
        most = max(most, steps)
    return most


def _far_apart(graph: csr_array, node: int) -> int:
    most = 0
    for _ in range(4):
        steps = dijkstra(graph, directed=False, unweighted=True, indices=node)
        steps[np.isinf(steps)] = -1.0
        node = int(np.argmax(steps))
        most = max(most, int(steps[node]))
    return most
