"""The cells of one slice: whole, in a ball, in a box, or around tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.text import number_of
from moegeom.engine.plan import num_workers
from moegeom.geometry.capacity.cell_bounds import expected_diagram
from moegeom.studies.cells.ball.ball_cells import (
    BallCells,
    BallProblem,
    TooManyTies,
    cells_of_ball,
    cells_within_hops,
    filter_ball,
)
from moegeom.studies.cells.ball.box import filter_box
from moegeom.studies.cells.exact.certificate_check import CellPoint
from moegeom.studies.cells.exact.rank import common_tie, independent_columns_of
from moegeom.studies.cells.exact.witness import strict_witnesses
from moegeom.studies.cells.graph.facet_graph import swaps
from moegeom.studies.cells.study.request import CellsRequest
from moegeom.studies.cells.walk.enumeration import (
    AllSubsets,
    Enumeration,
    SimpleVertices,
    enumerate_cells,
)
from moegeom.studies.cells.walk.level_walk import WalkWatch

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


@dataclass(frozen=True, eq=False)
class FoundCells:
    """Cells in the order of their experts, a point inside each, facets as pairs of cells.

    ``is_bounded`` is None where a ball, a box or steps bound the search. Brackets of distances are
    those from the centre of the slice, or from the token ``at`` which the search began; None where
    they were not asked for. ``hops`` are the facets crossed from there. ``exact`` has a rational
    point of each cell in which no float64 point was found: there the witness is nan. ``simple``
    are vertices at which facets meet, where distances will be asked for. ``is_cone`` where all
    experts tie at one point of the ball: then these are the cells of the whole slice. ``tied`` are
    the sets that equal experts keep from being cells; None where they were not looked for.
    """

    expert_set: Int16[np.ndarray, "cells k"]
    witness: Float64[np.ndarray, "cells dims"]
    facets: Int64[np.ndarray, "facets 2"]
    road: str
    is_bounded: Bool[np.ndarray, "cells"] | None = None
    num_vertices: int = 0
    num_exact: int = 0
    gap: float | None = None
    is_whole: bool = True
    cell_distance: Float64[np.ndarray, "cells 2"] | None = None
    facet_distance: Float64[np.ndarray, "facets 2"] | None = None
    hops: Int64[np.ndarray, "cells"] | None = None
    at: int | None = None
    exact: Mapping[int, CellPoint] = field(default_factory=dict)
    simple: SimpleVertices | None = None
    is_cone: bool = False
    tied: Int16[np.ndarray, "tied k"] | None = None


def domain_text(request: CellsRequest) -> str:
    """What bounds the search, in words; empty for the whole slice."""
    if request.radius is not None:
        return f"within {request.radius:g} of its centre"
    if request.box is not None:
        return f"within {request.box:g} of its centre along every direction"
    if request.hops is not None:
        facets = number_of(request.hops, "facet")
        whose = (
            "token"
            if len(request.at) == 1
            else f"{number_of(len(request.at), 'token')}, one by one"
        )
        return f"at most {facets} from the cell of {'a ' if len(request.at) == 1 else ''}{whose}"
    return ""


def find_cells(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    k: int,
    request: CellsRequest,
    points: Float64[np.ndarray, "points dims"],
    watch: WalkWatch | None,
) -> list[FoundCells] | AllSubsets:
    """The cells that were asked for; a list of one, or one entry for each of ``points``.

    Rows, biases and coordinates are taken to the size of 1 first, each by a power of two, which
    changes no bit of them. Raises UsageError for instances with more ties than exact arithmetic is
    given.
    """
    try:
        scaled = Scaled.of(weight, bias, request)
        if request.hops is not None:
            starts = zip(request.at, points, strict=True)
            return [scaled.back(scaled.around(k, token, point)) for token, point in starts]
        is_ball = request.radius is not None
        found = scaled.in_ball(k, watch) if is_ball else scaled.whole(k, watch)
        return found if isinstance(found, AllSubsets) else [scaled.back(found)]
    except ValueError as error:
        raise UsageError(
            f"{error}.", "Fewer dimensions, --radius R or --tie-broken are other ways."
        ) from error


@dataclass(frozen=True, eq=False)
class Scaled:
    """The instance in coordinates x' = x / 2^exponent in which rows and biases are of size 1."""

    weight: Float64[np.ndarray, "experts dims"]
    bias: Float64[np.ndarray, "experts"] | None
    request: CellsRequest
    exponent: Int64[np.ndarray, "dims"]

    @staticmethod
    def of(
        weight: Float64[np.ndarray, "experts dims"],
        bias: Float64[np.ndarray, "experts"] | None,
        request: CellsRequest,
        is_metric: bool = False,
    ) -> Scaled:
        """Where distances are measured (``is_metric``) all columns share one power of two."""
        columns = np.frexp(np.abs(weight).max(axis=0, initial=0.0))[1].astype(np.int64)
        is_metric |= request.radius is not None or request.hops is not None
        if np.ptp(columns) < _SPREAD or is_metric:
            columns[:] = columns.max()
        offset = 0 if bias is None else int(np.frexp(np.abs(bias).max(initial=0.0))[1])
        if bias is None or not bias.any():
            offset = int(columns.max())
        same = Scaled(weight, bias, request, np.zeros(weight.shape[1], np.int64))
        if max(np.abs(columns).max(initial=0), abs(offset)) < _USUAL:
            return same
        rows = np.ldexp(weight, -columns)
        free = None if bias is None else np.ldexp(bias, -offset)
        exponent = offset - columns
        bounds = [request.radius, request.box]
        if not np.array_equal(np.ldexp(rows, columns), weight):
            return same
        if bias is not None and not np.array_equal(np.ldexp(np.ldexp(bias, -offset), offset), bias):
            return same
        if request.box is not None and np.ptp(columns):
            return same  # a box has one side
        radius, box = (_times(value, -int(exponent.max())) for value in bounds)
        if any(value is not None and not 0.0 < value < np.inf for value in (radius, box)):
            return same
        return Scaled(rows, free, replace(request, radius=radius, box=box), exponent)

    @property
    def longer(self) -> int:
        """What distances in the given coordinates are longer by, as an exponent of two."""
        return int(self.exponent.max()) if len(self.exponent) else 0

    def whole(self, k: int, watch: WalkWatch | None) -> FoundCells | AllSubsets:
        found = _enumerated(self.weight, self.bias, k, self.request, watch)
        if isinstance(found, AllSubsets) or self.request.box is None:
            return found
        return _in_box(self.weight, self.bias, found, self.request.box)

    def in_ball(self, k: int, watch: WalkWatch | None) -> FoundCells | AllSubsets:
        return _in_ball(self.weight, self.bias, k, self.request, watch)

    def around(self, k: int, token: int, point: Float64[np.ndarray, "dims"]) -> FoundCells:
        start = np.ldexp(point, -self.exponent)
        return _around(self.weight, self.bias, k, self.request, token, start)

    def back(self, found: FoundCells) -> FoundCells:
        """Points and distances in the coordinates that were given."""
        if not self.exponent.any():
            return found
        cells, facets = found.cell_distance, found.facet_distance
        return replace(
            found,
            witness=np.ldexp(found.witness, self.exponent),
            cell_distance=None if cells is None else np.ldexp(cells, self.longer),
            facet_distance=None if facets is None else np.ldexp(facets, self.longer),
        )


def _times(value: float | None, exponent: int) -> float | None:
    return None if value is None else float(np.ldexp(value, exponent))


def with_witnesses(
    found: FoundCells,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    request: CellsRequest,
) -> FoundCells:
    """The cells with points that are proved to lie strictly inside them and the domain.

    Raises InternalError for a cell without a point: it would be none.
    """
    offset = np.zeros(len(weight)) if bias is None else bias
    radius = np.inf if request.radius is None else request.radius
    half = np.inf if request.box is None else request.box
    try:
        made = strict_witnesses(
            weight, offset, found.expert_set, found.witness, radius, half, request.tie_broken
        )
    except ValueError as error:
        raise InternalError(f"a cell has no witness: {error}") from error
    return replace(found, witness=made.point, exact=made.exact)


def _enumerated(
    weight: np.ndarray,
    bias: np.ndarray | None,
    k: int,
    request: CellsRequest,
    watch: WalkWatch | None,
) -> FoundCells | AllSubsets:
    found = enumerate_cells(
        weight,
        bias,
        k,
        tie_broken=request.tie_broken,
        most=request.vertices,
        threads=request.num_workers or num_workers(),
        watch=watch,
        most_simple=0 if request.out is None else MOST_MEASURED,
    )
    return found if isinstance(found, AllSubsets) else _of_enumeration(found)


def _of_enumeration(found: Enumeration) -> FoundCells:
    return FoundCells(
        expert_set=found.expert_set,
        witness=found.witness,
        facets=found.facets,
        road=found.road,
        is_bounded=found.is_bounded,
        num_vertices=found.num_vertices,
        num_exact=found.num_exact,
        gap=found.gap,
        is_whole=found.is_whole,
        simple=found.simple,
        tied=found.tied,
    )


def _in_ball(
    weight: np.ndarray,
    bias: np.ndarray | None,
    k: int,
    request: CellsRequest,
    watch: WalkWatch | None,
) -> FoundCells | AllSubsets:
    """From facet to facet; by a walk where experts tie on whole facets, or many at one point."""
    assert request.radius is not None
    centre = np.zeros(weight.shape[1])
    offset = np.zeros(len(weight)) if bias is None else bias
    problem = BallProblem.of(weight, offset, k, centre, request.radius)
    rows, biases = problem.own
    tip = _tip_inside(rows, biases, request.radius)
    if tip is None:
        found = _searched(problem, request, watch)
        if found is not None:
            return found
    whole = _enumerated(rows, biases, problem.k, request, watch)
    if isinstance(whole, AllSubsets):
        if tip is not None and len(rows) == len(weight):
            return whole
        return _of_search(cells_of_ball(problem, request.vertices, watch=watch))
    if not whole.is_whole:
        return whole
    out, into = swaps(whole.expert_set, whole.facets).first
    met = filter_ball(
        rows, biases, whole.expert_set, whole.facets, out, into, centre, request.radius
    )
    kept = _kept(whole, met.cells, met.facets)
    always = np.broadcast_to(problem.fixed, (len(kept.expert_set), len(problem.fixed)))
    chosen = np.concatenate([always, problem.kept[kept.expert_set]], axis=1)
    is_cone = tip is not None and len(rows) == len(weight)
    return replace(
        kept,
        expert_set=np.sort(chosen, axis=1).astype(np.int16),
        witness=kept.witness if tip is None else _nearer(kept.witness, tip, request.radius),
        road="walk and filter" if tip is None else whole.road,
        num_exact=whole.num_exact + met.num_exact,
        cell_distance=np.column_stack([met.cell_lower, met.cell_upper])[met.cells],
        facet_distance=np.column_stack([met.facet_lower, met.facet_upper])[met.facets],
        simple=None,
        is_cone=is_cone,
        tied=whole.tied if is_cone else None,
    )


def _tip_inside(weight: np.ndarray, bias: np.ndarray, radius: float) -> tuple[Fraction, ...] | None:
    """The point of the open ball around 0 at which all experts tie, where there is one.

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


def _searched(
    problem: BallProblem, request: CellsRequest, watch: WalkWatch | None
) -> FoundCells | None:
    """From facet to facet; None where a walk is to be taken.

    Raises UsageError where that would be too long as well.
    """
    most, (experts, dims) = request.vertices, problem.own[0].shape
    expected = expected_vertices(experts, problem.k, dims, False)
    if expected is None:  # a line, or every set may be a cell and nothing is walked
        expected = math.inf if dims > 1 else 0.0
    most_exact = min(_MOST_EXACT, _LEAST_EXACT + expected / _VERTICES_AN_ANSWER)
    try:
        return _of_search(cells_of_ball(problem, most, most_exact, watch))
    except TooManyTies as error:
        if expected > most:
            enough = enough_vertices(expected, most)
            about = "" if math.isinf(expected) else f"; a random router has about {expected:,.0f}"
            others = "a smaller --radius or fewer dimensions"
            raise UsageError(
                f"within --radius {error}. Expected fewer, or a slice of at most {most:,} vertices "
                f"(--vertices) to walk instead{about}.",
                f"Ask for {others}."
                if enough is None
                else f"--vertices {enough} allows the walk; {others} are other ways.",
            ) from error
    except ValueError as error:
        if "degenerate" not in str(error):
            raise
    return None


#: Vertices that a walk can number.
_MOST_NUMBERED = 2**31


def enough_vertices(expected: float | None, most: int) -> int | None:
    """A limit that should do where ``most`` did not, in one or two figures.

    Twice what is expected, or ten times ``most``; None where a walk cannot number as many.
    """
    wanted = 10 * most if expected is None or 2 * expected <= most else 2 * expected
    if not wanted < _MOST_NUMBERED:
        return None
    unit = 10 ** max(0, len(str(math.ceil(wanted))) - 2)
    return -(-math.ceil(wanted) // unit) * unit


@cache
def expected_vertices(experts: int, k: int, dims: int, is_central: bool) -> float | None:
    """Vertices that a random router has; None where that says nothing."""
    if not 0 < k < experts or not 2 <= dims < experts - 1:
        return None
    return expected_diagram(experts, k, dims, is_central).vertices


def _in_box(
    weight: np.ndarray, bias: np.ndarray | None, whole: FoundCells, half: float
) -> FoundCells:
    if not whole.is_whole:
        return whole
    sides = np.full(weight.shape[1], half)
    out, into = swaps(whole.expert_set, whole.facets).first
    met = filter_box(
        weight, bias, whole.expert_set, whole.facets, out, into, -sides, sides, whole.witness
    )
    kept = _kept(whole, met.has_cell, met.has_facet)
    points = [proof.point for proof in met.cells if isinstance(proof, CellPoint)]
    witness = np.array([[float(x) for x in point] for point in points]).reshape(-1, len(sides))
    return replace(kept, road="walk and filter", witness=witness)


def _around(
    weight: np.ndarray,
    bias: np.ndarray | None,
    k: int,
    request: CellsRequest,
    token: int,
    point: Float64[np.ndarray, "dims"],
) -> FoundCells:
    """Cells a few facets away from the cell of a token, in the coordinates that carry the rank."""
    assert request.hops is not None
    offset = np.zeros(len(weight)) if bias is None else bias
    kept = independent_columns_of(weight)
    if len(kept) < weight.shape[1]:
        raise ValueError(
            f"the rows have rank {len(kept)} on {weight.shape[1]} dimensions: distances need a "
            "slice that they span"
        )
    found = cells_within_hops(weight, offset, k, point, request.hops, request.vertices)
    return replace(_of_search(found), hops=found.hops, at=token, tied=None)


def _of_search(found: BallCells) -> FoundCells:
    """A whole search met no place where equal experts tie for the last place: it would be refused
    at the border of such a region.
    """
    return FoundCells(
        expert_set=found.expert_set,
        witness=found.nearest,
        facets=found.facets,
        road="search",
        num_exact=found.num_exact,
        is_whole=found.is_whole,
        cell_distance=np.column_stack([found.distance_lower, found.distance_upper]),
        facet_distance=np.column_stack([found.facet_distance_lower, found.facet_distance_upper]),
        tied=found.expert_set[:0],
    )


def _kept(
    whole: FoundCells, cells: Bool[np.ndarray, "cells"], facets: Bool[np.ndarray, "facets"]
) -> FoundCells:
    """Some of the cells and facets."""
    number = np.cumsum(cells) - 1
    return replace(
        whole,
        expert_set=whole.expert_set[cells],
        witness=whole.witness[cells],
        facets=number[whole.facets[facets]].reshape(-1, 2),
        is_bounded=None,
        tied=None,
    )
