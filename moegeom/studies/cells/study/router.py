"""One router on one slice: cells, arcs or pixels, and what its tokens say of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer

from moegeom.core.errors import RouterRuleError, UsageError
from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.geometry.capacity.cell_bounds import most_cells
from moegeom.kernels.cpu.compilation import Stopwatch, stopwatch
from moegeom.studies.cells.exact.crossings import crossing_rate
from moegeom.studies.cells.exact.rank import common_tie
from moegeom.studies.cells.graph.facet_graph import facet_graph, visited_graph
from moegeom.studies.cells.plane.circle import Arcs, circle_arcs
from moegeom.studies.cells.plane.raster import plane_raster
from moegeom.studies.cells.plane.raster_frame import Frame, PixelState, Raster, plane_router
from moegeom.studies.cells.plane.subspace import Slice
from moegeom.studies.cells.record import (
    Between,
    Cells,
    CutShort,
    Outcome,
    RandomRouterCells,
    RouterCells,
    Visited,
)
from moegeom.studies.cells.study.found import (
    FoundCells,
    domain_text,
    enough_vertices,
    expected_vertices,
    find_cells,
    with_witnesses,
)
from moegeom.studies.cells.study.request import CellsRequest, bounds_of
from moegeom.studies.cells.study.slices import RequestedSlice, SliceTokens, frame_of
from moegeom.studies.cells.walk.enumeration import MOST_EXPERTS, AllSubsets
from moegeom.studies.cells.walk.level_walk import WalkWatch
from moegeom.studies.cells.walk.segment_crossings import segment_crossings
from moegeom.variants.random_router import random_router

#: Dimensions in which cells are looked for from facet to facet.
MOST_DIMS = 16


@dataclass(frozen=True, eq=False)
class Placed:
    """Tokens on the slice: where, what is ``drawn`` there (chosen by the slice), in which cell (-1:
    in none that is listed), and whether it is their own: what the router chooses for the token.
    """

    place: Float64[np.ndarray, "tokens dims"]
    drawn: Integer[np.ndarray, "tokens k"]
    cell: Int64[np.ndarray, "tokens"]
    is_own: Bool[np.ndarray, "tokens"]


@dataclass(frozen=True, eq=False)
class Looked:
    """What was found of one router: the record for the screen, and the numbers behind it."""

    record: RouterCells
    router: Router
    asked: RequestedSlice
    sample: SliceTokens | None
    found: tuple[FoundCells, ...] = ()
    placed: Placed | None = None
    part: Slice | None = None
    weight: Float64[np.ndarray, "experts dims"] | None = None
    bias: Float64[np.ndarray, "experts"] | None = None
    arcs: Arcs | None = None
    pixels: Raster | None = None
    frame: tuple[float, float, float, float] | None = None


def look_at(
    router: Router,
    asked: RequestedSlice,
    sample: SliceTokens | None,
    request: CellsRequest,
    told: WalkWatch | None,
) -> Looked:
    """Cells of an affine router, arcs on a circle, pixels of any other router on a plane."""
    if router.num_experts > MOST_EXPERTS:
        raise UsageError(
            f"router {router.name}: {router.num_experts:,} experts; expected at most "
            f"{MOST_EXPERTS:,}, whose numbers fit where sets of experts are kept."
        )
    if asked.circle is not None:
        return _on_circle(router, asked, sample, request)
    if not router.rule.is_affine:
        return _by_pixels(router, asked, sample, request)
    return _by_cells(router, asked, sample, request, told)


def _refuse_out(router: Router, asked: RequestedSlice, request: CellsRequest) -> None:
    if request.out is not None:
        raise UsageError(
            f"--out writes lists of cells; router {router.name} has none on {asked.text}.",
            "--plot writes the arcs or pixels as CSV beside the picture.",
        )


def _by_cells(
    router: Router,
    asked: RequestedSlice,
    sample: SliceTokens | None,
    request: CellsRequest,
    told: WalkWatch | None,
) -> Looked:
    part, (weight, offset) = asked.part, _instance(router, asked)
    k, dims = router.rule.top_k, weight.shape[1]
    if sample is None:
        points = np.empty((0, dims))
    else:
        points = sample.inputs if part is None else part.coordinates(sample.inputs)
    starts = _starts(request, sample, points)
    if dims > MOST_DIMS and (request.radius is not None or request.hops is not None):
        raise UsageError(
            f"{bounds_of(request)[0]} is for slices of at most {MOST_DIMS} dimensions; this one is "
            f"{asked.text} with {dims:,}.",
            "Add --subspace pca:D or random:D.",
        )
    with stopwatch() as took:
        try:
            answer = find_cells(weight, offset, k, request, starts, told)
        except UsageError as error:
            raise UsageError(f"router {router.name}: {error.message}", error.hint) from error
        if not isinstance(answer, AllSubsets):
            answer = [with_witnesses(part, weight, offset, request) for part in answer]
    if isinstance(answer, AllSubsets) and (request.box is not None or request.out is not None):
        raise UsageError(
            f"router {router.name}: every set of {k} experts is a cell of {asked.text}, so there "
            "is no list.",
            f"Add --subspace pca:D or random:D with D below {router.num_experts - 1}.",
        )
    found: tuple[FoundCells, ...] = ()
    outcome: Outcome = "all subsets"
    placed, facts, random = None, None, None
    domain = domain_text(request)
    if not isinstance(answer, AllSubsets):
        is_whole = all(part.is_whole for part in answer)
        found = tuple(answer)
        outcome = "cells" if is_whole else "unfinished"
        if found[0].is_cone:
            domain += ", where all experts tie at one point: the cells are those of the whole slice"
        facts = facts_of(found) if is_whole else None
        if sample is not None and part is not None:
            cells = found[0].expert_set if len(found) == 1 and is_whole else None
            placed = _placed(points, sample, weight, offset, k, cells)
    if request.random_routers and part is not None and outcome == "cells" and request.hops is None:
        random = random_routers_of(router, part, request)
    record = _record(
        router,
        asked,
        sample,
        dims,
        domain,
        outcome,
        facts,
        placed,
        took,
        request.seed,
        is_central=_is_central(weight, offset),
    )
    equal = [] if k == len(weight) else equal_experts(weight, offset, request)
    record = replace(
        record,
        random=random,
        cut_short=_cut_short(found, record, request) if outcome == "unfinished" else None,
        num_equal=sum(map(len, equal)),
        num_on_ties=_on_ties(placed.drawn, equal) if equal and placed is not None else None,
    )
    return Looked(record, router, asked, sample, found, placed, part, weight, offset)


def _cut_short(
    found: tuple[FoundCells, ...], record: RouterCells, request: CellsRequest
) -> CutShort:
    is_search = any(part.road == "search" and not part.is_whole for part in found)
    expected = None if is_search else record.expected_vertices
    return CutShort(
        most=request.vertices,
        what="cells" if is_search else "vertices",
        enough=enough_vertices(expected, request.vertices),
    )


def equal_experts(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    request: CellsRequest,
) -> list[Int64[np.ndarray, "_"]]:
    """The experts of each class whose rows and biases are equal, of two or more; none where the
    request has their numbers tell them apart.
    """
    if request.tie_broken:
        return []
    offset = np.zeros(len(weight)) if bias is None else bias
    _, label, sizes = np.unique(
        np.column_stack([weight, offset]), axis=0, return_inverse=True, return_counts=True
    )
    return [np.flatnonzero(label.reshape(-1) == n) for n in np.flatnonzero(sizes > 1)]


def _on_ties(drawn: Integer[np.ndarray, "tokens k"], equal: list[Int64[np.ndarray, "_"]]) -> int:
    """Tokens at whose place some of a class of equal experts are chosen and some are not."""
    is_tie = np.zeros(len(drawn), bool)
    for members in equal:
        is_tie |= np.isin(np.isin(drawn, members).sum(axis=1), [0, len(members)], invert=True)
    return int(is_tie.sum())


def _instance(
    router: Router, asked: RequestedSlice
) -> tuple[Float64[np.ndarray, "experts dims"], Float64[np.ndarray, "experts"] | None]:
    """Rows and biases on the slice; None for biases that are all the same, which change no
    choice.
    """
    weight, bias = router.weight.astype(np.float64), router.affine_bias
    offset = None if bias is None else bias.astype(np.float64)
    if asked.part is not None:
        weight, offset = asked.part.instance(weight, offset)
    return weight, None if offset is None or (offset == offset[0]).all() else offset


def _starts(
    request: CellsRequest, sample: SliceTokens | None, points: np.ndarray
) -> Float64[np.ndarray, "points dims"]:
    """Where the tokens ``at`` lie on the slice."""
    if not request.at or sample is None:
        return np.empty((0, points.shape[1]))
    return points[sample.rows_of(request.at, "at")].astype(np.float64)


def _placed(
    points: Float64[np.ndarray, "tokens dims"],
    sample: SliceTokens,
    weight: Float64[np.ndarray, "experts dims"],
    offset: Float64[np.ndarray, "experts"] | None,
    k: int,
    cells: np.ndarray | None,
) -> Placed:
    logits = points @ weight.T + (0.0 if offset is None else offset)
    drawn = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :k], axis=1)
    return Placed(points, drawn, _numbers(drawn, cells), _is_equal(drawn, sample))


def _is_equal(drawn: np.ndarray, sample: SliceTokens) -> Bool[np.ndarray, "tokens"]:
    return (drawn == np.sort(sample.chosen, axis=1)).all(axis=1)


def _numbers(drawn: np.ndarray, cells: np.ndarray | None) -> Int64[np.ndarray, "tokens"]:
    """The place of each set among the cells; -1 for one that is not listed."""
    if cells is None:
        return np.full(len(drawn), -1)
    number = {tuple(row): n for n, row in enumerate(cells.tolist())}
    return np.array([number.get(tuple(row), -1) for row in drawn.tolist()], np.int64)


def _record(
    router: Router,
    asked: RequestedSlice,
    sample: SliceTokens | None,
    dims: int,
    domain: str,
    outcome: Outcome,
    facts: Cells | None,
    placed: Placed | None,
    took: Stopwatch,
    seed: int,
    is_central: bool = False,
) -> RouterCells:
    experts, k = router.num_experts, router.rule.top_k
    is_sliced = router.rule.is_affine and asked.circle is None and outcome != "all subsets"
    return RouterCells(
        router=router.name,
        num_experts=experts,
        top_k=k,
        subspace=asked.text,
        domain=domain,
        dims=dims,
        outcome=outcome,
        cells=facts,
        num_possible=comb(experts, k),
        most_cells=most_cells(experts, k, dims, is_central) if is_sliced else None,
        expected_vertices=expected_vertices(experts, k, dims, is_central) if is_sliced else None,
        seconds=took.seconds,
        variance_share=asked.variance_share,
        num_tokens=None if placed is None else len(placed.cell),
        num_own=None if placed is None else int(placed.is_own.sum()),
        num_cells_with_tokens=_with_tokens(placed),
        left_out=0 if sample is None else sample.num_non_finite,
        between=between_of(router, sample, seed),
        visited=None if sample is None else visited_of(sample),
    )


def prediction(router: Router, asked: RequestedSlice, request: CellsRequest) -> str:
    """How many vertices a random router has there, in words; empty where none are walked."""
    is_walked = request.expert_set is None and not set(bounds_of(request)) - {"box"}
    if not is_walked or not router.rule.is_affine or asked.circle is not None:
        return ""
    weight, offset = _instance(router, asked)
    experts, dims = weight.shape
    is_central = _is_central(weight, offset)
    expected = expected_vertices(experts, router.rule.top_k, dims, is_central)
    if expected is None or not np.isfinite(expected):
        return ""
    return f", about {number_of(round(expected), 'vertex', 'vertices')} expected"


def _is_central(weight: np.ndarray, offset: np.ndarray | None) -> bool:
    """Whether all experts tie at one point, so that cells are cones from there."""
    experts, dims = weight.shape
    if offset is None or dims >= experts - 1:
        return offset is None
    return common_tie(weight, offset) is not None


def _with_tokens(placed: Placed | None) -> int | None:
    if placed is None or (placed.cell < 0).all():
        return None
    return len(np.unique(placed.cell[placed.cell >= 0]))


def _by_pixels(
    router: Router,
    asked: RequestedSlice,
    sample: SliceTokens | None,
    request: CellsRequest,
) -> Looked:
    """Every rule on a plane, pixel by pixel."""
    part = asked.part
    if part is None or part.dims != 2:
        raise RouterRuleError(
            f"router {router.name}: its cells have curved facets or come from groups "
            f"({router.rule.selection_score_unit}"
            f"{', groups' if router.rule.groups is not None else ''}), so they are no polyhedra "
            "and are not listed.",
            "A plane is drawn, proved pixel by pixel: --subspace pca:2, random:2 or plane:A,B,C.",
        )
    _refuse_out(router, asked, request)
    for name in bounds_of(request):
        raise UsageError(f"{name} is for routers whose facets are straight.")
    points = None if sample is None else part.coordinates(sample.inputs)
    frame = frame_of(points, asked, sample, request, _reach(router))
    plane = plane_router(
        router.rule,
        router.weight,
        router.logit_bias,
        router.selection_bias,
        part.centre,
        part.basis,
        router.projection,
    )
    with stopwatch() as took:
        found = plane_raster(plane, Frame(*frame, request.pixels, request.pixels))
    facts = Cells(
        num_cells=len(found.expert_sets),
        road="interval subdivision",
        proved_share=found.share(PixelState.CONSTANT),
        num_open=found.count(PixelState.OPEN),
    )
    placed = None
    if sample is not None and points is not None:
        drawn = plane.choice(points)
        cells = np.array(found.expert_sets)
        placed = Placed(points, drawn, _numbers(drawn, cells), _is_equal(drawn, sample))
    seed, window = request.seed, _window(frame)
    record = _record(router, asked, sample, 2, window, "pixels", facts, placed, took, seed)
    return Looked(record, router, asked, sample, (), placed, part, pixels=found, frame=frame)


def _window(frame: tuple[float, float, float, float]) -> str:
    x0, x1, y0, y1 = frame
    return f"x from {x0:.3g} to {x1:.3g}, y from {y0:.3g} to {y1:.3g}"


def _reach(router: Router) -> float:
    """Length of a router input behind its norm; 1 without."""
    return float(np.sqrt(router.hidden_size)) if router.gain is not None else 1.0


def _on_circle(
    router: Router,
    asked: RequestedSlice,
    sample: SliceTokens | None,
    request: CellsRequest,
) -> Looked:
    if not router.rule.is_affine:
        raise RouterRuleError(
            f"router {router.name}: on a great circle only routers with linear facets are known.",
            "A plane is drawn, proved pixel by pixel: --subspace plane:A,B,C.",
        )
    _refuse_out(router, asked, request)
    assert asked.circle is not None
    assert asked.centre is not None
    weight = router.weight.astype(np.float64)
    axes, offset = weight @ asked.circle, weight @ asked.centre
    if router.affine_bias is not None:
        offset = offset + router.affine_bias
    with stopwatch() as took:
        arcs = circle_arcs(axes[:, 0], axes[:, 1], offset, router.rule.top_k)
    lengths = arcs.stop - arcs.start
    facts = Cells(
        num_cells=len(np.unique(arcs.expert_set, axis=0)),
        road="circle",
        num_facets=len(arcs.start) if len(arcs.start) > 1 else 0,
        proved_share=float(lengths[arcs.is_proved].sum() / (2.0 * np.pi)),
    )
    record = _record(router, asked, sample, 1, "", "arcs", facts, None, took, request.seed)
    return Looked(record, router, asked, sample, arcs=arcs)


#: Ways between two tokens on which facets are counted.
_SEGMENTS = 1000


def facts_of(found: tuple[FoundCells, ...]) -> Cells:
    """Sums over the searches, and the graph of the facets where there is one."""
    first = found[0]
    graph = None
    if first.at is None and len(first.expert_set):
        graph = facet_graph(len(first.expert_set), first.facets)
    gaps = [part.gap for part in found if part.gap is not None]
    num_cells = len(first.expert_set)
    if len(found) > 1:
        num_cells = len({tuple(row) for part in found for row in part.expert_set.tolist()})
    is_around = first.at is not None
    return Cells(
        num_cells=num_cells,
        road=first.road,
        num_bounded=None if first.is_bounded is None else int(first.is_bounded.sum()),
        num_facets=None if is_around else len(first.facets),
        num_components=None if graph is None else graph.num_components,
        degrees=None if graph is None else (graph.degree_min, graph.degree_mean, graph.degree_max),
        diameter=None if graph is None else graph.diameter,
        is_diameter_exact=graph is None or graph.is_diameter_exact,
        num_vertices=sum(part.num_vertices for part in found),
        num_exact=sum(part.num_exact for part in found),
        gap=min(gaps, default=None),
        num_rational=sum(len(part.exact) for part in found),
        num_tied=None if first.tied is None else len(first.tied),
    )


def random_routers_of(
    router: Router, part: Slice, request: CellsRequest
) -> RandomRouterCells | None:
    """The same count for routers of random rows, on the same slice and in the same bounds."""
    counts = []
    nothing = np.empty((0, part.dims))
    for number in range(request.random_routers):
        drawn = random_router(router, request.seed + number)
        rows, offset = part.instance(drawn.weight, drawn.affine_bias)
        found = find_cells(rows, offset, router.rule.top_k, request, nothing, None)
        if isinstance(found, AllSubsets):
            counts.append(found.num_cells)
        elif found[0].is_whole:
            counts.append(len(found[0].expert_set))
        else:
            return None
    sd = float(np.std(counts, ddof=1)) if len(counts) > 1 else 0.0
    return RandomRouterCells(len(counts), float(np.mean(counts)), sd)


def between_of(router: Router, sample: SliceTokens | None, seed: int) -> Between | None:
    """Facets on the ways between pairs of tokens that a seed chose; None for curved facets."""
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


def visited_of(sample: SliceTokens) -> Visited:
    """The graph of the sets that the tokens chose."""
    graph = visited_graph(sample.chosen)
    return Visited(
        num_expert_sets=graph.num_expert_sets,
        num_edges=graph.num_edges,
        num_components=graph.num_components,
        largest_share=graph.largest_share,
        is_whole=graph.is_whole,
    )
