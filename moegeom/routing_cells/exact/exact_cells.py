"""All cells of a top-k router and the facets between them, proved in exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.core.text import number_of
from moegeom.routing_cells.exact.dictionary import Arrangement, inverse_of
from moegeom.routing_cells.exact.exact_walk import ExpertSet, Hull, Point, exact_walk
from moegeom.routing_cells.exact.rank import independent_columns, rank

Piece = tuple[frozenset[int], Fraction | None, Fraction | None]


def sweep(slope: Sequence[Fraction], offset: Sequence[Fraction], k: int) -> Iterator[Piece]:
    """Top-k sets of ``slope * x + offset`` from left to right, with the interval of each.

    Ends are None where there are none. Of equal lines the lower number wins, so that their cells
    are tie-broken; no interval is empty. From one break to the next by Newton steps on the lower
    envelope of the chosen lines against the upper one of the others. For 0 < k < E.
    """
    lines = range(len(slope))
    start: Fraction | None = None
    while True:
        order = sorted(lines, key=lambda i: _key(i, start, slope, offset))
        chosen, others = order[:k], order[k:]
        stop = _next_break(chosen, others, slope, offset)
        yield frozenset(chosen), start, stop
        if stop is None:
            return
        start = stop


def _key(
    i: int, at: Fraction | None, slope: Sequence[Fraction], offset: Sequence[Fraction]
) -> tuple[Fraction, Fraction, int]:
    """Descending values just right of ``at``; far to the left where that is None."""
    if at is None:
        return slope[i], -offset[i], i
    return -(slope[i] * at + offset[i]), -slope[i], i


def _next_break(
    chosen: Sequence[int],
    others: Sequence[int],
    slope: Sequence[Fraction],
    offset: Sequence[Fraction],
) -> Fraction | None:
    """Where one of the others first overtakes a chosen line; None where none ever does."""
    out = min(chosen, key=lambda i: (slope[i], offset[i]))
    into = max(others, key=lambda j: (slope[j], offset[j]))
    found = None
    while slope[into] > slope[out]:
        at = (offset[out] - offset[into]) / (slope[into] - slope[out])
        if found is not None and at >= found:
            break
        found = at
        values = [rate * at + value for rate, value in zip(slope, offset, strict=True)]
        out = min(chosen, key=lambda i: (values[i], slope[i]))
        into = max(others, key=lambda j: (values[j], slope[j]))
        if values[out] >= values[into]:
            break
    return found


Pair = tuple[ExpertSet, ExpertSet]


class CellPlace:
    """Where a point of a chart or of a few columns lies among all coordinates."""

    def __init__(self, whole: Callable[[Sequence[Fraction]], list[Fraction]]) -> None:
        self._whole = whole

    def __call__(self, inner: Sequence[Fraction]) -> list[Fraction]:
        return self._whole(inner)

    @staticmethod
    def on_chart(mixture: Sequence[Fraction], side: Fraction) -> CellPlace:
        """Points whose last coordinate is such that the mixed one is ``side``."""

        def whole(inner: Sequence[Fraction]) -> list[Fraction]:
            last = side - sum((c * x for c, x in zip(mixture, inner, strict=True)), Fraction(0))
            return [*inner, last]

        return CellPlace(whole)

    def after(self, columns: Sequence[int], total: int) -> CellPlace:
        """This place for points that have some of the columns only."""
        return CellPlace(lambda inner: self._whole(_spread(inner, columns, total)))


def _spread(inner: Sequence[Fraction], columns: Sequence[int], total: int) -> list[Fraction]:
    point = [Fraction(0)] * total
    for column, value in zip(columns, inner, strict=True):
        point[column] = value
    return point


class Checked:
    """Takes proposed cells and facets with a point each, and keeps those that the point proves.

    With ``tie_broken`` equal experts are told apart, the lower number ahead; else what is a cell
    then only is kept as ``tied``.
    """

    def __init__(
        self, rows: Sequence[Sequence[Fraction]], offsets: Sequence[Fraction], tie_broken: bool
    ) -> None:
        self._rows, self._offsets, self._tie_broken = rows, offsets, tie_broken
        self._ranks, self._class_of = _classes(rows, offsets), _first_equals(rows, offsets)
        self.cells: dict[ExpertSet, Point] = {}
        self.tied: set[ExpertSet] = set()
        self.facets: dict[Pair, Point] = {}
        self.unbounded: set[ExpertSet] = set()

    def add_cell(self, expert_set: ExpertSet, point: Sequence[Fraction], is_bounded: bool) -> bool:
        """Whether the expert set is ahead of all others at the point: then it is a cell."""
        if expert_set not in self.cells:
            values = self._values(point)
            others = [j for j in range(len(values)) if j not in expert_set]
            if not all(self._is_ahead(values, i, j) for i in expert_set for j in others):
                return False
            splits = {self._class_of[i] for i in expert_set} & {self._class_of[j] for j in others}
            if splits and not self._tie_broken:
                self.tied.add(expert_set)
                return False
            self.cells[expert_set] = tuple(point)
        if not is_bounded:
            self.unbounded.add(expert_set)
        return True

    def _is_ahead(self, values: Sequence[tuple[Fraction, int]], one: int, other: int) -> bool:
        """Ahead by the logit, or of equal experts by the rank."""
        if values[one][0] != values[other][0]:
            return values[one][0] > values[other][0]
        return self._class_of[one] == self._class_of[other] and values[one] > values[other]

    def add_facet(self, pair: Pair, point: Sequence[Fraction]) -> bool:
        """Whether only the pair that is exchanged ties at the point: then it is a facet."""
        (out,), (into,) = pair[0] - pair[1], pair[1] - pair[0]
        values = self._values(point)
        level = values[out][0]
        inside = [values[i][0] for i in pair[0] if i != out]
        outside = [v[0] for j, v in enumerate(values) if j not in pair[0] and j != into]
        if self._rows[out] == self._rows[into] or values[into][0] != level:
            return False
        if min(inside, default=level + 1) <= level or max(outside, default=level - 1) >= level:
            return False
        return self.add_known_facet(*pair, point)

    def add_known_facet(self, one: ExpertSet, other: ExpertSet, point: Sequence[Fraction]) -> bool:
        """Whether two cells, both of them kept, share a facet around the point, known to be one."""
        if one == other or one not in self.cells or other not in self.cells:
            return False
        first, second = sorted((one, other), key=sorted)
        self.facets.setdefault((first, second), tuple(point))
        return True

    def _values(self, point: Sequence[Fraction]) -> list[tuple[Fraction, int]]:
        """Logits, and the rank among equal experts."""
        return [
            (sum((w * x for w, x in zip(row, point, strict=True)), offset), -number)
            for row, offset, number in zip(self._rows, self._offsets, self._ranks, strict=True)
        ]


def _classes(rows: Sequence[Sequence[Fraction]], offsets: Sequence[Fraction]) -> list[int]:
    """For each expert how many of lower number are equal to it."""
    seen: dict[tuple[Fraction, ...], int] = {}
    ranks = []
    for row, offset in zip(rows, offsets, strict=True):
        key = (*row, offset)
        ranks.append(seen.get(key, 0))
        seen[key] = ranks[-1] + 1
    return ranks


def _first_equals(rows: Sequence[Sequence[Fraction]], offsets: Sequence[Fraction]) -> list[int]:
    """For each expert the first one that is equal to it."""
    first: dict[tuple[Fraction, ...], int] = {}
    return [
        first.setdefault((*row, offset), number)
        for number, (row, offset) in enumerate(zip(rows, offsets, strict=True))
    ]


#: Coefficients of the coordinate on which the charts of a central router lie: without pattern.
_MIXTURE = (3, -7, 11, -13, 17, -19, 23, -29, 31, -37, 41)

#: Cells that a closed form lists.
MOST_LISTED = 10**6


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
    rational point that was checked. ``bias`` None is a central router. With ``tie_broken`` equal
    experts (rows and biases) count as apart, the lower number ahead of the higher; else no cell
    splits them. For d >= 2 a walk over the vertices in exact arithmetic: some hundred microseconds
    each, for references and for small instances. k = E is the one cell of all experts.

    Raises ValueError for k outside 1..E. Source: docs/theory.md G1; the certified instances there
    are the oracle in tests.
    """
    rows = [[Fraction(float(value)) for value in row] for row in weight]
    offsets = [Fraction(0)] * len(rows) if bias is None else [Fraction(float(b)) for b in bias]
    experts = len(rows)
    if not 1 <= k <= experts:
        raise ValueError(f"top_k {k} of {experts} experts")
    kept = independent_columns(rows)
    inner = [[row[column] for column in kept] for row in rows]
    checked = Checked(inner, offsets, tie_broken)
    if k == experts:
        checked.add_cell(frozenset(range(experts)), [Fraction(0)] * len(kept), is_bounded=False)
    elif len(kept) == experts - 1:
        _all_subsets(inner, offsets, k, checked)
    elif bias is None and len(kept) > 1:  # on a line the charts would miss the facet at 0
        _central(inner, k, checked)
    else:
        _affine(inner, offsets, k, checked, CellPlace(list))
    spread = CellPlace(list).after(kept, len(rows[0]))
    return ExactCells(
        {cell: tuple(spread(point)) for cell, point in checked.cells.items()},
        {pair: tuple(spread(point)) for pair, point in checked.facets.items()},
        frozenset(checked.cells if len(kept) < len(rows[0]) else checked.unbounded),
        frozenset(checked.tied),
    )


def _central(rows: Sequence[Sequence[Fraction]], k: int, checked: Checked) -> None:
    """Logits without bias: cells are cones, met by one of two affine charts on either side of 0.

    The charts lie at +1 and -1 of a coordinate that is mixed from all, so that no facet lies in the
    plane between them, where no chart would meet it.
    """
    size = len(rows[0])
    for shift in range(len(_MIXTURE)):
        mixture = [Fraction(_MIXTURE[(m + shift) % len(_MIXTURE)]) for m in range(size - 1)]
        if not any(_is_along([*mixture, Fraction(1)], a, b) for a, b in combinations(rows, 2)):
            break
    mixed = [
        [*(v - c * row[-1] for v, c in zip(row[:-1], mixture, strict=True)), row[-1]]
        for row in rows
    ]
    for side in (Fraction(1), Fraction(-1)):
        chart, offsets = [row[:-1] for row in mixed], [side * row[-1] for row in mixed]
        _affine(chart, offsets, k, checked, CellPlace.on_chart(mixture, side))
    checked.unbounded |= set(checked.cells)


def _is_along(normal: Sequence[Fraction], a: Sequence[Fraction], b: Sequence[Fraction]) -> bool:
    """Whether the facet between two rows is the plane with this normal."""
    difference = [x - y for x, y in zip(a, b, strict=True)]
    if not any(difference):
        return False
    return all(d == difference[-1] * n for d, n in zip(difference, normal, strict=True))


def _affine(
    rows: Sequence[Sequence[Fraction]],
    offsets: Sequence[Fraction],
    k: int,
    checked: Checked,
    place: CellPlace,
) -> None:
    """Cells of an affine instance; ``place`` takes its points to those of the router."""
    columns = independent_columns(rows) if rows[0] else []
    if len(columns) < len(rows[0]):
        inner = [[row[column] for column in columns] for row in rows]
        _affine(inner, offsets, k, checked, place.after(columns, len(rows[0])))
    elif not columns:
        order = sorted(range(len(rows)), key=lambda i: (-offsets[i], i))
        checked.add_cell(frozenset(order[:k]), place([]), is_bounded=False)
    elif len(columns) == 1:
        _swept([row[0] for row in rows], offsets, k, checked, place)
    else:
        walked = exact_walk(Arrangement(rows, offsets), k)
        is_simple = True
        for expert_set, hull in walked.cells.items():
            point = place(hull.inner())
            is_simple &= checked.add_cell(expert_set, point, is_bounded=not hull.rays)
        for pair, hull in walked.facets.items():
            is_simple &= checked.add_facet(pair, place(hull.inner()))
        if not is_simple:
            for expert_set, hull in walked.cells.items():
                if expert_set in checked.cells:
                    _facets(expert_set, hull, rows, offsets, checked, place)


def _facets(
    expert_set: ExpertSet,
    hull: Hull,
    rows: Sequence[Sequence[Fraction]],
    offsets: Sequence[Fraction],
    checked: Checked,
    place: CellPlace,
) -> None:
    """Facets of a cell at which more than one pair may tie: what lies behind each of its facets."""

    def gap(out: int, into: int, point: Sequence[Fraction], offset: int) -> Fraction:
        terms = ((a - b) * x for a, b, x in zip(rows[out], rows[into], point, strict=True))
        return sum(terms, Fraction(0)) + offset * (offsets[out] - offsets[into])

    for out, into in product(expert_set, set(range(len(rows))) - expert_set):
        vertices = [point for point in hull.vertices if gap(out, into, point, 1) == 0]
        rays = [ray for ray in hull.rays if gap(out, into, ray, 0) == 0]
        if not vertices or rows[out] == rows[into]:
            continue
        spanned = [[a - b for a, b in zip(v, vertices[0], strict=True)] for v in vertices[1:]]
        if rank([*spanned, *map(list, rays)]) < len(rows[0]) - 1:
            continue
        inner = Hull(vertices, rays).inner()
        away = [b - a for a, b in zip(rows[out], rows[into], strict=True)]
        behind = _top_behind(inner, away, rows, offsets, len(expert_set))
        checked.add_known_facet(expert_set, behind, place(inner))


def _top_behind(
    point: Sequence[Fraction],
    away: Sequence[Fraction],
    rows: Sequence[Sequence[Fraction]],
    offsets: Sequence[Fraction],
    k: int,
) -> ExpertSet:
    """The top k just behind a point, in a direction."""

    def key(expert: int) -> tuple[Fraction, Fraction, int]:
        value = sum((w * x for w, x in zip(rows[expert], point, strict=True)), offsets[expert])
        slope = sum((w * a for w, a in zip(rows[expert], away, strict=True)), Fraction(0))
        return -value, -slope, expert

    return frozenset(sorted(range(len(rows)), key=key)[:k])


def _swept(
    slope: Sequence[Fraction],
    offset: Sequence[Fraction],
    k: int,
    checked: Checked,
    place: CellPlace,
) -> None:
    before: ExpertSet | None = None
    for expert_set, start, stop in sweep(slope, offset, k):
        is_bounded = start is not None and stop is not None
        checked.add_cell(expert_set, place([_middle(start, stop)]), is_bounded)
        if before is not None and start is not None:
            checked.add_known_facet(before, expert_set, place([start]))
        before = expert_set


def _middle(start: Fraction | None, stop: Fraction | None) -> Fraction:
    if start is None:
        return Fraction(0) if stop is None else stop - 1
    return start + 1 if stop is None else (start + stop) / 2


def _all_subsets(
    rows: Sequence[Sequence[Fraction]],
    offsets: Sequence[Fraction],
    k: int,
    checked: Checked,
) -> None:
    """Rank E - 1: logits take every value but for a common shift, so that every set is a cell."""
    experts = len(rows)
    if comb(experts, k) > MOST_LISTED:
        raise ValueError(f"{number_of(comb(experts, k), 'cell')}, all subsets: counted, not listed")
    differences = [
        [value - first for value, first in zip(row, rows[0], strict=True)] for row in rows[1:]
    ]
    inverse = inverse_of(differences)
    assert inverse is not None, "rank E - 1"

    def solve(expert_set: ExpertSet, tied: Sequence[int]) -> list[Fraction]:
        """x with logits 1 on an expert set, 0 elsewhere, one half on a tied pair; but a shift."""
        wanted = [Fraction(int(i in expert_set)) for i in range(experts)]
        for expert in tied:
            wanted[expert] = Fraction(1, 2)
        right = [wanted[i] - offsets[i] - (wanted[0] - offsets[0]) for i in range(1, experts)]
        return [
            sum((a * b for a, b in zip(row, right, strict=True)), Fraction(0)) for row in inverse
        ]

    listed = [frozenset(some) for some in combinations(range(experts), k)]
    for expert_set in listed:
        checked.add_cell(expert_set, solve(expert_set, ()), is_bounded=False)
    for expert_set in listed:
        for out, into in product(expert_set, set(range(experts)) - expert_set):
            if out < into:
                pair = (expert_set, expert_set - {out} | {into})
                checked.add_facet(pair, solve(expert_set, (out, into)))


def expert_sets(found: ExactCells) -> list[tuple[int, ...]]:
    """Cells as sorted tuples, in order."""
    return sorted(tuple(sorted(expert_set)) for expert_set in found.cells)
