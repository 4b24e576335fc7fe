"""One router on one slice: cells, arcs or pixels, and what its tokens say of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

import numpy as np

from moegeom.core.errors import RouterRuleError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float64, Int64, Integer
from moegeom.core.text import number_of
from moegeom.geometry.capacity.cell_bounds import most_cells
from moegeom.kernels.cpu.compilation import Stopwatch, stopwatch
from moegeom.routing_cells.exact.crossings import crossing_rate
from moegeom.routing_cells.exact.rank import common_tie
from moegeom.routing_cells.graph.facet_graph import facet_graph, visited_graph
from moegeom.routing_cells.plane.circle import Arcs, circle_arcs
from moegeom.routing_cells.plane.raster import plane_raster
from moegeom.routing_cells.plane.raster_frame import Frame, PixelState, Raster, plane_router
from moegeom.routing_cells.plane.subspace import Slice
from moegeom.routing_cells.record import (
    Between,
    Cells,
    CutShort,
    Outcome,
    RandomRouterCells,
    RouterCells,
    Visited,
)
from moegeom.routing_cells.study.request import CellsRequest, bounds_of
from moegeom.routing_cells.study.search import (
    SliceCells,
    cells_of_slice,
    domain_text,
    enough_vertices,
    expected_vertices,
    with_witnesses,
)
from moegeom.routing_cells.study.slices import RequestedSlice, SliceTokens, frame_of
from moegeom.routing_cells.walk.enumeration import MOST_EXPERTS, AllSubsets
from moegeom.routing_cells.walk.level_walk import WalkWatch
from moegeom.routing_cells.walk.segment_crossings import segment_crossings
from moegeom.variants.random_router import random_router

#: Dimensions in which cells are looked for from facet to facet.
MOST_DIMS = 16


@dataclass(frozen=True, eq=False)
class TokensOnSlice:
    """Tokens by their ``place`` on the slice, the ``choice`` of the slice there, its ``cell`` (-1:
    in none that is listed), and whether that is their own: what the router chooses for the token.
    """

    place: Float64[np.ndarray, "tokens dims"]
    choice: Integer[np.ndarray, "tokens k"]
    cell: Int64[np.ndarray, "tokens"]
    is_own: Bool[np.ndarray, "tokens"]


@dataclass(frozen=True, eq=False)
class SlicedRouter:
    """What there is of one router on a slice: the record for the screen, and the numbers behind it.

    ``weight`` and ``bias`` are those of the slice, for straight facets.
    """

    record: RouterCells
    router: Router
    requested: RequestedSlice
    sample: SliceTokens | None
    cells: tuple[SliceCells, ...] = ()
    tokens: TokensOnSlice | None = None
    weight: Float64[np.ndarray, "experts dims"] | None = None
    bias: Float64[np.ndarray, "experts"] | None = None
    arcs: Arcs | None = None
    pixels: Raster | None = None
    frame: tuple[float, float, float, float] | None = None

    @property
    def instance(
        self,
    ) -> tuple[Float64[np.ndarray, "experts dims"], Float64[np.ndarray, "experts"]]:
        """Rows and biases on the slice."""
        assert self.weight is not None
        assert self.bias is not None
        return self.weight, self.bias


def sliced_router(
    router: Router,
    requested: RequestedSlice,
    sample: SliceTokens | None,
    request: CellsRequest,
    watch: WalkWatch | None,
) -> SlicedRouter:
    """Cells of an affine router, arcs on a circle, pixels of any other router on a plane."""
    if router.num_experts > MOST_EXPERTS:
        raise UsageError(
            f"router {router.name}: {router.num_experts:,} experts; expected at most "
            f"{MOST_EXPERTS:,}, whose numbers fit where sets of experts are kept."
        )
    slicing = _Slicing(router, requested, sample, request)
    if requested.circle is not None:
        return slicing.arcs(requested.circle)
    return slicing.cells(watch) if router.rule.is_affine else slicing.pixels()


@dataclass(frozen=True, eq=False)
class _Slicing:
    """One router and what is asked of it."""

    router: Router
    requested: RequestedSlice
    sample: SliceTokens | None
    request: CellsRequest

    def cells(self, watch: WalkWatch | None) -> SlicedRouter:
        """Cells with straight facets."""
        router, requested, sample, request = self.router, self.requested, self.sample, self.request
        part, (weight, bias) = requested.part, _instance(router, requested)
        k, dims = router.rule.top_k, weight.shape[1]
        if sample is None:
            points = np.empty((0, dims))
        else:
            points = sample.inputs if part is None else part.coordinates(sample.inputs)
        starts = np.empty((0, dims))
        if request.at and sample is not None:
            starts = points[sample.rows_of(request.at, "at")].astype(np.float64)
        if dims > MOST_DIMS and (request.radius is not None or request.hops is not None):
            raise UsageError(
                f"{bounds_of(request)[0]} is for slices of at most {MOST_DIMS} dimensions; this "
                f"one is {requested.text} with {dims:,}.",
                "Add --subspace pca:D or random:D.",
            )
        with stopwatch() as took:
            try:
                answer = cells_of_slice(weight, bias, k, request, starts, watch)
            except UsageError as error:
                raise UsageError(f"router {router.name}: {error.message}", error.hint) from error
            if not isinstance(answer, AllSubsets):
                answer = [with_witnesses(cells, weight, bias, request) for cells in answer]
        is_central = _is_central(weight, bias)
        if isinstance(answer, AllSubsets):
            if request.box is not None or request.out is not None:
                raise UsageError(
                    f"router {router.name}: every set of {k} experts is a cell of "
                    f"{requested.text}, so there is no list.",
                    f"Add --subspace pca:D or random:D with D below {router.num_experts - 1}.",
                )
            cells, domain, facts, tokens = (), domain_text(request), None, None
            outcome: Outcome = "all subsets"
        else:
            cells, domain = tuple(answer), domain_text(request)
            is_whole = all(each.is_whole for each in cells)
            outcome = "cells" if is_whole else "unfinished"
            if cells[0].is_cone:
                domain += (
                    ", where all experts tie at one point: the cells are those of the whole slice"
                )
            facts, tokens = facts_of(cells) if is_whole else None, None
            if sample is not None and part is not None:
                listed = cells[0].expert_set if len(cells) == 1 and is_whole else None
                logits = points @ weight.T + bias
                choice = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :k], axis=1)
                tokens = _on_slice(points, choice, listed, sample)
        record = self._record(dims, domain, outcome, facts, tokens, took, is_central)
        equal = [] if k == len(weight) else equal_experts(weight, bias, request)
        random = None
        if request.random_routers and part and outcome == "cells" and request.hops is None:
            random = random_routers_of(router, part, request)
        record = replace(
            record,
            random=random,
            cut_short=_cut_short(cells, record, request) if outcome == "unfinished" else None,
            num_equal=sum(map(len, equal)),
            num_on_ties=_on_ties(tokens.choice, equal) if equal and tokens is not None else None,
        )
        return SlicedRouter(record, router, requested, sample, cells, tokens, weight, bias)

    def pixels(self) -> SlicedRouter:
        """Every rule on a plane, pixel by pixel."""
        router, sample, part = self.router, self.sample, self.requested.part
        if part is None or part.dims != 2:
            raise RouterRuleError(
                f"router {router.name}: its cells have curved facets or come from groups "
                f"({router.rule.selection_score_unit}"
                f"{', groups' if router.rule.groups is not None else ''}), so they are no "
                "polyhedra and are not listed.",
                "A plane is drawn, proved pixel by pixel: --subspace pca:2, random:2 or "
                "plane:A,B,C.",
            )
        self._refuse_out()
        for name in bounds_of(self.request):
            raise UsageError(f"{name} is for routers whose facets are straight.")
        points = None if sample is None else part.coordinates(sample.inputs)
        frame = frame_of(points, self.requested, sample, self.request, _reach(router))
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
            pixels = plane_raster(plane, Frame(*frame, self.request.pixels, self.request.pixels))
        facts = Cells(
            num_cells=len(pixels.expert_sets),
            road="interval subdivision",
            proved_share=pixels.share(PixelState.CONSTANT),
            num_open=pixels.count(PixelState.OPEN),
        )
        tokens = None
        if sample is not None and points is not None:
            tokens = _on_slice(points, plane.choice(points), np.array(pixels.expert_sets), sample)
        x0, x1, y0, y1 = frame
        window = f"x from {x0:.3g} to {x1:.3g}, y from {y0:.3g} to {y1:.3g}"
        record = self._record(2, window, "pixels", facts, tokens, took)
        return SlicedRouter(
            record, router, self.requested, sample, tokens=tokens, pixels=pixels, frame=frame
        )

    def arcs(self, circle: Float64[np.ndarray, "hidden 2"]) -> SlicedRouter:
        """Arcs of a great circle, for a router with linear facets."""
        router, requested = self.router, self.requested
        if not router.rule.is_affine:
            raise RouterRuleError(
                f"router {router.name}: on a great circle only routers with linear facets are "
                "known.",
                "A plane is drawn, proved pixel by pixel: --subspace plane:A,B,C.",
            )
        self._refuse_out()
        assert requested.centre is not None
        weight = router.weight.astype(np.float64)
        axes, offset = weight @ circle, weight @ requested.centre
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
        record = self._record(1, "", "arcs", facts, None, took)
        return SlicedRouter(record, router, requested, self.sample, arcs=arcs)

    def _refuse_out(self) -> None:
        if self.request.out is not None:
            raise UsageError(
                f"--out writes lists of cells; router {self.router.name} has none on "
                f"{self.requested.text}.",
                "--plot writes the arcs or pixels as CSV beside the picture.",
            )

    def _record(
        self,
        dims: int,
        domain: str,
        outcome: Outcome,
        facts: Cells | None,
        tokens: TokensOnSlice | None,
        took: Stopwatch,
        is_central: bool = False,
    ) -> RouterCells:
        experts, k, sample = self.router.num_experts, self.router.rule.top_k, self.sample
        is_listed = outcome in ("cells", "unfinished")
        inside = None if tokens is None else tokens.cell[tokens.cell >= 0]
        return RouterCells(
            router=self.router.name,
            num_experts=experts,
            top_k=k,
            subspace=self.requested.text,
            domain=domain,
            dims=dims,
            outcome=outcome,
            cells=facts,
            num_possible=comb(experts, k),
            most_cells=most_cells(experts, k, dims, is_central) if is_listed else None,
            expected_vertices=expected_vertices(experts, k, dims, is_central)
            if is_listed
            else None,
            seconds=took.seconds,
            variance_share=self.requested.variance_share,
            num_tokens=None if tokens is None else len(tokens.cell),
            num_own=None if tokens is None else int(tokens.is_own.sum()),
            num_cells_with_tokens=len(np.unique(inside))
            if inside is not None and len(inside)
            else None,
            left_out=0 if sample is None else sample.num_non_finite,
            between=between_of(self.router, sample, self.request.seed),
            visited=None if sample is None else visited_of(sample),
        )


def _cut_short(
    cells: tuple[SliceCells, ...], record: RouterCells, request: CellsRequest
) -> CutShort:
    is_search = any(part.road == "search" and not part.is_whole for part in cells)
    expected = None if is_search else record.expected_vertices
    return CutShort(
        most=request.vertices,
        what="cells" if is_search else "vertices",
        enough=enough_vertices(expected, request.vertices),
    )


def equal_experts(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    request: CellsRequest,
) -> list[Int64[np.ndarray, "_"]]:
    """The experts of each class whose rows and biases are equal, of two or more; none where the
    request has their numbers tell them apart.
    """
    if request.tie_broken:
        return []
    _, label, sizes = np.unique(
        np.column_stack([weight, bias]), axis=0, return_inverse=True, return_counts=True
    )
    return [np.flatnonzero(label.reshape(-1) == n) for n in np.flatnonzero(sizes > 1)]


def _on_ties(choice: Integer[np.ndarray, "tokens k"], equal: list[Int64[np.ndarray, "_"]]) -> int:
    """Tokens at whose place some of a class of equal experts are chosen and some are not."""
    is_tie = np.zeros(len(choice), bool)
    for members in equal:
        is_tie |= np.isin(np.isin(choice, members).sum(axis=1), [0, len(members)], invert=True)
    return int(is_tie.sum())


def _instance(
    router: Router, requested: RequestedSlice
) -> tuple[Float64[np.ndarray, "experts dims"], Float64[np.ndarray, "experts"]]:
    """Rows and biases on the slice; biases that are all the same change no choice, and are 0."""
    weight, bias = router.weight.astype(np.float64), router.affine_bias
    offset = None if bias is None else bias.astype(np.float64)
    if requested.part is not None:
        weight, offset = requested.part.instance(weight, offset)
    if offset is None or (offset == offset[0]).all():
        offset = np.zeros(len(weight))
    return weight, offset


def _on_slice(
    points: Float64[np.ndarray, "tokens dims"],
    choice: Integer[np.ndarray, "tokens k"],
    cells: np.ndarray | None,
    sample: SliceTokens,
) -> TokensOnSlice:
    """Tokens where they are drawn; the cell is the place of the set there among the listed ones."""
    cell = np.full(len(choice), -1)
    if cells is not None:
        number = {tuple(row): n for n, row in enumerate(cells.tolist())}
        cell = np.array([number.get(tuple(row), -1) for row in choice.tolist()], np.int64)
    return TokensOnSlice(
        points, choice, cell, (choice == np.sort(sample.chosen, axis=1)).all(axis=1)
    )


def prediction(router: Router, requested: RequestedSlice, request: CellsRequest) -> str:
    """How many vertices a random router has there, in words; empty where none are walked."""
    is_walked = request.expert_set is None and not set(bounds_of(request)) - {"box"}
    if not is_walked or not router.rule.is_affine or requested.circle is not None:
        return ""
    weight, bias = _instance(router, requested)
    experts, dims = weight.shape
    is_central = _is_central(weight, bias)
    expected = expected_vertices(experts, router.rule.top_k, dims, is_central)
    if expected is None or not np.isfinite(expected):
        return ""
    return f", about {number_of(round(expected), 'vertex', 'vertices')} expected"


def _is_central(weight: np.ndarray, bias: np.ndarray) -> bool:
    """Whether all experts tie at one point, so that cells are cones from there."""
    experts, dims = weight.shape
    if not bias.any() or dims >= experts - 1:
        return not bias.any()
    return common_tie(weight, bias) is not None


def _reach(router: Router) -> float:
    """Length of a router input behind its norm; 1 without."""
    return float(np.sqrt(router.hidden_size)) if router.gain is not None else 1.0


#: Ways between two tokens on which facets are counted.
_SEGMENTS = 1000


def facts_of(cells: tuple[SliceCells, ...]) -> Cells:
    """Sums over the searches, and the graph of the facets where there is one."""
    first = cells[0]
    graph = None
    if first.at is None and len(first.expert_set):
        graph = facet_graph(len(first.expert_set), first.facets)
    gaps = [part.gap for part in cells if part.gap is not None]
    num_cells = len(first.expert_set)
    if len(cells) > 1:
        num_cells = len({tuple(row) for part in cells for row in part.expert_set.tolist()})
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
        num_vertices=sum(part.num_vertices for part in cells),
        num_exact=sum(part.num_exact for part in cells),
        gap=min(gaps, default=None),
        num_rational=sum(len(part.exact) for part in cells),
        num_tied=None if first.tied is None else len(first.tied),
    )


def random_routers_of(
    router: Router, part: Slice, request: CellsRequest
) -> RandomRouterCells | None:
    """The same count for routers of random rows, on the same slice and in the same bounds."""
    counts = []
    nothing = np.empty((0, part.dims))
    for number in range(request.random_routers):
        other = random_router(router, request.seed + number)
        rows, offset = part.instance(other.weight, other.affine_bias)
        cells = cells_of_slice(rows, offset, router.rule.top_k, request, nothing, None)
        if isinstance(cells, AllSubsets):
            counts.append(cells.num_cells)
        elif cells[0].is_whole:
            counts.append(len(cells[0].expert_set))
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
