r"""The dictionary of a vertex: every expert in terms of those that tie there, in exact arithmetic.

Top-k of :math:`z = W x + b` is the arrangement of the hyperplanes
:math:`f_i(x, t) = z_i(x) - t` in one dimension more: x is in the cell of S where some level t has
the experts of S above it and all others below. At a vertex d + 1 experts I have f = 0, and

.. math:: f_j = F_j + \sum_{m \in I} R_{jm} f_m

for every other one, so that moving along an edge (one m leaves the level, the others stay) is one
column of R. Ties beyond I are broken as if :math:`b_i` were larger by :math:`\epsilon^{(i)}`,
each of them infinitely smaller than the one before: the lower number wins, as everywhere, and every
vertex is simple. All of it is computed in integers, over one denominator for each vertex. Source:
docs/theory.md G1 and G2; oracle in tests: the same in fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm
from operator import mul

import numpy as np

from moegeom.core.shapes import Float64

Rows = Sequence[Sequence[Fraction]]


@dataclass(frozen=True, eq=False)
class Integers:
    """Rows (w, -1) and biases as integers: coordinate m of W times ``units[m]``, b times ``unit``.

    The hyperplanes are the same in coordinates x_m unit / units[m].
    """

    rows: Sequence[Sequence[int]]
    bias: Sequence[int]
    units: Sequence[int]
    unit: int


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Hyperplanes :math:`w_i x + b_i = t` with exact numbers."""

    weight: Rows
    bias: Sequence[Fraction]

    @staticmethod
    def of(
        weight: Float64[np.ndarray, "experts dims"], bias: Float64[np.ndarray, "experts"]
    ) -> Arrangement:
        """The same numbers as fractions."""
        rows = [[Fraction(value) for value in row] for row in weight.tolist()]
        return Arrangement(rows, [Fraction(value) for value in bias.tolist()])

    @property
    def num_experts(self) -> int:
        return len(self.bias)

    @property
    def dimension(self) -> int:
        return len(self.weight[0])

    @cached_property
    def integers(self) -> Integers:
        """The same hyperplanes without denominators."""
        units = [lcm(*(value.denominator for value in c)) for c in zip(*self.weight, strict=True)]
        unit = lcm(*(value.denominator for value in self.bias))
        rows = [
            [*(int(value * scale) for value, scale in zip(row, units, strict=True)), -1]
            for row in self.weight
        ]
        return Integers(rows, [int(value * unit) for value in self.bias], units, unit)


@dataclass(frozen=True, eq=False)
class Dictionary:
    """A vertex: the experts ``on`` the level there, in order, and the others in terms of them.

    ``inverse`` is that of the rows (w, -1) of ``on`` and ``place`` the vertex, in the units of
    ``integers`` and both of them times ``denominator`` > 0. What is asked of all experts is
    computed when it is asked.
    """

    on: tuple[int, ...]
    inverse: Sequence[Sequence[int]]
    place: Sequence[int]
    denominator: int
    integers: Integers

    @cached_property
    def residual(self) -> list[int]:
        """F of every expert, times ``denominator``."""
        return [
            sum(map(mul, row, self.place)) + self.denominator * offset
            for row, offset in zip(self.integers.rows, self.integers.bias, strict=True)
        ]

    @cached_property
    def tied(self) -> frozenset[int]:
        """The experts on the level but for the perturbation, ``on`` among them."""
        return frozenset(j for j, value in enumerate(self.residual) if value == 0)

    @cached_property
    def above(self) -> frozenset[int]:
        """The experts over the level."""
        others = self.tied.difference(self.on)
        over = {j for j, value in enumerate(self.residual) if value > 0}
        return frozenset(over | {j for j in others if self._is_pushed_up(j)})

    @cached_property
    def _slopes(self) -> dict[int, list[int]]:
        return {}

    def point(self, arrangement: Arrangement) -> tuple[Fraction, ...]:
        """x where the experts ``on`` tie, without perturbation."""
        whole = self.denominator * arrangement.integers.unit
        units = arrangement.integers.units
        return tuple(
            Fraction(value * scale, whole) for value, scale in zip(self.place, units, strict=False)
        )

    def direction(self, column: int, upwards: bool) -> tuple[Fraction, ...]:
        """The direction in x in which ``on[column]`` leaves the level and the others stay on it."""
        sign = 1 if upwards else -1
        return tuple(
            Fraction(sign * row[column] * scale, self.denominator)
            for row, scale in zip(self.inverse, self.integers.units, strict=False)
        )

    def slope(self, column: int) -> list[int]:
        """R of every expert and of ``on[column]``, times ``denominator``."""
        found = self._slopes.get(column)
        if found is None:
            own = [row[column] for row in self.inverse]
            found = [sum(map(mul, row, own)) for row in self.integers.rows]
            self._slopes[column] = found
        return found

    def shot(self, column: int, upwards: bool) -> int | None:
        """The first expert that is met where ``on[column]`` leaves the level; None for a ray."""
        on, above, residual = self.on, self.above, self.residual
        best, own_rate, own_height = None, 0, 0
        for j, rate in enumerate(self.slope(column)):
            if rate == 0 or ((rate > 0) == upwards) == (j in above) or j in on:
                continue
            # where the expert that leaves is at f = tau, j is met at |tau| = |F_j| / |R_j|
            rate, height = abs(rate), abs(residual[j])
            farther = -1 if best is None else height * own_rate - own_height * rate
            if farther == 0 and best is not None:
                farther = self._tie(j, best, column) * (1 if upwards else -1)
            if farther < 0:
                best, own_rate, own_height = j, rate, height
        return best

    def _tie(self, j: int, other: int, column: int) -> int:
        """The sign of tau of j less that of the other one, by the first perturbation that tells."""
        rates = self.slope(column)[j], self.slope(column)[other]
        orientation = 1 if (rates[0] > 0) == (rates[1] > 0) else -1
        for expert in sorted({*self.on, j, other}):
            of_j, of_other = self._change(j, expert), self._change(other, expert)
            difference = (of_other * rates[0] - of_j * rates[1]) * orientation
            if difference != 0:
                return 1 if difference > 0 else -1
        raise AssertionError("two experts have perturbations of their own")

    def _is_pushed_up(self, j: int) -> bool:
        """Whether an expert on the level is above it once perturbed."""
        for expert in sorted(self.on):
            if expert > j:
                break
            change = self._change(j, expert)
            if change != 0:
                return change > 0
        return True  # by its own perturbation, which is larger than all that are left

    def _change(self, j: int, expert: int) -> int:
        """How f of j, which is not in ``on``, changes with the perturbation of an expert."""
        if expert in self.on:
            column = self.on.index(expert)
            row = self.integers.rows[j]
            return -sum(value * own[column] for value, own in zip(row, self.inverse, strict=True))
        return self.denominator if expert == j else 0


def dictionary(arrangement: Arrangement, on: Sequence[int]) -> Dictionary | None:
    """The dictionary of the vertex where ``on`` tie; None where their hyperplanes meet in none."""
    assert len(on) == arrangement.dimension + 1, "a vertex has d + 1 hyperplanes"
    integers = arrangement.integers
    solved = _adjugate([integers.rows[i] for i in on])
    if solved is None:
        return None
    inverse, denominator = solved
    levels = [integers.bias[i] for i in on]
    place = [-sum(map(mul, row, levels)) for row in inverse]
    return Dictionary(tuple(on), inverse, place, denominator, integers)


def _adjugate(matrix: Sequence[Sequence[int]]) -> tuple[list[list[int]], int] | None:
    """The inverse times a number > 0, and that number; None where the matrix is singular.

    Gauss-Jordan in which every division leaves no remainder (Bareiss 1968).
    """
    size = len(matrix)
    rows = [[*row, *(int(r == c) for c in range(size))] for r, row in enumerate(matrix)]
    before = 1
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        own = rows[column]
        lead = own[column]
        for r in range(size):
            if r == column:
                continue
            factor = rows[r][column]
            rows[r] = [
                (value * lead - factor * other) // before
                for value, other in zip(rows[r], own, strict=True)
            ]
        before = lead
    sign = 1 if before > 0 else -1
    return [[sign * value for value in row[size:]] for row in rows], sign * before


def inverse_of(matrix: Sequence[Sequence[Fraction]]) -> list[list[Fraction]] | None:
    """Gauss-Jordan; None where it is singular."""
    size = len(matrix)
    rows = [[*row, *(Fraction(int(r == c)) for c in range(size))] for r, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        lead = rows[column][column]
        rows[column] = [value / lead for value in rows[column]]
        for r in range(size):
            factor = rows[r][column]
            if r != column and factor != 0:
                rows[r] = [
                    value - factor * own for value, own in zip(rows[r], rows[column], strict=True)
                ]
    return [row[size:] for row in rows]
