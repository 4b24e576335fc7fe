"""One router on one slice: the search for its cells, arcs or pixels, and its tokens among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import comb
from typing import Any

import numpy as np

from moegeom.core.errors import InternalError, RouterRuleError, UsageError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float64, Int64, Integer
from moegeom.core.text import number_of
from moegeom.engine.plan import num_workers
from moegeom.engine.request import Watch
from moegeom.geometry.capacity import expected_diagram, most_cells
from moegeom.kernels.cpu.compilation import Stopwatch, stopwatch
from moegeom.routing_cells.ball import ball_cells
from moegeom.routing_cells.exact.certificate import strict_witnesses
from moegeom.routing_cells.exact.dictionary import common_tie, equal_classes, num_parallel
from moegeom.routing_cells.facet_graph import facet_graph, swaps, visited_graph
from moegeom.routing_cells.plane.raster import (
    Frame,
    PixelState,
    Raster,
    chunks,
    plane_raster,
    plane_router,
)
from moegeom.routing_cells.plane.subspace import Arcs, Slice, circle_arcs
from moegeom.routing_cells.record import (
    Between,
    Cells,
    CutShort,
    Outcome,
    RandomRouterCells,
    RouterCells,
)
from moegeom.routing_cells.request import CellsRequest
from moegeom.routing_cells.slices import RequestedSlice, SliceTokens, frame_of
from moegeom.routing_cells.walk.enumeration import (
    MOST_EXPERTS,
    AllSubsets,
    Enumeration,
    enumerate_cells,
)
from moegeom.routing_cells.walk.level_walk import WalkWatch
from moegeom.routing_cells.walk.segment_crossings import crossing_rate, segment_crossings
from moegeom.variants.random_router import random_router

#: Rows and biases.
Instance = tuple[Float64[np.ndarray, "experts dims"], Float64[np.ndarray, "experts"]]

#: Dimensions in which cells are looked for from facet to facet.
MOST_DIMS = 16


@dataclass(frozen=True, eq=False)
class TokensOnSlice:
    """Tokens by their ``place`` on the slice, with what the slice chooses there.

    ``cell`` is that choice as a number, -1 for one that is not listed; ``is_own`` where the router
    chooses the same for the token.
    """

    place: Float64[np.ndarray, "tokens dims"]
    choice: Integer[np.ndarray, "tokens k"]
    cell: Int64[np.ndarray, "tokens"]
    is_own: Bool[np.ndarray, "tokens"]


@dataclass(frozen=True, eq=False)
class RouterOnSlice:
    """One router with its slice, its tokens and the request."""

    router: Router
    requested: RequestedSlice
    sample: SliceTokens | None
    request: CellsRequest


@dataclass(frozen=True, eq=False, kw_only=True)
class SlicedRouter(RouterOnSlice):
    """What there is of one router on a slice: the record for the screen, and the numbers behind it.

    The ``instance`` are rows and biases on the slice, for straight facets.
    """

    record: RouterCells
    cells: Enumeration | None = None
    tokens: TokensOnSlice | None = None
    instance: Instance | None = None
    arcs: Arcs | None = None
    pixels: Raster | None = None
    frame: tuple[float, float, float, float] | None = None


#: Answers in exact arithmetic after which a note says that they take long: some seconds.
_LONG = 500


class CellsListener:
    """Tells a watch of a router part by part: of inputs that are read, of pixels that are decided,
    of vertices that are walked; and once that a walk will take long.

    The note appears where no progress is shown, too.
    """

    def __init__(self, watch: Watch | None) -> None:
        self._watch, self._router, self._has_noted = watch, "", False
        self._before = self._total = self._num_done = 0

    def begin(self, router: str, text: str = "") -> None:
        """A router, and later what is expected of it."""
        self._has_noted &= router == self._router
        self._router, self._before = router, self._total
        if self._watch is not None:
            self._watch.begin(f"{router}{text}")

    def part(self, size: int) -> Callable[[int], None]:
        """What hears how much more is done of a further part of so many steps."""
        self._before, done = self._total, 0
        self(0, size)

        def advance(more: int) -> None:
            nonlocal done
            done = min(done + more, size)
            self(done, size)

        return advance

    def __call__(self, num_done: int, num_known: int) -> None:
        """How many steps of the part are done of those that are known."""
        before, self._total = self._total, self._before + num_known
        if self._watch is not None:
            if before != self._total:
                self._watch.start(self._total)
            self._watch.advance(self._before + num_done - self._num_done)
        self._num_done = self._before + num_done

    def settles(self, num_exact: int) -> None:
        """Notes at the first large number what takes the time."""
        if num_exact < _LONG or self._has_noted or self._watch is None:
            return
        self._has_noted = True
        self._watch.say(
            f"{self._router}: many experts tie, or nearly so, in the same places; {_LONG} answers "
            "and more are left to exact arithmetic, which may take minutes"
        )


def sliced_router(
    router: Router,
    requested: RequestedSlice,
    sample: SliceTokens | None,
    request: CellsRequest,
    watch: CellsListener,
) -> SlicedRouter:
    """Cells of an affine router, arcs on a circle, pixels of any other router on a plane."""
    slicing = _Slicing(router, requested, sample, request)
    if requested.circle is not None:
        return slicing.arcs(requested.circle)
    return slicing.cells(watch) if router.rule.is_affine else slicing.pixels(watch.part)


def refuse_early(router: Router, subspace: str, dims: int | None, request: CellsRequest) -> None:
    """Raises what cannot be asked of a router on a slice, whatever tokens there are.

    ``dims`` are those of the slice, None for the whole input space.
    """
    name, is_circle = router.name, subspace.startswith("circle:")
    dims = router.hidden_size if dims is None else dims
    if router.num_experts > MOST_EXPERTS:
        raise UsageError(
            f"router {name}: {router.num_experts:,} experts; expected at most "
            f"{MOST_EXPERTS:,}, whose numbers fit where sets of experts are kept."
        )
    if request.expert_set is not None:
        _refuse_expert_set(router, request.expert_set, is_circle)
        return
    if is_circle and not router.rule.is_affine:
        raise RouterRuleError(
            f"router {name}: on a great circle only routers with linear facets are known.",
            "A plane is drawn, proved pixel by pixel: --subspace plane:A,B,C.",
        )
    if request.plot is not None and router.rule.is_affine and not is_circle and dims not in (2, 3):
        raise UsageError(
            f"--plot: a slice of 2 or 3 dimensions is drawn; this one is {subspace} with {dims:,}.",
            "Add --subspace pca:2, random:2 or plane:A,B,C.",
        )
    if not router.rule.is_affine and (dims != 2 or subspace == "full"):
        raise RouterRuleError(
            f"router {name}: its cells have curved facets or come from groups "
            f"({router.rule.selection_score_unit}"
            f"{', groups' if router.rule.groups is not None else ''}), so they are no polyhedra "
            "and are not listed.",
            "A plane is drawn, proved pixel by pixel: --subspace pca:2, random:2 or plane:A,B,C.",
        )
    if request.out is not None and (is_circle or not router.rule.is_affine):
        raise UsageError(
            f"--out writes lists of cells; router {name} has none on {subspace}.",
            "--plot writes the arcs or pixels as CSV beside the picture.",
        )
    if request.radius is not None and not router.rule.is_affine:
        raise UsageError("--radius is for routers whose facets are straight.")


def _refuse_expert_set(router: Router, experts: tuple[int, ...], is_circle: bool) -> None:
    k, last = router.rule.top_k, router.num_experts - 1
    if not len(set(experts)) == len(experts) == k or not 0 <= min(experts) <= max(experts) <= last:
        raise UsageError(
            f"--expert-set {','.join(map(str, experts))}: expected {k} different experts from 0 "
            f"to {last}, as many as router {router.name} chooses."
        )
    if not router.rule.is_affine or is_circle:
        raise RouterRuleError(
            f"router {router.name}: certificates are for linear routers on a flat slice "
            f"({router.rule.selection_score_unit})."
        )


class _Slicing(RouterOnSlice):
    def cells(self, watch: WalkWatch | None) -> SlicedRouter:
        """Cells with straight facets."""
        router, requested, sample, request = self.router, self.requested, self.sample, self.request
        part, (weight, bias) = requested.part, instance_of(router, requested)
        k, dims = router.rule.top_k, weight.shape[1]
        if dims > MOST_DIMS and request.radius is not None:
            raise UsageError(
                f"--radius is for slices of at most {MOST_DIMS} dimensions; this "
                f"one is {requested.text} with {dims:,}.",
                "Add --subspace pca:D or random:D.",
            )
        with stopwatch() as took:
            try:
                answer = cells_of_slice(weight, bias, k, request, watch)
            except UsageError as error:
                raise UsageError(f"router {router.name}: {error.message}", error.hint) from error
            if not isinstance(answer, AllSubsets):
                answer = with_witnesses(answer, weight, bias, request)
        equal = [] if k == len(weight) else equal_experts(weight, bias, request)
        facts, tokens, domain = None, None, domain_text(request)
        outcome: Outcome = "all subsets"
        more: dict[str, Any] = {"num_equal": sum(map(len, equal))}
        if isinstance(answer, AllSubsets):
            if request.out is not None:
                raise UsageError(
                    f"router {router.name}: every set of {k} experts is a cell of "
                    f"{requested.text}, so there is no list.",
                    f"Add --subspace pca:D or random:D with D below {router.num_experts - 1}.",
                )
            cells = None
        else:
            cells = answer
            outcome = "cells" if cells.is_whole else "unfinished"
            size = router.num_experts, k, dims, _is_central(weight, bias)
            expected = expected_vertices(*size)
            more |= {"most_cells": most_cells(*size), "expected_vertices": expected}
            if cells.is_whole:
                facts = facts_of(cells, weight, bias)
            else:
                # the limit of a search or a walk, and one that should do
                is_cut = cells.road == "search"
                enough = enough_vertices(None if is_cut else expected, request.vertices)
                what = "cells" if is_cut else "vertices"
                more["cut_short"] = CutShort(request.vertices, what, enough)
            if cells.is_cone:
                domain += (
                    ", where all experts tie at one point: the cells are those of the whole slice"
                )
            if sample is not None and part is not None:
                listed = cells.expert_set if cells.is_whole else None
                points = part.coordinates(sample.inputs)
                logits = points @ weight.T + bias
                choice = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :k], axis=1)
                tokens = _on_slice(points, choice, listed, sample)
                more["num_on_ties"] = _on_ties(choice, equal) if equal else None
            if request.random_routers and part and cells.is_whole:
                more["random"] = random_routers_of(router, part, request)
        record = self._record(dims, outcome, facts, tokens, took, domain=domain, **more)
        return SlicedRouter(
            **vars(self), record=record, cells=cells, tokens=tokens, instance=(weight, bias)
        )

    def pixels(self, part_of: Callable[[int], Callable[[int], None]]) -> SlicedRouter:
        """Pixels of a plane, for any rule."""
        router, sample, part = self.router, self.sample, self.requested.part
        assert part is not None, "refused before"
        points = None if sample is None else part.coordinates(sample.inputs)
        # the length of a router input behind its norm
        reach = 1.0 if router.gain is None else math.sqrt(router.hidden_size)
        frame = frame_of(points, self.requested, sample, self.request, reach)
        plane = plane_router(router, part)
        with stopwatch() as took:
            side = self.request.pixels
            pixels = plane_raster(plane, Frame(*frame, side, side), advance=part_of(side * side))
        facts = Cells(
            num_cells=len(pixels.expert_sets),
            road="interval subdivision",
            proved_share=pixels.share(PixelState.CONSTANT),
            num_open=pixels.count(PixelState.OPEN),
        )
        tokens = None
        if sample is not None and points is not None:
            choice = [plane.choice(points[some]) for some in chunks(len(points), plane)]
            sets = np.array(pixels.expert_sets)
            tokens = _on_slice(points, np.concatenate(choice), sets, sample)
        x0, x1, y0, y1 = frame
        window = f"x from {x0:.3g} to {x1:.3g}, y from {y0:.3g} to {y1:.3g}"
        record = self._record(2, "pixels", facts, tokens, took, domain=window)
        return SlicedRouter(**vars(self), record=record, tokens=tokens, pixels=pixels, frame=frame)

    def arcs(self, circle: Slice) -> SlicedRouter:
        """Arcs of a great circle, for a router with linear facets."""
        router = self.router
        axes, offset = circle.instance(router.weight, router.affine_bias)
        with stopwatch() as took:
            arcs = circle_arcs(axes[:, 0], axes[:, 1], offset, router.rule.top_k)
        lengths = arcs.stop - arcs.start
        facts = Cells(
            num_cells=len(np.unique(arcs.expert_set, axis=0)),
            road="circle",
            num_facets=len(arcs.start) if len(arcs.start) > 1 else 0,
            proved_share=float(lengths[arcs.is_proved].sum() / (2.0 * np.pi)),
        )
        record = self._record(1, "arcs", facts, None, took)
        return SlicedRouter(**vars(self), record=record, arcs=arcs)

    def _record(
        self,
        dims: int,
        outcome: Outcome,
        facts: Cells | None,
        tokens: TokensOnSlice | None,
        took: Stopwatch,
        **more: Any,
    ) -> RouterCells:
        """The record, with what only one outcome has as ``more``."""
        sample, experts, k = self.sample, self.router.num_experts, self.router.rule.top_k
        if tokens is not None:
            cell = tokens.cell[tokens.cell >= 0]
            more |= {"num_tokens": len(tokens.cell), "num_own": int(tokens.is_own.sum())}
            more |= {"num_cells_with_tokens": len(np.unique(cell)) or None}
        if sample is not None:
            more |= {"left_out": sample.num_non_finite, "visited": visited_graph(sample.chosen)}
        return RouterCells(
            router=self.router.name,
            num_experts=experts,
            top_k=k,
            subspace=self.requested.text,
            dims=dims,
            outcome=outcome,
            cells=facts,
            num_possible=comb(experts, k),
            seconds=took.seconds,
            variance_share=self.requested.variance_share,
            between=between_of(self.router, sample, self.request.seed),
            **({"domain": "", "most_cells": None, "expected_vertices": None} | more),
        )


def equal_experts(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    request: CellsRequest,
) -> list[Int64[np.ndarray, "_"]]:
    """The classes of two or more experts with equal rows and biases; none with ``tie_broken``."""
    if request.tie_broken:
        return []
    label = equal_classes(weight, bias)
    return [np.flatnonzero(label == n) for n in np.flatnonzero(np.bincount(label) > 1)]


def _on_ties(choice: Integer[np.ndarray, "tokens k"], equal: list[Int64[np.ndarray, "_"]]) -> int:
    """Tokens at whose place some of a class of equal experts are chosen and some are not."""
    is_tie = np.zeros(len(choice), bool)
    for members in equal:
        is_tie |= np.isin(np.isin(choice, members).sum(axis=1), [0, len(members)], invert=True)
    return int(is_tie.sum())


def instance_of(router: Router, requested: RequestedSlice) -> Instance:
    """Rows and biases on the slice; equal biases change no choice and become 0."""
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
    """Tokens by their place; ``cell`` is the index of their set among the listed ones."""
    cell = np.full(len(choice), -1)
    if cells is not None:
        number = {tuple(row): n for n, row in enumerate(cells.tolist())}
        cell = np.array([number.get(tuple(row), -1) for row in choice.tolist()], np.int64)
    return TokensOnSlice(
        points, choice, cell, (choice == np.sort(sample.chosen, axis=1)).all(axis=1)
    )


def prediction(router: Router, requested: RequestedSlice, request: CellsRequest) -> str:
    """The expected number of vertices in words; empty where none are walked."""
    is_walked = request.expert_set is None and request.radius is None
    if not is_walked or not router.rule.is_affine or requested.circle is not None:
        return ""
    weight, bias = instance_of(router, requested)
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


#: Ways between two tokens on which facets are counted.
_SEGMENTS = 1000


def facts_of(
    cells: Enumeration,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
) -> Cells:
    """The figures of a search, and of the graph of facets where there is one."""
    num_cells, is_walk = len(cells.expert_set), cells.road in ("walk", "charts")
    graph = vars(facet_graph(num_cells, cells.facets)) if num_cells else {}
    pairs = set()
    if is_walk:
        both = swaps(cells.expert_set, cells.facets)
        either = zip(both.out.tolist(), both.into.tolist(), strict=True)
        pairs = {(min(pair), max(pair)) for pair in either}
    return Cells(
        num_cells=num_cells,
        road=cells.road,
        num_bounded=None if cells.is_bounded is None else int(cells.is_bounded.sum()),
        num_facets=len(cells.facets),
        **graph,
        num_vertices=cells.num_vertices,
        num_exact=cells.num_exact,
        num_concurrent=cells.num_concurrent if is_walk else None,
        num_parallel=num_parallel(weight, bias, pairs) if is_walk else None,
        gap=None if cells.road == "search" else cells.gap,
        num_rational=len(cells.exact),
        num_tied=None if cells.tied is None else len(cells.tied),
    )


def random_routers_of(
    router: Router, part: Slice, request: CellsRequest
) -> RandomRouterCells | None:
    """The number of cells of random routers on the same slice and in the same bounds."""
    counts = []
    for number in range(request.random_routers):
        other = random_router(router, request.seed + number)
        rows, offset = part.instance(other.weight, other.affine_bias)
        cells = cells_of_slice(rows, offset, router.rule.top_k, request, None)
        if isinstance(cells, AllSubsets):
            counts.append(cells.num_cells)
        elif cells.is_whole:
            counts.append(len(cells.expert_set))
        else:
            return None
    sd = float(np.std(counts, ddof=1)) if len(counts) > 1 else 0.0
    return RandomRouterCells(len(counts), float(np.mean(counts)), sd)


def between_of(router: Router, sample: SliceTokens | None, seed: int) -> Between | None:
    """Facets crossed between random pairs of tokens; None for curved facets."""
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
    rate, error = crossing_rate(counted.count, length)
    return Between(
        num_segments=count,
        mean_crossings=float(counted.count.mean()),
        per_length=rate,
        per_length_se=error,
        num_exact=counted.num_exact,
    )


# ------------------------------------------------------------------------------------------- search
#: Facets whose distance is measured.
MOST_MEASURED = 500_000

#: Facets that a search leaves to exact arithmetic at most: some minutes.
_MOST_EXACT = 100_000
#: A search gives way to a walk after so many of them, and one more for every so many vertices that
#: the walk is expected to have: by then a walk, and trying what it finds, would have been done.
_LEAST_EXACT, _VERTICES_AN_ANSWER = 500, 50

#: Exponents of rows and biases within which nothing is scaled.
_USUAL = 16
#: Factors of two between columns beyond which each is scaled by itself.
_SPREAD = 200


def domain_text(request: CellsRequest) -> str:
    """What bounds the search, in words; empty for the whole slice."""
    return "" if request.radius is None else f"within {request.radius:g} of its centre"


def cells_of_slice(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    request: CellsRequest,
    watch: WalkWatch | None,
) -> Enumeration | AllSubsets:
    """The cells of a request.

    Rows, biases and coordinates are taken to the size of 1 first, each by a power of two, which
    changes no bit of them. Raises UsageError for instances with more ties than exact arithmetic is
    given.
    """
    try:
        scaled = Scaled.of(weight, bias, request)
        search = _Search(scaled.weight, scaled.bias, k, scaled.request, watch)
        cells = search.whole() if request.radius is None else search.in_ball()
        return cells if isinstance(cells, AllSubsets) else scaled.back(cells)
    except ValueError as error:
        raise UsageError(
            f"{error}.", "Fewer dimensions, --radius R or --tie-broken are other ways."
        ) from error


@dataclass(frozen=True, eq=False)
class Scaled:
    """The instance in coordinates x' = x / 2^exponent in which rows and biases are of size 1."""

    weight: Float64[np.ndarray, "experts dims"]
    bias: Float64[np.ndarray, "experts"]
    request: CellsRequest
    exponent: Int64[np.ndarray, "dims"]

    @staticmethod
    def of(
        weight: Float64[np.ndarray, "experts dims"],
        bias: Float64[np.ndarray, "experts"],
        request: CellsRequest,
        is_metric: bool = False,
    ) -> Scaled:
        """Where distances are measured (``is_metric``) all columns share one power of two."""
        columns = np.frexp(np.abs(weight).max(axis=0, initial=0.0))[1].astype(np.int64)
        if np.ptp(columns) < _SPREAD or is_metric or request.radius is not None:
            columns[:] = columns.max()
        largest = np.abs(bias).max(initial=0.0)
        offset = int(np.frexp(largest)[1]) if largest else int(columns.max())
        same = Scaled(weight, bias, request, np.zeros(weight.shape[1], np.int64))
        if max(np.abs(columns).max(initial=0), abs(offset)) < _USUAL:
            return same
        rows, free = np.ldexp(weight, -columns), np.ldexp(bias, -offset)
        exponent = offset - columns
        is_exact = np.array_equal(np.ldexp(rows, columns), weight)
        is_exact &= np.array_equal(np.ldexp(free, offset), bias)
        if not is_exact:
            return same
        if request.radius is not None:
            radius = float(np.ldexp(request.radius, -int(exponent.max())))
            if not 0.0 < radius < np.inf:
                return same
            request = replace(request, radius=radius)
        return Scaled(rows, free, request, exponent)

    @property
    def longer(self) -> int:
        """The exponent of two by which distances of the original coordinates are longer."""
        return int(self.exponent.max()) if len(self.exponent) else 0

    def back(self, cells: Enumeration) -> Enumeration:
        """The cells with points and distances in the original coordinates."""
        if not self.exponent.any():
            return cells
        distances = {"cell_distance": cells.cell_distance, "facet_distance": cells.facet_distance}
        measured = {n: np.ldexp(d, self.longer) for n, d in distances.items() if d is not None}
        return replace(cells, witness=np.ldexp(cells.witness, self.exponent), **measured)


def with_witnesses(
    cells: Enumeration,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    request: CellsRequest,
) -> Enumeration:
    """The cells with points that are proved to lie strictly inside them and the ball.

    Raises InternalError for a cell without a point: it would be none.
    """
    radius = np.inf if request.radius is None else request.radius
    sets, ties = cells.expert_set, request.tie_broken
    try:
        point, exact = strict_witnesses(weight, bias, sets, cells.witness, radius, ties)
    except ValueError as error:
        raise InternalError(f"a cell has no witness: {error}") from error
    return replace(cells, witness=point, exact=exact)


@dataclass(frozen=True, eq=False)
class _Search:
    """One scaled instance, with the request that bounds the search."""

    weight: Float64[np.ndarray, "experts dims"]
    bias: Float64[np.ndarray, "experts"]
    k: int
    request: CellsRequest
    watch: WalkWatch | None

    def whole(self) -> Enumeration | AllSubsets:
        """All cells of the slice."""
        return enumerate_cells(
            self.weight,
            self.bias,
            self.k,
            tie_broken=self.request.tie_broken,
            most=self.request.vertices,
            threads=self.request.num_workers or num_workers(),
            watch=self.watch,
            most_simple=0 if self.request.out is None else MOST_MEASURED,
        )

    def in_ball(self) -> Enumeration | AllSubsets:
        """The cells that meet the ball: by a search, or by a walk where too many experts tie."""
        radius, experts = self.request.radius, len(self.weight)
        assert radius is not None
        centre = np.zeros(self.weight.shape[1])
        problem = ball_cells.BallProblem.of(self.weight, self.bias, self.k, centre, radius)
        rows, biases = problem.own
        tip = _tip_inside(rows, biases, radius)
        if tip is None:
            searched = self._searched(problem)
            if searched is not None:
                return searched
        whole = replace(self, weight=rows, bias=biases, k=problem.k).whole()
        if isinstance(whole, AllSubsets):
            if tip is not None and len(rows) == experts:
                return whole
            return ball_cells.cells_of_ball(problem, self.request.vertices, watch=self.watch)
        if not whole.is_whole:
            return whole
        met = ball_cells.filter_ball(rows, biases, whole, centre, radius)
        part = whole.part(met.cells, met.facets)
        always = np.broadcast_to(problem.fixed, (len(part.expert_set), len(problem.fixed)))
        chosen = np.concatenate([always, problem.contested[part.expert_set]], axis=1)
        is_cone = tip is not None and len(rows) == experts
        return replace(
            part,
            expert_set=np.sort(chosen, axis=1).astype(np.int16),
            witness=part.witness if tip is None else _nearer(part.witness, tip, radius),
            road="walk and filter" if tip is None else whole.road,
            num_exact=whole.num_exact + met.num_exact,
            cell_distance=met.cell_distance[met.cells],
            facet_distance=met.facet_distance[met.facets],
            simple=None,
            is_cone=is_cone,
            tied=whole.tied if is_cone else None,
        )

    def _searched(self, problem: ball_cells.BallProblem) -> Enumeration | None:
        """The cells by a search from facet to facet; None where a walk is needed.

        Raises UsageError where that would be too long as well.
        """
        most, (experts, dims) = self.request.vertices, problem.own[0].shape
        expected = expected_vertices(experts, problem.k, dims, False)
        if expected is None:  # a line, or every set may be a cell and nothing is walked
            expected = math.inf if dims > 1 else 0.0
        most_exact = min(_MOST_EXACT, _LEAST_EXACT + expected / _VERTICES_AN_ANSWER)
        try:
            return ball_cells.cells_of_ball(problem, most, most_exact, self.watch)
        except ball_cells.TooManyTies as error:
            if expected > most:
                enough = enough_vertices(expected, most)
                others = "a smaller --radius or fewer dimensions"
                about = (
                    "" if math.isinf(expected) else f"; a random router has about {expected:,.0f}"
                )
                hint = f"Ask for {others}."
                if enough is not None:
                    hint = f"--vertices {enough} allows the walk; {others} are other ways."
                raise UsageError(
                    f"within --radius {error}. Expected fewer, or a slice of at most {most:,} "
                    f"vertices (--vertices) to walk instead{about}.",
                    hint,
                ) from error
        except ValueError as error:
            if "degenerate" not in str(error):
                raise
        return None


def _tip_inside(weight: np.ndarray, bias: np.ndarray, radius: float) -> tuple[Fraction, ...] | None:
    """The point inside the open ball around 0 at which all experts tie; None without one.

    Each of their cells is a cone from there, and meets the ball.
    """
    tip = common_tie(weight, bias) if len(weight) else None
    if tip is None or sum(x * x for x in tip) >= Fraction(radius) ** 2:
        return None
    return tip


def _nearer(
    witness: Float64[np.ndarray, "cells dims"], tip: Sequence[Fraction], radius: float
) -> Float64[np.ndarray, "cells dims"]:
    """Points of cones, taken towards the tip by powers of two until they are in the ball."""
    place = np.array([float(value) for value in tip])
    away = witness - place
    length = np.maximum(np.linalg.norm(away, axis=1), np.finfo(np.float64).tiny)
    exponent = np.frexp((radius - np.linalg.norm(place)) / length)[1] - 1
    return place + np.ldexp(away, np.minimum(exponent, 0)[:, None])


#: Vertices that a walk can number.
_MOST_NUMBERED = 2**31


def enough_vertices(expected: float | None, most: int) -> int | None:
    """A limit that is probably enough where ``most`` was not, in one or two digits.

    Twice what is expected, or ten times ``most``; None where a walk cannot number as many.
    """
    target = 10 * most if expected is None or 2 * expected <= most else 2 * expected
    if not target < _MOST_NUMBERED:
        return None
    unit = 10 ** max(0, len(str(math.ceil(target))) - 2)
    return -(-math.ceil(target) // unit) * unit


@cache
def expected_vertices(experts: int, k: int, dims: int, is_central: bool) -> float | None:
    """The expected vertices of a random router; None where nothing is walked."""
    if not 0 < k < experts or not 2 <= dims < experts - 1:
        return None
    return expected_diagram(experts, k, dims, is_central).vertices
