"""Rank of the differences of rows, and columns that carry it: modulo a prime, then proved."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from moegeom.core.shapes import Float64, Int64
from moegeom.routing_cells.exact.dictionary import Arrangement, dictionary

#: A Mersenne prime: dyadic numbers have inverses of their denominators modulo it.
_PRIME, _PRIME_BITS = 2**31 - 1, 31

#: Entries up to which columns are proved to depend on others in exact arithmetic.
MOST_PROVED = 2**14

#: Coordinates of a point that float64 holds with room to spare.
_FARTHEST = 2**1000


def independent_columns_of(weight: Float64[np.ndarray, "experts dims"]) -> list[int]:
    """``independent_columns`` of float64 rows; a second for 256 rows of 7168.

    Raises ValueError for a rank below E - 1 and d of more than ``MOST_PROVED`` numbers. Oracle in
    tests: ``independent_columns``.
    """
    if len(weight) < 2:
        return []
    found: list[int] = []
    for size in (2 * min(weight.shape), max(weight.shape)):  # few rows and columns as a rule
        part = _residues(weight[:size, :size])
        found = _echelon(part[1:] - part[:1])
        if len(found) == min(len(weight) - 1, weight.shape[1]):
            return found
    if weight.size > MOST_PROVED:
        raise ValueError(
            f"the differences of {len(weight)} rows have rank {len(found)} modulo a prime, below "
            f"the {min(len(weight) - 1, weight.shape[1])} that rows in general have; not proved in "
            f"{weight.shape[1]} dimensions"
        )
    return independent_columns([[Fraction(value) for value in row] for row in weight.tolist()])


def common_tie(
    weight: Float64[np.ndarray, "experts dims"], bias: Float64[np.ndarray, "experts"]
) -> tuple[Fraction, ...] | None:
    """The point at which all experts tie, exactly; None where none is known.

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
    found = vertex.point(arrangement)
    return found if max(map(abs, found)) < _FARTHEST else None


def _residues(values: Float64[np.ndarray, "rows dims"]) -> Int64[np.ndarray, "rows dims"]:
    """The numbers modulo the prime: a mantissa times a power of two, and 2^31 is 1."""
    mantissa, exponent = np.frexp(values)
    whole = (mantissa * 2.0**53).astype(np.int64) % _PRIME
    power = np.left_shift(np.int64(1), (exponent.astype(np.int64) - 53) % _PRIME_BITS)
    return whole * power % _PRIME


def _echelon(rows: Int64[np.ndarray, "rows dims"]) -> list[int]:
    """Pivot columns of the row echelon form modulo the prime."""
    rows, found = rows % _PRIME, []
    for column in range(rows.shape[1]):
        lead = len(found)
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
        found.append(column)
    return found


def independent_columns(weight: Sequence[Sequence[Fraction]]) -> list[int]:
    r"""Columns of W whose differences :math:`w_i - w_1` are independent, as many as the rank.

    Cells depend on x through these differences alone, so that with the other coordinates at 0 all
    of them are met. Independent modulo the prime is independent; that the others depend on them is
    proved with fractions where the rank is below E - 1 and d, the only case in which it matters.
    Empty for a single row or equal rows. Source: docs/theory.md G1, G4.
    """
    rows = [
        [value - first for value, first in zip(row, weight[0], strict=True)] for row in weight[1:]
    ]
    if not rows:
        return []
    residues = [
        [value.numerator * pow(value.denominator, -1, _PRIME) % _PRIME for value in row]
        for row in rows
    ]
    columns = _echelon(np.array(residues, np.int64))
    most = min(len(rows), len(rows[0]))
    return columns if len(columns) == most else _exact_columns(rows)


def rank(rows: list[list[Fraction]]) -> int:
    """Rank of a matrix, exactly; 0 for one without rows."""
    return len(_exact_columns(rows)) if rows else 0


def _exact_columns(rows: list[list[Fraction]]) -> list[int]:
    rows, found, lead = [list(row) for row in rows], [], 0
    for column in range(len(rows[0])):
        pivot = next((r for r in range(lead, len(rows)) if rows[r][column] != 0), None)
        if pivot is None:
            continue
        rows[lead], rows[pivot] = rows[pivot], rows[lead]
        own = [value / rows[lead][column] for value in rows[lead]]
        for r in range(lead + 1, len(rows)):
            factor = rows[r][column]
            if factor:
                rows[r] = [v - factor * o for v, o in zip(rows[r], own, strict=True)]
        found.append(column)
        lead += 1
    return found
