"""One router on one slice: the search for its cells, arcs or pixels, and its tokens among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
        with stopwatch() as took:
            try:
                answer = cells_of_slice(weight, bias, k, request, watch)
            except UsageError as error:
                raise UsageError(f"router {router.name}: {error.message}", error.hint) from error
            if not isinstance(answer, AllSubsets):
                answer = with_witnesses(answer, weight, bias, request)
        equal = [] if k == len(weight) else equal_experts(weight, bias, request)
        facts, tokens = None, None
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
                # the limit of the walk, and one that should do
                enough = enough_vertices(expected, request.vertices)
                more["cut_short"] = CutShort(request.vertices, enough)
            if sample is not None and part is not None:
                listed = cells.expert_set if cells.is_whole else None
                points = part.coordinates(sample.inputs)
                logits = points @ weight.T + bias
                choice = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :k], axis=1)
                tokens = _on_slice(points, choice, listed, sample)
                more["num_on_ties"] = _on_ties(choice, equal) if equal else None
            if request.random_routers and part and cells.is_whole:
                more["random"] = random_routers_of(router, part, request)
        record = self._record(dims, outcome, facts, tokens, took, **more)
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
    if request.expert_set is not None or not router.rule.is_affine or requested.circle is not None:
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
        num_bounded=int(cells.is_bounded.sum()),
        num_facets=len(cells.facets),
        **graph,
        num_vertices=cells.num_vertices,
        num_exact=cells.num_exact,
        num_concurrent=cells.num_concurrent if is_walk else None,
        num_parallel=num_parallel(weight, bias, pairs) if is_walk else None,
        gap=cells.gap,
        num_rational=len(cells.exact),
        num_tied=len(cells.tied),
    )


def random_routers_of(
    router: Router, part: Slice, request: CellsRequest
) -> RandomRouterCells | None:
    """The number of cells of random routers on the same slice."""
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
#: Exponents of rows and biases within which nothing is scaled.
_USUAL = 16
#: Factors of two between columns beyond which each is scaled by itself.
_SPREAD = 200


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
        scaled = Scaled.of(weight, bias)
        cells = enumerate_cells(
            scaled.weight,
            scaled.bias,
            k,
            tie_broken=request.tie_broken,
            most=request.vertices,
            threads=request.num_workers or num_workers(),
            watch=watch,
        )
        return cells if isinstance(cells, AllSubsets) else scaled.back(cells)
    except ValueError as error:
        raise UsageError(f"{error}.", "Fewer dimensions or --tie-broken are other ways.") from error


@dataclass(frozen=True, eq=False)
class Scaled:
    """The instance in coordinates x' = x / 2^exponent in which rows and biases are of size 1."""

    weight: Float64[np.ndarray, "experts dims"]
    bias: Float64[np.ndarray, "experts"]
    exponent: Int64[np.ndarray, "dims"]

    @staticmethod
    def of(
        weight: Float64[np.ndarray, "experts dims"], bias: Float64[np.ndarray, "experts"]
    ) -> Scaled:
        """Columns that are not far apart share one power of two."""
        columns = np.frexp(np.abs(weight).max(axis=0, initial=0.0))[1].astype(np.int64)
        if np.ptp(columns) < _SPREAD:
            columns[:] = columns.max()
        largest = np.abs(bias).max(initial=0.0)
        offset = int(np.frexp(largest)[1]) if largest else int(columns.max())
        same = Scaled(weight, bias, np.zeros(weight.shape[1], np.int64))
        if max(np.abs(columns).max(initial=0), abs(offset)) < _USUAL:
            return same
        rows, free = np.ldexp(weight, -columns), np.ldexp(bias, -offset)
        exponent = offset - columns
        is_exact = np.array_equal(np.ldexp(rows, columns), weight)
        is_exact &= np.array_equal(np.ldexp(free, offset), bias)
        if not is_exact:
            return same
        return Scaled(rows, free, exponent)

    def back(self, cells: Enumeration) -> Enumeration:
        """The cells with points in the original coordinates."""
        if not self.exponent.any():
            return cells
        return replace(cells, witness=np.ldexp(cells.witness, self.exponent))


def with_witnesses(
    cells: Enumeration,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    request: CellsRequest,
) -> Enumeration:
    """The cells with points that are proved to lie strictly inside them.

    Raises InternalError for a cell without a point: it would be none.
    """
    sets, ties = cells.expert_set, request.tie_broken
    try:
        point, exact = strict_witnesses(weight, bias, sets, cells.witness, ties)
    except ValueError as error:
        raise InternalError(f"a cell has no witness: {error}") from error
    return replace(cells, witness=point, exact=exact)


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
