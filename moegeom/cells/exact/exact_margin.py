"""The widest margin of linear inequalities, or multipliers that leave none: exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np


def solve_strictly(
    rows: Sequence[Sequence[Fraction]], fixed: int
) -> tuple[Fraction, ...] | list[Fraction]:
    """u with r[0] + r[1:] u > 0 for all rows, = 0 for the first ``fixed``, or multipliers of rows.

    Multipliers, >= 0 but for the fixed, sum the rows up to a constant that is <= 0. The linear
    program max s, r[0] + r[1:] u >= s, by criss-cross steps of least index, which always end, from
    the first rows that are independent; in integers over one denominator (Edmonds). Fixed rows must
    be independent. Source: Terlaky, "A convergent criss-cross method", 1985.
    """
    scale = [lcm(*(value.denominator for value in row)) for row in rows]
    table = _Table(
        [
            [*(int(value * unit) for value in row), 0 if r < fixed else -unit]
            for r, (row, unit) in enumerate(zip(rows, scale, strict=True))
        ],
        fixed,
    )
    ray = table.solve()
    margin = table.basic.index(table.margin) if table.margin in table.basic else None
    if ray is None and margin is not None and table.entries[margin, 0] <= 0:
        found = [Fraction(0)] * len(rows)
        for column, label in enumerate(table.other):
            if 0 <= label < len(rows):
                value = Fraction(-table.entries[margin, column], table.common)
                found[label] = value * scale[label]
        return found
    return table.point(ray)


class _Table:
    """Rows in terms of as many unknowns: common * basic = entries @ (1, other).

    Labels are those of the rows, then of the unknowns; the last one is the margin, and that of the
    constant column is -1. The first ``fixed`` rows are 0 once they are in columns.
    """

    def __init__(self, entries: list[list[int]], fixed: int) -> None:
        self.entries, self.common = np.array(entries, object), 1
        self.num, width = self.entries.shape
        self._fixed, self.margin = fixed, self.num + width - 2
        self.basic = list(range(self.num))
        self.other = [-1, *range(self.num, self.num + width - 1)]

    def solve(self) -> int | None:
        """Steps to the widest margin; the column in which it grows without end, if it does."""
        for row in range(self.num):
            free = [c for c, label in enumerate(self.other) if label >= self.num]
            column = next((c for c in free if self.entries[row, c]), None)
            if column is not None:
                self._pivot(row, column)
        if self.margin in self.other:
            return self.other.index(self.margin)
        while True:
            margin = self.entries[self.basic.index(self.margin)]
            rows = {label: r for r, label in enumerate(self.basic) if self._is_strict(label)}
            columns = {label: c for c, label in enumerate(self.other) if self._is_strict(label)}
            wrong = [label for label, r in rows.items() if self.entries[r, 0] < 0]
            wrong += [label for label, c in columns.items() if margin[c] > 0]
            if not wrong:
                return None
            first = min(wrong)
            if first in rows:
                row = rows[first]
                # the margin may fall as far as it likes: some column helps
                self._pivot(
                    row, columns[min(i for i, c in columns.items() if self.entries[row, c] > 0)]
                )
                continue
            column = columns[first]
            stops = [label for label, r in rows.items() if self.entries[r, column] < 0]
            if not stops:
                return column
            self._pivot(rows[min(stops)], column)

    def _is_strict(self, label: int) -> bool:
        return self._fixed <= label < self.num

    def _pivot(self, row: int, column: int) -> None:
        """The variable of the row and that of the column change places."""
        own, lead = self.entries[row].copy(), self.entries[row, column]
        rates = self.entries[:, column].copy()
        self.entries = (self.entries * lead - np.outer(rates, own)) // self.common
        self.entries[:, column] = rates
        self.entries[row] = -own
        self.entries[row, column] = self.common
        self.common = lead
        if lead < 0:
            self.entries, self.common = -self.entries, -lead
        self.basic[row], self.other[column] = self.other[column], self.basic[row]

    def point(self, ray: int | None) -> tuple[Fraction, ...]:
        """The unknowns but for the margin, as far along the ray as makes the margin win."""
        start = self.entries[:, 0]
        rate = 0 * start if ray is None else self.entries[:, ray]
        step = Fraction(0)
        if ray is not None:
            short = [-start[r] for r, label in enumerate(self.basic) if self._is_strict(label)]
            wanted = Fraction(max([0, *short]), self.common) + 1
            if self.margin in self.basic:
                row = self.basic.index(self.margin)
                step = max(Fraction(0), (wanted * self.common - start[row]) / rate[row])
            else:
                step = wanted
        found = dict.fromkeys(range(self.num, self.margin), Fraction(0))
        for row, label in enumerate(self.basic):
            if self.num <= label < self.margin:
                found[label] = (start[row] + rate[row] * step) / Fraction(self.common)
        return tuple(found.values())
