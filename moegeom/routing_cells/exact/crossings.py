"""How often the top-k set changes along a segment of inputs, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from moegeom.core.shapes import Float64, Int64


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
    (d = 1); oracle in tests: all pairs of lines, their crossings sorted, and the sweep over a line.
    """
    if not 1 <= k <= len(start):
        raise ValueError(f"top_k {k} of {len(start)} experts")
    if not (np.isfinite(start).all() and np.isfinite(stop).all()):
        raise ValueError("logits at the ends of a segment that are not finite")
    kept, places = _contenders(start, stop, k)
    if not 0 < places < len(kept):
        return []
    first, last = _integers(start[kept], stop[kept])
    sets = [(Fraction(0), _top(first, places))]
    sets += [(Fraction(*at), chosen) for at, chosen in _pieces(first, last, places)]
    sets.append((Fraction(1), _top(last, places)))
    found = []
    for (_, before), (at, after) in pairwise(sets):
        if before != after:
            out, into = sorted(before - after), sorted(after - before)
            found.append(Crossing(at, _numbers(kept, out), _numbers(kept, into)))
    return found


def _contenders(start: np.ndarray, stop: np.ndarray, k: int) -> tuple[list[int], int]:
    """Experts that enter or leave perhaps, and how many places they share.

    The others have k experts above them at both ends, or E - k below, hence on the whole segment.
    """
    low, high = np.minimum(start, stop), np.maximum(start, stop)
    if k == len(start):
        return [], 0
    never = high < np.sort(low)[-k]
    always = low > np.sort(high)[-k - 1]
    return np.flatnonzero(~never & ~always).tolist(), k - int(always.sum())


def _integers(start: np.ndarray, stop: np.ndarray) -> tuple[list[int], list[int]]:
    """All values times one power of two, by which nothing changes."""
    ratios = [value.as_integer_ratio() for value in [*start.tolist(), *stop.tolist()]]
    scale = max(denominator for _, denominator in ratios)
    values = [numerator * (scale // denominator) for numerator, denominator in ratios]
    return values[: len(start)], values[len(start) :]


def _top(values: list[int], k: int) -> frozenset[int]:
    return frozenset(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


def _pieces(
    first: list[int], last: list[int], k: int
) -> Iterator[tuple[tuple[int, int], frozenset[int]]]:
    """The sets on the open intervals of 0 < t < 1, with the beginning n / d of each as (n, d)."""
    slope = [b - a for a, b in zip(first, last, strict=True)]
    at: tuple[int, int] | None = (0, 1)
    while at is not None:
        values = _values(first, last, at)
        order = sorted(range(len(first)), key=lambda i: (-values[i], -slope[i], i))
        yield at, frozenset(order[:k])
        at = _next_break(first, last, order[:k], order[k:])


def _values(first: list[int], last: list[int], at: tuple[int, int]) -> list[int]:
    """Logits at n / d, times d."""
    to_start, to_stop = at[1] - at[0], at[0]
    return [a * to_start + b * to_stop for a, b in zip(first, last, strict=True)]


def _next_break(
    first: list[int], last: list[int], chosen: list[int], others: list[int]
) -> tuple[int, int] | None:
    """Where, before 1, one of the others first overtakes a chosen one; by Newton steps from 1."""
    values, found = last, None
    while True:
        out, into = min(chosen, key=values.__getitem__), max(others, key=values.__getitem__)
        if values[out] >= values[into]:
            return found
        ahead, behind = first[out] - first[into], last[into] - last[out]
        found = ahead, ahead + behind
        values = _values(first, last, found)


def _numbers(kept: list[int], places: list[int]) -> tuple[int, ...]:
    return tuple(kept[place] for place in places)


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
