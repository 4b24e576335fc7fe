"""The cells of one slice: whole, in a ball, in a box, or around tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cache

import numpy as np

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.shapes import Bool, Float64, Int16, Int64
from moegeom.core.text import number_of
from moegeom.engine.plan import num_workers
from moegeom.geometry.capacity.cell_bounds import expected_diagram
from moegeom.routing_cells.ball.ball_cells import (
    BallCells,
    BallProblem,
    TooManyTies,
    cells_of_ball,
    cells_within_hops,
    filter_ball,
)
from moegeom.routing_cells.ball.box import filter_box
from moegeom.routing_cells.exact.certificate_check import CellPoint
from moegeom.routing_cells.exact.rank import common_tie, independent_columns_of
from moegeom.routing_cells.exact.witness import strict_witnesses
from moegeom.routing_cells.graph.facet_graph import swaps
from moegeom.routing_cells.study.request import CellsRequest
from moegeom.routing_cells.walk.enumeration import (
    AllSubsets,
    SimpleVertices,
    enumerate_cells,
)
from moegeom.routing_cells.walk.level_walk import WalkWatch

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
class SliceCells:
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

    @property
    def exchanged(self) -> tuple[Int16[np.ndarray, "facets"], Int16[np.ndarray, "facets"]]:
        """The lowest expert that only the first cell of each facet has, and that of the second."""
        return swaps(self.expert_set, self.facets).first

    def part(
        self, cells: Bool[np.ndarray, "cells"], facets: Bool[np.ndarray, "facets"]
    ) -> SliceCells:
        """Some of the cells and facets."""
        number = np.cumsum(cells) - 1
        return replace(
            self,
            expert_set=self.expert_set[cells],
            witness=self.witness[cells],
            facets=number[self.facets[facets]].reshape(-1, 2),
            is_bounded=None,
            tied=None,
        )


def domain_text(request: CellsRequest) -> str:
    """What bounds the search, in words; empty for the whole slice."""
    if request.radius is not None:
        return f"within {request.radius:g} of its centre"
    if request.box is not None:
        return f"within {request.box:g} of its centre along every direction"
    if request.hops is not None:
        facets, tokens = number_of(request.hops, "facet"), number_of(len(request.at), "token")
        whose = "a token" if len(request.at) == 1 else f"{tokens}, one by one"
        return f"at most {facets} from the cell of {whose}"
    return ""


def cells_of_slice(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    request: CellsRequest,
    points: Float64[np.ndarray, "points dims"],
    watch: WalkWatch | None,
) -> list[SliceCells] | AllSubsets:
    """The cells that were asked for; a list of one, or one entry for each of ``points``.

    Rows, biases and coordinates are taken to the size of 1 first, each by a power of two, which
    changes no bit of them. Raises UsageError for instances with more ties than exact arithmetic is
    given.
    """
    try:
        scaled = Scaled.of(weight, bias, request)
        search = _Search(scaled.weight, scaled.bias, k, scaled.request, watch)
        if request.hops is not None:
            starts = zip(request.at, np.ldexp(points, -scaled.exponent), strict=True)
            return [scaled.back(search.around(token, point)) for token, point in starts]
        if request.radius is not None:
            cells = search.in_ball()
        else:
            cells = search.whole() if request.box is None else search.in_box()
        return cells if isinstance(cells, AllSubsets) else [scaled.back(cells)]
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
        is_metric |= request.radius is not None or request.hops is not None
        if np.ptp(columns) < _SPREAD or is_metric:
            columns[:] = columns.max()
        largest = np.abs(bias).max(initial=0.0)
        offset = int(np.frexp(largest)[1]) if largest else int(columns.max())
        same = Scaled(weight, bias, request, np.zeros(weight.shape[1], np.int64))
        if max(np.abs(columns).max(initial=0), abs(offset)) < _USUAL:
            return same
        rows, free = np.ldexp(weight, -columns), np.ldexp(bias, -offset)
        exponent = offset - columns
        is_exact = np.array_equal(np.ldexp(rows, columns), weight)
        if not is_exact or not np.array_equal(np.ldexp(free, offset), bias):
            return same
        if request.box is not None and np.ptp(columns):
            return same  # a box has one side
        shorter = -int(exponent.max())
        bounds = {
            name: None if value is None else float(np.ldexp(value, shorter))
            for name, value in (("radius", request.radius), ("box", request.box))
        }
        if any(value is not None and not 0.0 < value < np.inf for value in bounds.values()):
            return same
        return Scaled(rows, free, replace(request, **bounds), exponent)

    @property
    def longer(self) -> int:
        """What distances in the given coordinates are longer by, as an exponent of two."""
        return int(self.exponent.max()) if len(self.exponent) else 0

    def back(self, cells: SliceCells) -> SliceCells:
        """Points and distances in the coordinates that were given."""
        if not self.exponent.any():
            return cells
        of_cell, of_facet = cells.cell_distance, cells.facet_distance
        return replace(
            cells,
            witness=np.ldexp(cells.witness, self.exponent),
            cell_distance=None if of_cell is None else np.ldexp(of_cell, self.longer),
            facet_distance=None if of_facet is None else np.ldexp(of_facet, self.longer),
        )


def with_witnesses(
    cells: SliceCells,
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    request: CellsRequest,
) -> SliceCells:
    """The cells with points that are proved to lie strictly inside them and the domain.

    Raises InternalError for a cell without a point: it would be none.
    """
    radius = np.inf if request.radius is None else request.radius
    half = np.inf if request.box is None else request.box
    sets, ties = cells.expert_set, request.tie_broken
    try:
        made = strict_witnesses(weight, bias, sets, cells.witness, radius, half, ties)
    except ValueError as error:
        raise InternalError(f"a cell has no witness: {error}") from error
    return replace(cells, witness=made.point, exact=made.exact)


@dataclass(frozen=True, eq=False)
class _Search:
    """One instance and what bounds the search for its cells."""

    weight: Float64[np.ndarray, "experts dims"]
    bias: Float64[np.ndarray, "experts"]
    k: int
    request: CellsRequest
    watch: WalkWatch | None

    def whole(self) -> SliceCells | AllSubsets:
        """All cells of the slice."""
        whole = enumerate_cells(
            self.weight,
            self.bias,
            self.k,
            tie_broken=self.request.tie_broken,
            most=self.request.vertices,
            threads=self.request.num_workers or num_workers(),
            watch=self.watch,
            most_simple=0 if self.request.out is None else MOST_MEASURED,
        )
        if isinstance(whole, AllSubsets):
            return whole
        return SliceCells(**{each.name: getattr(whole, each.name) for each in fields(whole)})

    def in_box(self) -> SliceCells | AllSubsets:
        """Those that meet the box."""
        whole = self.whole()
        if isinstance(whole, AllSubsets) or not whole.is_whole:
            return whole
        assert self.request.box is not None
        sides = np.full(self.weight.shape[1], self.request.box)
        sets, facets, (out, into) = whole.expert_set, whole.facets, whole.exchanged
        met = filter_box(
            self.weight, self.bias, sets, facets, out, into, -sides, sides, whole.witness
        )
        points = [proof.point for proof in met.cells if isinstance(proof, CellPoint)]
        witness = np.array([[float(x) for x in point] for point in points])
        part = whole.part(met.has_cell, met.has_facet)
        return replace(part, road="walk and filter", witness=witness.reshape(-1, len(sides)))

    def in_ball(self) -> SliceCells | AllSubsets:
        """From facet to facet; by a walk where experts tie on whole facets or many at a point."""
        radius, experts = self.request.radius, len(self.weight)
        assert radius is not None
        centre = np.zeros(self.weight.shape[1])
        problem = BallProblem.of(self.weight, self.bias, self.k, centre, radius)
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
            return _of_search(cells_of_ball(problem, self.request.vertices, watch=self.watch))
        if not whole.is_whole:
            return whole
        sets, facets, (out, into) = whole.expert_set, whole.facets, whole.exchanged
        met = filter_ball(rows, biases, sets, facets, out, into, centre, radius)
        part = whole.part(met.cells, met.facets)
        always = np.broadcast_to(problem.fixed, (len(part.expert_set), len(problem.fixed)))
        chosen = np.concatenate([always, problem.kept[part.expert_set]], axis=1)
        is_cone = tip is not None and len(rows) == experts
        return replace(
            part,
            expert_set=np.sort(chosen, axis=1).astype(np.int16),
            witness=part.witness if tip is None else _nearer(part.witness, tip, radius),
            road="walk and filter" if tip is None else whole.road,
            num_exact=whole.num_exact + met.num_exact,
            cell_distance=np.column_stack([met.cell_lower, met.cell_upper])[met.cells],
            facet_distance=np.column_stack([met.facet_lower, met.facet_upper])[met.facets],
            simple=None,
            is_cone=is_cone,
            tied=whole.tied if is_cone else None,
        )

    def _searched(self, problem: BallProblem) -> SliceCells | None:
        """From facet to facet; None where a walk is to be taken.

        Raises UsageError where that would be too long as well.
        """
        most, (experts, dims) = self.request.vertices, problem.own[0].shape
        expected = expected_vertices(experts, problem.k, dims, False)
        if expected is None:  # a line, or every set may be a cell and nothing is walked
            expected = math.inf if dims > 1 else 0.0
        most_exact = min(_MOST_EXACT, _LEAST_EXACT + expected / _VERTICES_AN_ANSWER)
        try:
            return _of_search(cells_of_ball(problem, most, most_exact, self.watch))
        except TooManyTies as error:
            if expected > most:
                enough = enough_vertices(expected, most)
                about = (
                    "" if math.isinf(expected) else f"; a random router has about {expected:,.0f}"
                )
                others = "a smaller --radius or fewer dimensions"
                raise UsageError(
                    f"within --radius {error}. Expected fewer, or a slice of at most {most:,} "
                    f"vertices (--vertices) to walk instead{about}.",
                    f"Ask for {others}."
                    if enough is None
                    else f"--vertices {enough} allows the walk; {others} are other ways.",
                ) from error
        except ValueError as error:
            if "degenerate" not in str(error):
                raise
        return None

    def around(self, token: int, point: Float64[np.ndarray, "dims"]) -> SliceCells:
        """Cells a few facets away from the cell of a token, where the rows span the slice."""
        hops, most = self.request.hops, self.request.vertices
        assert hops is not None
        columns, dims = independent_columns_of(self.weight), self.weight.shape[1]
        if len(columns) < dims:
            raise ValueError(
                f"the rows have rank {len(columns)} on {dims} dimensions: distances need a slice "
                "that they span"
            )
        near = cells_within_hops(self.weight, self.bias, self.k, point, hops, most)
        return replace(_of_search(near), hops=near.hops, at=token, tied=None)


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


def _of_search(ball: BallCells) -> SliceCells:
    """A whole search met no place where equal experts tie for the last place: it would be refused
    at the border of such a region.
    """
    return SliceCells(
        expert_set=ball.expert_set,
        witness=ball.nearest,
        facets=ball.facets,
        road="search",
        num_exact=ball.num_exact,
        is_whole=ball.is_whole,
        cell_distance=np.column_stack([ball.distance_lower, ball.distance_upper]),
        facet_distance=np.column_stack([ball.facet_distance_lower, ball.facet_distance_upper]),
        tied=ball.expert_set[:0],
    )


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
