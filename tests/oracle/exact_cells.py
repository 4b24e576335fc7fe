"""The reference of the enumeration: all cells and facets of a router, in exact arithmetic alone."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.routing_cells.exact.certificate_check import CellPoint, NoCell
from moegeom.routing_cells.exact.dictionary import Arrangement, dictionary, exact_columns, rank
from moegeom.routing_cells.walk.enumeration import interval_middle
from moegeom.routing_cells.walk.level_walk import diagram_edges, first_vertex
from moegeom.routing_cells.walk.segment_crossings import sweep

ExpertSet = frozenset[int]
Point = tuple[Fraction, ...]


def certificate_of(data: dict[str, Any]) -> CellPoint | NoCell:
    """The certificate that ``as_json`` wrote."""
    common = int(data["denominator"], 16)
    if data["kind"] == "cell_point":
        return CellPoint(tuple(Fraction(int(x, 16), common) for x in data["point"]))
    sides = (data["inside"], data["outside"])
    return NoCell(*(tuple((e, Fraction(int(x, 16), common)) for e, x in side) for side in sides))


@dataclass(eq=False)
class Hull:
    """Vertices and rays that span a cell or a facet."""

    vertices: list[Point] = field(default_factory=list)
    rays: list[Point] = field(default_factory=list)

    def inner(self) -> list[Fraction]:
        """A point of the relative interior: the mean of the vertices, and the sum of the rays."""
        count = len(self.vertices)
        return [
            sum(column, Fraction(0)) / count + sum((ray[m] for ray in self.rays), Fraction(0))
            for m, column in enumerate(zip(*self.vertices, strict=True))
        ]


@dataclass(eq=False)
class ExactDiagram:
    """Cells and facets of the perturbed instance, as hulls; facets by the pair of their cells."""

    cells: dict[ExpertSet, Hull] = field(default_factory=dict)
    facets: dict[tuple[ExpertSet, ExpertSet], Hull] = field(default_factory=dict)
    num_vertices: int = 0


def independent_columns(weight: Sequence[Sequence[Fraction]]) -> list[int]:
    """Columns of W whose differences w_i - w_1 are independent, as many as the rank."""
    first = weight[0]
    return exact_columns(
        [[value - own for value, own in zip(row, first, strict=True)] for row in weight[1:]]
    )


def exact_walk(arrangement: Arrangement, k: int) -> ExactDiagram:
    """All cells with k experts above and the facets between them, for d >= 2 and full rank.

    The rows less the first must have rank d, and 0 < k < E. Ties are broken as if the bias of a
    lower number were larger by more: cells of the instance itself are among those found.
    """
    diagram = ExactDiagram()
    first = first_vertex(arrangement, k)
    seen, left = {frozenset(first.on)}, [first]
    while left:
        vertex = left.pop()
        diagram.num_vertices += 1
        point = vertex.point()
        for hull in _around(diagram, vertex.on, vertex.above, k):
            hull.vertices.append(point)
        for column, upwards in diagram_edges(vertex, k, arrangement.dimension):
            met = vertex.shot(column, upwards)
            if met is None:
                ray = vertex.direction(column, upwards)
                leaving = vertex.on[column]
                above = vertex.above | {leaving} if upwards else vertex.above
                rest = [expert for expert in vertex.on if expert != leaving]
                for hull in _around(diagram, rest, above, k):
                    hull.rays.append(ray)
                continue
            on = tuple(sorted({*vertex.on, met} - {vertex.on[column]}))
            if frozenset(on) not in seen:
                seen.add(frozenset(on))
                following = dictionary(arrangement, on)
                assert following is not None, "an edge ends in a vertex"
                left.append(following)
    return diagram


def _around(
    diagram: ExactDiagram, on: Sequence[int], above: frozenset[int], k: int
) -> Iterator[Hull]:
    """Cells and facets that meet where ``on`` are on the level and ``above`` over it."""
    for some in itertools.combinations(on, k - len(above)):
        expert_set = above | set(some)
        yield diagram.cells.setdefault(expert_set, Hull())
        for out, into in itertools.product(some, (expert for expert in on if expert not in some)):
            if out < into:  # each facet once: from the side on which the lower number is chosen
                pair = (expert_set, expert_set - {out} | {into})
                yield diagram.facets.setdefault(pair, Hull())


# ----------------------------------------------------------------------------------------- cells
Pair = tuple[ExpertSet, ExpertSet]


def first_equals(router: Arrangement) -> list[int]:
    """For each expert the first one whose row and bias are equal."""
    first: dict[tuple[Fraction, ...], int] = {}
    experts = zip(router.weight, router.bias, strict=True)
    return [
        first.setdefault((*row, offset), number) for number, (row, offset) in enumerate(experts)
    ]


class _Checked:
    """Proposed cells and facets that a point proves, with that point.

    With ``tie_broken`` equal experts are told apart, the lower number ahead; else what is a cell
    then only is ``tied``.
    """

    def __init__(self, router: Arrangement, tie_broken: bool) -> None:
        self._router, self._tie_broken = router, tie_broken
        self._class_of = first_equals(router)
        self.cells: dict[ExpertSet, Point] = {}
        self.tied: set[ExpertSet] = set()
        self.facets: dict[Pair, Point] = {}
        self.unbounded: set[ExpertSet] = set()

    def add_cell(self, expert_set: ExpertSet, point: Sequence[Fraction], is_bounded: bool) -> bool:
        """Whether the expert set is ahead of all others at the point: then it is a cell."""
        if expert_set not in self.cells:
            logits = self._router.at(point)
            others = [j for j in range(len(logits)) if j not in expert_set]
            if not all(self._is_ahead(logits, i, j) for i in expert_set for j in others):
                return False
            splits = {self._class_of[i] for i in expert_set} & {self._class_of[j] for j in others}
            if splits and not self._tie_broken:
                self.tied.add(expert_set)
                return False
            self.cells[expert_set] = tuple(point)
        if not is_bounded:
            self.unbounded.add(expert_set)
        return True

    def _is_ahead(self, logits: Sequence[Fraction], one: int, other: int) -> bool:
        """Ahead by the logit, or of equal experts by the number."""
        if logits[one] != logits[other]:
            return logits[one] > logits[other]
        return self._class_of[one] == self._class_of[other] and one < other

    def add_facet(self, pair: Pair, point: Sequence[Fraction]) -> bool:
        """Whether only the pair that is exchanged ties at the point: then it is a facet."""
        (out,), (into,) = pair[0] - pair[1], pair[1] - pair[0]
        logits = self._router.at(point)
        level = logits[out]
        inside = [logits[i] for i in pair[0] if i != out]
        outside = [value for j, value in enumerate(logits) if j not in pair[0] and j != into]
        if self._router.weight[out] == self._router.weight[into] or logits[into] != level:
            return False
        if min(inside, default=level + 1) <= level or max(outside, default=level - 1) >= level:
            return False
        return self.add_known_facet(*pair, point)

    def add_known_facet(self, one: ExpertSet, other: ExpertSet, point: Sequence[Fraction]) -> bool:
        """Whether two sets, which share a facet around the point, are both cells."""
        if one == other or one not in self.cells or other not in self.cells:
            return False
        first, second = sorted((one, other), key=sorted)
        self.facets.setdefault((first, second), tuple(point))
        return True


@dataclass(frozen=True)
class ExactCells:
    """Cells by expert set with a point strictly inside each, and facets with one inside each.

    A facet is a pair of cells whose closures share a facet, in the order of their sorted experts.
    They differ in one expert but where several pairs tie on one hyperplane. ``unbounded`` are the
    cells that hold a ray; of a central router all do. ``tied`` are sets that are no cells because
    equal experts tie all over one, and that would be with ``tie_broken``.
    """

    cells: dict[ExpertSet, Point]
    facets: dict[Pair, Point]
    unbounded: frozenset[ExpertSet]
    tied: frozenset[ExpertSet]


def exact_cells(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"] | None,
    k: int,
    tie_broken: bool = False,
) -> ExactCells:
    r"""The expert sets S for which some open set of inputs has S as its k largest logits.

    .. math:: C_S = \{x : z_i(x) > z_j(x), i \in S, j \notin S\}, \quad z = W x + b

    The numbers are taken as they are, exact dyadic rationals; every cell and facet comes with a
    rational point that was checked. ``bias`` None is one of zeros. With ``tie_broken`` equal
    experts (rows and biases) count as apart, the lower number ahead of the higher; else no cell
    splits them. For d >= 2 a walk over the vertices in exact arithmetic: some hundred microseconds
    each, for references and for small instances. k = E is the one cell of all experts.

    Raises ValueError for k outside 1..E. Source: docs/theory.md G1; the certified instances there
    are the oracle in tests.
    """
    experts, dims = weight.shape
    if not 1 <= k <= experts:
        raise ValueError(f"top_k {k} of {experts} experts")
    whole = Arrangement.of(weight, np.zeros(experts) if bias is None else bias)
    columns = independent_columns(whole.weight)
    router = Arrangement([[row[c] for c in columns] for row in whole.weight], whole.bias)
    checked = _Checked(router, tie_broken)
    if k == experts or not columns:
        order = sorted(range(experts), key=lambda i: (-router.bias[i], i))
        _ = checked.add_cell(frozenset(order[:k]), [Fraction(0)] * len(columns), is_bounded=False)
    elif len(columns) == 1:
        _swept(router, k, checked)
    else:
        _walked(router, k, checked)

    def place(point: Point) -> Point:
        """In all coordinates; those of the other columns are 0."""
        value = dict(zip(columns, point, strict=True))
        return tuple(value.get(column, Fraction(0)) for column in range(dims))

    return ExactCells(
        {cell: place(point) for cell, point in checked.cells.items()},
        {pair: place(point) for pair, point in checked.facets.items()},
        frozenset(checked.cells if len(columns) < dims else checked.unbounded),
        frozenset(checked.tied),
    )


def _walked(router: Arrangement, k: int, checked: _Checked) -> None:
    diagram = exact_walk(router, k)
    is_simple = True
    for expert_set, hull in diagram.cells.items():
        is_simple &= checked.add_cell(expert_set, hull.inner(), is_bounded=not hull.rays)
    for pair, hull in diagram.facets.items():
        is_simple &= checked.add_facet(pair, hull.inner())
    for expert_set, hull in {} if is_simple else diagram.cells.items():
        if expert_set in checked.cells:
            _facets(expert_set, hull, router, checked)


def _facets(expert_set: ExpertSet, hull: Hull, router: Arrangement, checked: _Checked) -> None:
    """Facets of a cell at which more than one pair may tie: what lies behind each of its facets."""
    experts = range(router.num_experts)
    at = [(vertex, router.at(vertex)) for vertex in hull.vertices]
    along = [(ray, router.along(ray)) for ray in hull.rays]
    for out, into in product(expert_set, set(experts) - expert_set):
        vertices = [vertex for vertex, logits in at if logits[out] == logits[into]]
        rays = [ray for ray, slopes in along if slopes[out] == slopes[into]]
        if not vertices or router.weight[out] == router.weight[into]:
            continue
        spanned = [[a - b for a, b in zip(v, vertices[0], strict=True)] for v in vertices[1:]]
        if rank([*spanned, *map(list, rays)]) < router.dimension - 1:
            continue
        inner = Hull(vertices, rays).inner()
        away = [b - a for a, b in zip(router.weight[out], router.weight[into], strict=True)]
        keys = list(zip(router.at(inner), router.along(away), (-i for i in experts), strict=True))
        behind = sorted(experts, key=keys.__getitem__, reverse=True)[: len(expert_set)]
        _ = checked.add_known_facet(expert_set, frozenset(behind), inner)


def _swept(router: Arrangement, k: int, checked: _Checked) -> None:
    before: ExpertSet | None = None
    for expert_set, start, stop in sweep([row[0] for row in router.weight], router.bias, k):
        is_bounded = start is not None and stop is not None
        _ = checked.add_cell(expert_set, [interval_middle(start, stop)], is_bounded)
        if before is not None and start is not None:
            _ = checked.add_known_facet(before, expert_set, [start])
        before = expert_set


def expert_sets(exact: ExactCells) -> list[tuple[int, ...]]:
    """Cells as sorted tuples, in order."""
    return sorted(tuple(sorted(expert_set)) for expert_set in exact.cells)
