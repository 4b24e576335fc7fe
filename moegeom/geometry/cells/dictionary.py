r"""The dictionary of a vertex: every expert in terms of those that tie there, in exact arithmetic.

Top-k of :math:`z = W x + b` is the arrangement of the hyperplanes
:math:`f_i(x, t) = z_i(x) - t` in one dimension more: x is in the cell of S where some level t has
the experts of S above it and all others below. At a vertex d + 1 experts I have f = 0, and

.. math:: f_j = F_j + \sum_{m \in I} R_{jm} f_m

for every other one, so that moving along an edge (one m leaves the level, the others stay) is one
column of R. Ties beyond I are broken as if :math:`b_i` were larger by :math:`\epsilon^{(i)}`,
each of them infinitely smaller than the one before: the lower number wins, as everywhere, and every
vertex is simple. Source: CELLS.md sections 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Rows = Sequence[Sequence[Fraction]]


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Hyperplanes :math:`w_i x + b_i = t` with exact numbers."""

    weight: Rows
    bias: Sequence[Fraction]

    @property
    def num_experts(self) -> int:
        return len(self.bias)

    @property
    def dimension(self) -> int:
        return len(self.weight[0])


@dataclass(frozen=True, eq=False)
class Dictionary:
    """A vertex: the experts ``on`` the level there, in order, and the others in terms of them.

    ``residual[j]`` is :math:`F_j`, ``slope[j][c]`` is R of expert j and of the expert ``on[c]``;
    both are of no meaning for the experts of ``on`` themselves. ``above`` are those over the level,
    ``inverse`` that of the rows (w, -1) of ``on``.
    """

    on: tuple[int, ...]
    residual: Sequence[Fraction]
    slope: Rows
    above: frozenset[int]
    inverse: Rows

    def point(self, arrangement: Arrangement) -> tuple[Fraction, ...]:
        """x where the experts ``on`` tie, without perturbation."""
        levels = [arrangement.bias[i] for i in self.on]
        return tuple(
            -sum((value * level for value, level in zip(row, levels, strict=True)), Fraction(0))
            for row in self.inverse[:-1]
        )

    def direction(self, column: int, upwards: bool) -> tuple[Fraction, ...]:
        """The direction in x in which ``on[column]`` leaves the level and the others stay on it."""
        return tuple(row[column] if upwards else -row[column] for row in self.inverse[:-1])

    def shot(self, column: int, upwards: bool) -> int | None:
        """The first expert that is met where ``on[column]`` leaves the level; None for a ray."""
        best = None
        for j in range(len(self.residual)):
            rate = self.slope[j][column]
            if j in self.on or rate == 0:
                continue
            rises = (rate > 0) == upwards
            if rises == (j in self.above):
                continue
            if best is None or self._is_nearer(j, best, column, upwards):
                best = j
        return best

    def _is_nearer(self, j: int, other: int, column: int, upwards: bool) -> bool:
        """Whether j is met before the other one, the symbolic perturbation deciding ties."""
        rates = self.slope[j][column], self.slope[other][column]
        # where the expert that leaves is at f = tau, j is met at tau = -F_j / R_j
        difference = self.residual[other] / rates[1] - self.residual[j] / rates[0]
        if difference == 0:
            difference = self._tie(j, other, column)
        return (difference < 0) == upwards

    def _tie(self, j: int, other: int, column: int) -> Fraction:
        """The first perturbation that tells the two apart, in the order of the experts."""
        column_of = {expert: c for c, expert in enumerate(self.on)}
        rates = self.slope[j][column], self.slope[other][column]
        for expert in sorted({*self.on, j, other}):
            if expert in column_of:
                c = column_of[expert]
                of_j, of_other = -self.slope[j][c], -self.slope[other][c]
            else:
                of_j, of_other = Fraction(expert == j), Fraction(expert == other)
            difference = of_other / rates[1] - of_j / rates[0]
            if difference != 0:
                return difference
        raise AssertionError("two experts have perturbations of their own")


def dictionary(arrangement: Arrangement, on: Sequence[int]) -> Dictionary | None:
    """The dictionary of the vertex where ``on`` tie; None where their hyperplanes meet in none."""
    size = arrangement.dimension + 1
    assert len(on) == size, "a vertex has d + 1 hyperplanes"
    basis = [[*arrangement.weight[i], Fraction(-1)] for i in on]
    inverse = inverse_of(basis)
    if inverse is None:
        return None
    residual, slope = [], []
    for j in range(arrangement.num_experts):
        row = [*arrangement.weight[j], Fraction(-1)]
        rates = [
            sum((row[m] * inverse[m][c] for m in range(size)), Fraction(0)) for c in range(size)
        ]
        slope.append(rates)
        level = sum((rates[c] * arrangement.bias[i] for c, i in enumerate(on)), Fraction(0))
        residual.append(arrangement.bias[j] - level)
    above = frozenset(
        j
        for j in range(arrangement.num_experts)
        if j not in on and _is_above(j, on, residual[j], slope[j])
    )
    return Dictionary(tuple(on), residual, slope, above, inverse)


def _is_above(j: int, on: Sequence[int], residual: Fraction, rates: Sequence[Fraction]) -> bool:
    if residual != 0:
        return residual > 0
    column_of = {expert: c for c, expert in enumerate(on)}
    for expert in sorted({*on, j}):
        change = Fraction(1) if expert == j else -rates[column_of[expert]]
        if change != 0:
            return change > 0
    raise AssertionError("an expert has a perturbation of its own")


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
