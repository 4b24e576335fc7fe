"""Figures of the cells of one slice: the graph of walls, the null, and what tokens say."""

from __future__ import annotations

import numpy as np

from moegeom.cells.exact.crossings import crossing_rate
from moegeom.cells.graph.visited_graph import visited_graph
from moegeom.cells.graph.wall_graph import wall_graph
from moegeom.cells.plane.subspace import Slice
from moegeom.cells.record import Between, Cells, NullCells, Visited
from moegeom.cells.study.found import FoundCells, find_cells
from moegeom.cells.study.request import CellsRequest
from moegeom.cells.study.tokens import TokenSample
from moegeom.cells.walk.enumeration import AllSubsets
from moegeom.cells.walk.segment_crossings import segment_crossings
from moegeom.core.router import Router
from moegeom.variants.random_router import random_router

#: Ways between two tokens on which walls are counted.
_SEGMENTS = 1000


def facts_of(found: tuple[FoundCells, ...]) -> Cells:
    """Sums over the searches, and the graph of the walls where there is one."""
    first = found[0]
    graph = None
    if first.at is None and len(first.coalition):
        graph = wall_graph(first.coalition, first.walls)
    gaps = [part.gap for part in found if part.gap is not None]
    sets = {tuple(row) for part in found for row in part.coalition.tolist()}
    is_around = first.at is not None
    return Cells(
        num_cells=len(sets),
        road=first.road,
        num_bounded=None if first.is_bounded is None else int(first.is_bounded.sum()),
        num_walls=None if is_around else len(first.walls),
        num_components=None if graph is None else graph.num_components,
        degrees=None if graph is None else (graph.degree_min, graph.degree_mean, graph.degree_max),
        diameter=None if graph is None else graph.diameter,
        is_diameter_exact=graph is None or graph.is_diameter_exact,
        num_vertices=sum(part.num_vertices for part in found),
        num_exact=sum(part.num_exact for part in found),
        gap=min(gaps, default=None),
        num_rational=sum(len(part.exact) for part in found),
    )


def null_of(router: Router, part: Slice, request: CellsRequest) -> NullCells | None:
    """The same count for routers of random rows, on the same slice and in the same bounds."""
    counts = []
    nothing = np.empty((0, part.dims))
    for number in range(request.null):
        drawn = random_router(router, request.seed + number)
        rows, offset = part.instance(drawn.weight, drawn.affine_bias)
        found = find_cells(rows, offset, router.rule.top_k, request, nothing, None)
        if isinstance(found, AllSubsets):
            counts.append(found.num_cells)
        elif found[0].is_whole:
            counts.append(len(found[0].coalition))
        else:
            return None
    sd = float(np.std(counts, ddof=1)) if len(counts) > 1 else 0.0
    return NullCells(len(counts), float(np.mean(counts)), sd)


def between_of(router: Router, sample: TokenSample | None, seed: int) -> Between | None:
    """Walls on the ways between pairs of tokens that a seed chose; None for curved walls."""
    if sample is None or not router.rule.is_affine or len(sample.inputs) < 2:
        return None
    count = min(_SEGMENTS, len(sample.inputs) // 2)
    chosen = np.random.default_rng(seed).permutation(len(sample.inputs))[: 2 * count]
    ends = sample.inputs[chosen].astype(np.float64)
    logits = ends @ router.weight.T.astype(np.float64)
    if router.affine_bias is not None:
        logits += router.affine_bias
    counted = segment_crossings(logits[:count], logits[count:], router.rule.top_k)
    length = np.linalg.norm(ends[:count] - ends[count:], axis=1)
    rate = crossing_rate(counted.count, length)
    return Between(
        num_segments=count,
        mean_crossings=float(counted.count.mean()),
        per_length=rate.per_length,
        per_length_se=rate.standard_error,
        num_exact=counted.num_exact,
    )


def visited_of(sample: TokenSample) -> Visited:
    """The graph of the sets that the tokens chose."""
    graph = visited_graph(sample.chosen)
    return Visited(
        num_coalitions=graph.num_coalitions,
        num_edges=graph.num_edges,
        num_components=graph.num_components,
        largest_share=graph.largest_share,
        is_whole=graph.is_whole,
    )
