r"""Description length of one matrix of rows given another: what a pattern saves and costs.

What a pattern leaves of a row of D numbers is said in :math:`D \log_2 r` bits beside the finest
that is told apart, r the length of what is left; a number that is fitted costs half the logarithm
of what it is fitted to, and as much again as what is left is finer (Rissanen 1978).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Bool, Float64
from moegeom.geometry.set_code import log2_sets

#: Rows that the common vector is taken from: the half that lies nearest together, found so often.
_ROUNDS = 3

#: Fewer rows tell nothing of what is common to all.
_LEAST_ROWS = 2


def row_bits(
    before: Float64[np.ndarray, "rows"],
    after: Float64[np.ndarray, "rows"],
    finest: Float64[np.ndarray, "rows"],
    dimension: int,
) -> Float64[np.ndarray, "rows"]:
    r"""Bits that each row saves: :math:`D \log_2 (\max(b, f) / \max(a, f))`, of lengths.

    0 where both are below ``finest``, which is at least the least normal number.
    """
    least = np.maximum(finest, np.finfo(np.float64).tiny)
    return dimension * np.log2(np.maximum(before, least) / np.maximum(after, least))


def number_bits(count: float, fitted_to: int, before: float, after: float) -> float:
    r"""Bits of ``count`` fitted numbers: :math:`c (\frac12 \log_2 n + \log_2 (b / a))`.

    n numbers are explained, from an error of b down to one of a.
    """
    finer = math.log2(before / after) if 0.0 < after < before else 0.0
    return count * (0.5 * math.log2(max(fitted_to, 2)) + finer)


def common_vector(
    change: Float64[np.ndarray, "rows dimension"], finest: Float64[np.ndarray, "rows"]
) -> Float64[np.ndarray, "dimension"]:
    """The vector that was added to all rows, where coding it saves bits; else zeros.

    It is the mean of the half of the rows that lies nearest together, so that a few rows that moved
    by themselves do not drag it, and rows that did not move at all show that there is none.
    """
    rows, dimension = change.shape
    none = np.zeros(dimension)
    if rows < _LEAST_ROWS:
        return none
    lengths = np.linalg.norm(change, axis=1)
    vector, half = change.mean(axis=0), max(_LEAST_ROWS, (rows + 1) // 2)
    for _ in range(_ROUNDS):
        apart = np.linalg.norm(change - vector, axis=1)
        vector = change[np.argpartition(apart, half - 1)[:half]].mean(axis=0)
    apart = np.linalg.norm(change - vector, axis=1)
    near = np.flatnonzero(apart <= 2.0 * np.median(apart))
    if len(near) > half:  # all that lie together tell it better than half of them
        vector = change[near].mean(axis=0)
        apart = np.linalg.norm(change - vector, axis=1)
    before, after = (float(np.sqrt(np.mean(x**2))) for x in (lengths, np.maximum(apart, finest)))
    saved = float(row_bits(lengths, apart, finest, dimension).sum())
    return vector if saved > number_bits(dimension, change.size, before, after) else none


# ------------------------------------------------------------------------------------------ regions
@dataclass(frozen=True, eq=False)
class MatrixRegion:
    """Some rows, or some columns in a run; ``bits`` say which they are, 0 for all."""

    rows: Bool[np.ndarray, "rows"]
    columns: Bool[np.ndarray, "columns"]
    bits: float = 0.0

    @property
    def inside(self) -> Bool[np.ndarray, "rows columns"]:
        """The entries of the region."""
        return self.rows[:, None] & self.columns[None, :]

    @property
    def is_whole(self) -> bool:
        return bool(self.rows.all() and self.columns.all())


def whole(rows: int, columns: int) -> MatrixRegion:
    """All rows and columns."""
    return MatrixRegion(np.ones(rows, bool), np.ones(columns, bool))


def best_rows(saved: Float64[np.ndarray, "rows"], columns: int) -> tuple[MatrixRegion, float]:
    """All rows, or those that save bits, whichever saves more with what it costs to name them."""
    rows = len(saved)
    everything, total = whole(rows, columns), float(saved.sum())
    chosen = saved > 0.0
    number = int(chosen.sum())
    if not 0 < number < rows:
        return everything, total
    bits = log2_sets(rows, number) + math.log2(rows)
    some = float(saved[chosen].sum()) - bits
    if some <= total:
        return everything, total
    return MatrixRegion(chosen, np.ones(columns, bool), bits), some


def best_run(saved: Float64[np.ndarray, "columns"], rows: int) -> tuple[MatrixRegion, float]:
    """The run of columns that saves most bits, less those that name its two ends."""
    columns = len(saved)
    total = np.concatenate([[0.0], np.cumsum(saved)])
    lowest = np.minimum.accumulate(total)
    stop = int((total - lowest).argmax())
    start = int(total[: stop + 1].argmin())
    inside = np.zeros(columns, bool)
    inside[start:stop] = True
    bits = 2.0 * math.log2(max(columns, 2))
    return MatrixRegion(np.ones(rows, bool), inside, bits), float(total[stop] - total[start]) - bits


# ----------------------------------------------------------------------------------------- low rank
@dataclass(frozen=True, eq=False)
class LowRank:
    """A change of rank ``rank``, which is ``share`` of its squares; ``bits`` say it."""

    change: Float64[np.ndarray, "rows columns"]
    rank: int
    share: float
    bits: float


def low_rank_part(
    change: Float64[np.ndarray, "rows columns"], finest: float, most: int
) -> LowRank | None:
    r"""The part of least description among those of rank 1 to ``most``; None where none saves.

    Rank r costs :math:`r (E + D - r)` numbers. The best of a rank is what the largest singular
    values leave (Eckart and Young 1936). ``finest`` is the length of what is not told apart.
    """
    rows, columns = change.shape
    squares = np.maximum(np.linalg.eigvalsh(change @ change.T)[::-1], 0.0)
    total = float(squares.sum())
    if total <= finest**2:
        return None
    best, saved_most = 0, 0.0
    for rank in range(1, min(most, rows - 1, columns - 1) + 1):
        left = math.sqrt(max(total - float(squares[:rank].sum()), finest**2, 1e-24 * total))
        cost = number_bits(rank * (rows + columns - rank), change.size, math.sqrt(total), left)
        saved = change.size * math.log2(math.sqrt(total) / left) - cost
        if saved > saved_most:
            best, saved_most, bits = rank, saved, cost
    if not best:
        return None
    _, vectors = np.linalg.eigh(change @ change.T)
    basis = vectors[:, ::-1][:, :best]
    return LowRank(basis @ (basis.T @ change), best, float(squares[:best].sum()) / total, bits)
