"""Rank of the differences of rows, and columns that carry it: modulo a prime, then proved."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

#: A Mersenne prime: dyadic numbers have inverses of their denominators modulo it.
_PRIME = 2**31 - 1


def independent_columns(weight: Sequence[Sequence[Fraction]]) -> list[int]:
    r"""Columns of W whose differences :math:`w_i - w_1` are independent, as many as the rank.

    Cells depend on x through these differences alone, so that with the other coordinates at 0 all
    of them are met. Independent modulo the prime is independent; that the others depend on them is
    proved with fractions where the rank is below E - 1 and d, the only case in which it matters.
    Empty for a single row or equal rows. Source: CELLS.md sections 0 and 6.
    """
    rows = [
        [value - first for value, first in zip(row, weight[0], strict=True)] for row in weight[1:]
    ]
    if not rows:
        return []
    columns = _columns(
        [[value.numerator * pow(value.denominator, -1, _PRIME) for value in row] for row in rows]
    )
    most = min(len(rows), len(rows[0]))
    return columns if len(columns) == most else _exact_columns(rows)


def _columns(rows: list[list[int]]) -> list[int]:
    """Pivot columns of the row echelon form modulo the prime."""
    found, rank = [], 0
    for column in range(len(rows[0])):
        pivot = next((r for r in range(rank, len(rows)) if rows[r][column] % _PRIME), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        inverse = pow(rows[rank][column], -1, _PRIME)
        own = [value * inverse % _PRIME for value in rows[rank]]
        for r in range(rank + 1, len(rows)):
            factor = rows[r][column] % _PRIME
            if factor:
                rows[r] = [(v - factor * o) % _PRIME for v, o in zip(rows[r], own, strict=True)]
        found.append(column)
        rank += 1
        if rank == len(rows):
            break
    return found


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
