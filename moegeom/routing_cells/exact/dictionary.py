r"""Exact linear algebra: dictionaries of vertices, eliminations, and the rank of rows.

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm
from operator import mul

import numpy as np

from moegeom.core.shapes import Float64, Int64

Rows = Sequence[Sequence[Fraction]]


@dataclass(frozen=True, eq=False)
class Integers:
    """Rows (w, -1) and biases as integers: W and b times ``unit``, with the level t."""

    rows: Sequence[Sequence[int]]
    bias: Sequence[int]
    unit: int

    def at(self, place: Sequence[int], whole: int) -> list[int]:
        """The logits at the point ``place / whole``, times one number > 0."""
        return [
            sum(map(mul, row, place)) + whole * offset
            for row, offset in zip(self.rows, self.bias, strict=True)
        ]

    def slope(self, one: int, other: int) -> list[int]:
        """The row of one expert less that of another."""
        return [a - b for a, b in zip(self.rows[one], self.rows[other], strict=True)][:-1]


def num_parallel(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    pairs: Iterable[tuple[int, int]],
) -> int:
    r"""How many planes :math:`(w_i - w_j) x = b_j - b_i` of some pairs have another one beside them
    with a normal of the same direction: such planes never meet. Exact; equal planes count once, and
    points of a line never. Oracle in tests: all pairs of planes.
    """
    if weight.shape[1] < 2:
        return 0
    of = Arrangement.of(weight, bias)
    places: dict[tuple[Fraction, ...], set[Fraction]] = {}
    for i, j in pairs:
        normal = [a - b for a, b in zip(of.weight[i], of.weight[j], strict=True)]
        unit = next((value for value in normal if value), None)
        if unit is not None:
            along = places.setdefault(tuple(value / unit for value in normal), set())
            along.add((of.bias[j] - of.bias[i]) / unit)
    return sum(len(along) for along in places.values() if len(along) > 1)


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

    def at(self, point: Sequence[Fraction]) -> list[Fraction]:
        """The logits at a point."""
        return [own + b for own, b in zip(self.along(point), self.bias, strict=True)]

    def along(self, direction: Sequence[Fraction]) -> list[Fraction]:
        """The change of the logits along a direction."""
        return [sum(map(mul, row, direction), Fraction(0)) for row in self.weight]

    @cached_property
    def integers(self) -> Integers:
        """The same hyperplanes without denominators."""
        values = [value for row in self.weight for value in row]
        unit = lcm(*(value.denominator for value in (*values, *self.bias)))
        rows = [[*(int(value * unit) for value in row), -1] for row in self.weight]
        return Integers(rows, [int(value * unit) for value in self.bias], unit)


@dataclass(frozen=True, eq=False)
class Dictionary:
    """A vertex: the experts ``on`` the level there, in order, and the others in terms of them.

    ``inverse`` is that of the rows (w, -1) of ``on`` in ``integers`` and ``place`` the vertex, both
    of them times ``denominator`` > 0. What is asked of all experts is
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
        return self.integers.at(self.place, self.denominator)

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

    def point(self) -> tuple[Fraction, ...]:
        """x where the experts ``on`` tie, without perturbation."""
        return tuple(Fraction(value, self.denominator) for value in self.place[:-1])

    def direction(self, column: int, upwards: bool) -> tuple[Fraction, ...]:
        """The direction in x in which ``on[column]`` leaves the level and the others stay on it."""
        unit = self.integers.unit if upwards else -self.integers.unit
        return tuple(Fraction(unit * row[column], self.denominator) for row in self.inverse[:-1])

    def slope(self, column: int) -> list[int]:
        """R of every expert and of ``on[column]``, times ``denominator``."""
        rates = self._slopes.get(column)
        if rates is None:
            own = [row[column] for row in self.inverse]
            rates = [sum(map(mul, row, own)) for row in self.integers.rows]
            self._slopes[column] = rates
        return rates

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
        """The sign of tau_j - tau_other, decided by the first perturbation that differs."""
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
    integers, size = arrangement.integers, len(on)
    rows = [integers.rows[i] for i in on]
    adjugate = solved([[*row, *(int(r == c) for c in range(size))] for r, row in enumerate(rows)])
    if adjugate is None:
        return None
    inverse, denominator = adjugate
    levels = [integers.bias[i] for i in on]
    place = [-sum(map(mul, row, levels)) for row in inverse]
    return Dictionary(tuple(on), inverse, place, denominator, integers)


def solved(rows: list[list[int]]) -> tuple[list[list[int]], int] | None:
    """The right part of [A | B] times d A^-1, and d > 0.

    None where the matrix is singular. Gauss-Jordan in which every division leaves no remainder
    (Bareiss 1968).
    """
    size, before = len(rows), 1
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        own = rows[column]
        lead = own[column]
        for r in range(size):
            factor = rows[r][column]
            if r != column:
                rows[r] = [
                    (value * lead - factor * other) // before
                    for value, other in zip(rows[r], own, strict=True)
                ]
        before = lead
    sign = 1 if before > 0 else -1
    return [[sign * value for value in row[size:]] for row in rows], sign * before


def equal_classes(
    weight: Float64[np.ndarray, "experts dims"], bias: Float64[np.ndarray, "experts"]
) -> Int64[np.ndarray, "experts"]:
    """A number for each expert, that of all whose rows and biases are equal."""
    rows = np.column_stack([weight, bias]) + 0.0  # no negative zeros
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


# --------------------------------------------------------------------------------------------- rank
#: A Mersenne prime: dyadic numbers have inverses of their denominators modulo it.
_PRIME, _PRIME_BITS = 2**31 - 1, 31

#: Entries up to which columns are proved to depend on others in exact arithmetic.
MOST_PROVED = 2**14

#: Coordinates of a point that float64 holds with room to spare.
_FARTHEST = 2**1000


def independent_columns_of(weight: Float64[np.ndarray, "experts dims"]) -> list[int]:
    r"""Columns of W whose differences :math:`w_i - w_1` are independent, as many as the rank.

    Cells depend on x through these differences alone, so that with the other coordinates at 0 all
    of them are met. Independent modulo a prime is independent; that the others depend on them is
    proved with fractions where the rank is below E - 1 and d, the only case in which it matters.
    Empty for a single row or equal rows; a second for 256 rows of 7168.

    Raises ValueError for a rank below E - 1 and d of more than ``MOST_PROVED`` numbers. Source:
    docs/theory.md G1, G4; oracle in tests: fractions.
    """
    if len(weight) < 2:
        return []
    columns: list[int] = []
    for size in (2 * min(weight.shape), max(weight.shape)):  # few rows and columns as a rule
        part = _residues(weight[:size, :size])
        columns = _echelon(part[1:] - part[:1])
        if len(columns) == min(len(weight) - 1, weight.shape[1]):
            return columns
    if weight.size > MOST_PROVED:
        raise ValueError(
            f"the differences of {len(weight)} rows have rank {len(columns)} modulo a prime, below "
            f"the {min(len(weight) - 1, weight.shape[1])} that rows in general have; not proved in "
            f"{weight.shape[1]} dimensions"
        )
    rows = Arrangement.of(weight, np.zeros(len(weight))).weight
    return exact_columns([[a - b for a, b in zip(row, rows[0], strict=True)] for row in rows[1:]])


def common_tie(
    weight: Float64[np.ndarray, "experts dims"], bias: Float64[np.ndarray, "experts"]
) -> tuple[Fraction, ...] | None:
    """The exact point at which all experts tie; None where none is proved.

    0 where all biases agree. Else the differences of rows must have rank d: modulo the prime they
    tell that those of the biases do not fit, at d + 1 experts there is one point, and whether the
    others tie there too is asked in integers. Oracle in tests: fractions.
    """
    experts, dims = weight.shape
    if experts and (bias == bias[0]).all():
        return (Fraction(0),) * dims
    rows = _residues(np.column_stack([weight, bias]))
    rows = rows[1:] - rows[:1]
    if _echelon(rows) != [*range(dims)]:
        return None
    on = [0, *(1 + row for row in _echelon(rows[:, :dims].T))]
    arrangement = Arrangement.of(weight, bias)
    vertex = dictionary(arrangement, on)
    assert vertex is not None, "rows that are independent modulo a prime are independent"
    if len(vertex.tied) < experts:
        return None
    tip = vertex.point()
    return tip if max(map(abs, tip)) < _FARTHEST else None


def _residues(values: Float64[np.ndarray, "rows dims"]) -> Int64[np.ndarray, "rows dims"]:
    """The numbers modulo the prime: a mantissa times a power of two, and 2^31 is 1."""
    mantissa, exponent = np.frexp(values)
    whole = (mantissa * 2.0**53).astype(np.int64) % _PRIME
    power = np.left_shift(np.int64(1), (exponent.astype(np.int64) - 53) % _PRIME_BITS)
    return whole * power % _PRIME


def _echelon(rows: Int64[np.ndarray, "rows dims"]) -> list[int]:
    """Pivot columns of the row echelon form modulo the prime."""
    rows, columns = rows % _PRIME, []
    for column in range(rows.shape[1]):
        lead = len(columns)
        if lead == len(rows):
            break
        pivots = np.flatnonzero(rows[lead:, column])
        if not len(pivots):
            continue
        pivot = lead + int(pivots[0])
        rows[[lead, pivot]] = rows[[pivot, lead]]
        own = rows[lead, column:] * pow(int(rows[lead, column]), -1, _PRIME) % _PRIME
        below = rows[lead + 1 :]
        below[:, column:] = (below[:, column:] - below[:, column, None] * own % _PRIME) % _PRIME
        columns.append(column)
    return columns


def rank(rows: list[list[Fraction]]) -> int:
    """Rank of a matrix, exactly; 0 for one without rows."""
    return len(exact_columns(rows))


def exact_columns(rows: list[list[Fraction]]) -> list[int]:
    """Pivot columns of the row echelon form, exactly; none of a matrix without rows."""
    rows, columns, lead = [list(row) for row in rows], [], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((r for r in range(lead, len(rows)) if rows[r][column] != 0), None)
        if pivot is None:
            continue
        rows[lead], rows[pivot] = rows[pivot], rows[lead]
        own = [value / rows[lead][column] for value in rows[lead]]
        for r in range(lead + 1, len(rows)):
            factor = rows[r][column]
            if factor:
                rows[r] = [v - factor * o for v, o in zip(rows[r], own, strict=True)]
        columns.append(column)
        lead += 1
    return columns
