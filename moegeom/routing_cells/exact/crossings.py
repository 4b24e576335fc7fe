"""The top-k sets along a line, and how often they change along a segment, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, takewhile

import numpy as np

from moegeom.core.shapes import Float64, Int64

Piece = tuple[frozenset[int], Fraction | None, Fraction | None]


def sweep(
    slope: Sequence[Fraction],
    offset: Sequence[Fraction],
    k: int,
    start: Fraction | None = None,
) -> Iterator[Piece]:
    """Top-k sets of ``slope * x + offset`` from left to right, with the interval of each.

    From just right of ``start``, or from the far left. Ends are None where there are none. Of equal
    lines the lower number wins, so that their cells are tie-broken; no interval is empty. From one
    break to the next by Newton steps on the lower envelope of the chosen lines against the upper
    one of the others. For 0 < k < E.
    """
    lines = range(len(slope))
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
    nearest = None
    while slope[into] > slope[out]:
        at = (offset[out] - offset[into]) / (slope[into] - slope[out])
        if nearest is not None and at >= nearest:
            break
        nearest = at
        values = [rate * at + value for rate, value in zip(slope, offset, strict=True)]
        out = min(chosen, key=lambda i: (values[i], slope[i]))
        into = max(others, key=lambda j: (values[j], slope[j]))
        if values[out] >= values[into]:
            break
    return nearest


@dataclass(frozen=True)
class Crossing:
    """A change of the top-k set: where on the segment, the experts that leave, those that enter.

    One of each but where several pairs exchange at one point.
    """

    at: Fraction
    out: tuple[int, ...]
    into: tuple[int, ...]


def exact_crossings(
    start: Float64[np.ndarray, "experts"], stop: Float64[np.ndarray, "experts"], k: int
) -> list[Crossing]:
    r"""Every change of the k largest of :math:`z(t) = (1 - t) z_a + t z_b`, :math:`0 \le t \le 1`.

    An affine router has such logits on the segment between two inputs; its facets are crossed where
    the set changes. The set is that of the inputs themselves at both ends and of open intervals in
    between, where only equal lines tie; of ties the lower number wins. An interval of no length is
    none. A change at t = 0 or 1 leaves a tie at that end. The numbers are taken as they are; empty
    for k = E.

    Raises ValueError for k outside 1..E and logits that are not finite. Source: docs/theory.md G1
    (d = 1); oracle in tests: all pairs of lines, their crossings sorted.
    """
    if not 1 <= k <= len(start):
        raise ValueError(f"top_k {k} of {len(start)} experts")
    if not (np.isfinite(start).all() and np.isfinite(stop).all()):
        raise ValueError("logits at the ends of a segment that are not finite")
    places, lines = _contenders(start, stop, k)
    if not 0 < places < len(lines):
        return []
    first, last = ([Fraction(value) for value in end[lines].tolist()] for end in (start, stop))
    slope = [after - before for before, after in zip(first, last, strict=True)]
    pieces = (
        (at or Fraction(0), chosen) for chosen, at, _ in sweep(slope, first, places, Fraction(0))
    )
    inner = takewhile(lambda piece: piece[0] < 1, pieces)
    sets = [(Fraction(0), _top(first, places)), *inner]
    crossings = []
    for (_, before), (at, after) in pairwise([*sets, (Fraction(1), _top(last, places))]):
        if before != after:
            out, into = (
                tuple(lines[n] for n in sorted(some)) for some in (before - after, after - before)
            )
            crossings.append(Crossing(at, out, into))
    return crossings


def _top(values: Sequence[Fraction], k: int) -> frozenset[int]:
    return frozenset(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


def _contenders(start: np.ndarray, stop: np.ndarray, k: int) -> tuple[int, list[int]]:
    """The number of places that may change hands, and the experts that may enter or leave.

    The others have k experts above them at both ends, or E - k below, hence on the whole segment.
    """
    low, high = np.minimum(start, stop), np.maximum(start, stop)
    if k == len(start):
        return 0, []
    never = high < np.sort(low)[-k]
    always = low > np.sort(high)[-k - 1]
    return k - int(always.sum()), np.flatnonzero(~never & ~always).tolist()


@dataclass(frozen=True)
class CrossingRate:
    """Crossings per unit of length, its standard error over segments, and their number."""

    per_length: float
    standard_error: float
    num_segments: int


def crossing_rate(
    count: Int64[np.ndarray, "segments"], length: Float64[np.ndarray, "segments"]
) -> CrossingRate:
    r"""Facets that are met per unit of length, :math:`r = \sum_s n_s / \sum_s L_s`.

    Segments are a sample; r is a ratio of means, with the standard error
    :math:`\sqrt{\sum (n_s - r L_s)^2 / (S (S - 1))} / \bar L` to first order in 1 / S. nan without
    length; the error is nan for less than two segments. Source: Cochran, Sampling Techniques,
    chapter 6; oracle in tests: the bootstrap.
    """
    total, segments = float(length.sum()), len(length)
    if total == 0.0:
        return CrossingRate(float("nan"), float("nan"), segments)
    rate = int(count.sum()) / total
    if segments < 2:
        return CrossingRate(rate, float("nan"), segments)
    left = count - rate * length
    error = np.sqrt((left @ left) / (segments * (segments - 1.0))) * segments / total
    return CrossingRate(rate, float(error), segments)
