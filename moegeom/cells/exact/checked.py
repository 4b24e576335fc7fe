"""Cells and walls that a walk proposes, kept where a point proves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from moegeom.cells.exact.exact_walk import Coalition, Point

Pair = tuple[Coalition, Coalition]


class Place:
    """Where a point of a chart or of a few columns lies among all coordinates."""

    def __init__(self, whole: Callable[[Sequence[Fraction]], list[Fraction]]) -> None:
        self._whole = whole

    def __call__(self, inner: Sequence[Fraction]) -> list[Fraction]:
        return self._whole(inner)

    @staticmethod
    def on_chart(mixture: Sequence[Fraction], side: Fraction) -> Place:
        """Points whose last coordinate is such that the mixed one is ``side``."""

        def whole(inner: Sequence[Fraction]) -> list[Fraction]:
            last = side - sum((c * x for c, x in zip(mixture, inner, strict=True)), Fraction(0))
            return [*inner, last]

        return Place(whole)

    def after(self, columns: Sequence[int], total: int) -> Place:
        """This place for points that have some of the columns only."""
        return Place(lambda inner: self._whole(_spread(inner, columns, total)))


def _spread(inner: Sequence[Fraction], columns: Sequence[int], total: int) -> list[Fraction]:
    point = [Fraction(0)] * total
    for column, value in zip(columns, inner, strict=True):
        point[column] = value
    return point


class Checked:
    """Takes proposed cells and walls with a point each, and keeps those that the point proves.

    With ``tie_broken`` equal experts are told apart, the lower number ahead.
    """

    def __init__(
        self, rows: Sequence[Sequence[Fraction]], offsets: Sequence[Fraction], tie_broken: bool
    ) -> None:
        self._rows, self._offsets = rows, offsets
        self._ranks = _classes(rows, offsets) if tie_broken else [0] * len(rows)
        self._class_of = _first_equals(rows, offsets) if tie_broken else list(range(len(rows)))
        self.cells: dict[Coalition, Point] = {}
        self.walls: dict[Pair, Point] = {}
        self.unbounded: set[Coalition] = set()

    def add_cell(self, coalition: Coalition, point: Sequence[Fraction], is_bounded: bool) -> bool:
        """Whether the coalition is ahead of all others at the point: then it is a cell."""
        if coalition not in self.cells:
            values = self._values(point)
            others = [j for j in range(len(values)) if j not in coalition]
            if not all(self._is_ahead(values, i, j) for i in coalition for j in others):
                return False
            self.cells[coalition] = tuple(point)
        if not is_bounded:
            self.unbounded.add(coalition)
        return True

    def _is_ahead(self, values: Sequence[tuple[Fraction, int]], one: int, other: int) -> bool:
        """Ahead by the logit; the rank decides between equal experts alone."""
        if values[one][0] != values[other][0]:
            return values[one][0] > values[other][0]
        return self._class_of[one] == self._class_of[other] and values[one] > values[other]

    def add_wall(self, pair: Pair, point: Sequence[Fraction]) -> bool:
        """Whether only the pair that is exchanged ties at the point: then it is a wall."""
        (out,), (into,) = pair[0] - pair[1], pair[1] - pair[0]
        values = self._values(point)
        level = values[out][0]
        inside = [values[i][0] for i in pair[0] if i != out]
        outside = [v[0] for j, v in enumerate(values) if j not in pair[0] and j != into]
        if self._rows[out] == self._rows[into] or values[into][0] != level:
            return False
        if min(inside, default=level + 1) <= level or max(outside, default=level - 1) >= level:
            return False
        return self.add_facet(*pair, point)

    def add_facet(self, one: Coalition, other: Coalition, point: Sequence[Fraction]) -> bool:
        """Whether two cells, both of them kept, share a facet around the point, known to be one."""
        if one == other or one not in self.cells or other not in self.cells:
            return False
        first, second = sorted((one, other), key=sorted)
        self.walls.setdefault((first, second), tuple(point))
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
