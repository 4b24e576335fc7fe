r"""The top-k sets along a line, and how often they change along segments.

Pairs whose changes certified float64 cannot prove go to :func:`exact_crossings`.

The sets along a line follow each other as intervals. A chain of sets that begins with the strict
top k of the one end and ends with that of the other, and whose every link is an exchange at a point
where no third expert ties, is therefore all of them: it needs no proof of the order of its points.
Where ``out`` and ``into`` tie, :math:`t : 1 - t = p : q` with :math:`p = a_{out} - a_{into}` and
:math:`q = b_{into} - b_{out}`, both positive, and expert i is above them if

.. math:: (a_i - a_{out}) q + (b_i - b_{out}) p > 0,

a determinant of order 2 in differences of the given numbers, off by at most 8 u times the sum of
its absolute terms. Equal lines tie everywhere and may stand for each other: with copies of ``out``
or of ``into``, not of both, the point is still one exchange, of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, takewhile
from math import lcm

import numpy as np
from numba import njit

from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.kernels.cpu import INNER, kernel

Piece = tuple[frozenset[int], Fraction | None, Fraction | None]


def sweep(
    slope: Sequence[Fraction], offset: Sequence[Fraction], k: int, start: Fraction | None = None
) -> Iterator[Piece]:
    """Top-k sets of ``slope * x + offset`` from left to right, with the interval of each.

    From just right of ``start``, or from the far left. Ends are None where there are none. Of equal
    lines the lower number wins, so that their cells are tie-broken; no interval is empty. From one
    break to the next by Newton steps on the lower envelope of the chosen lines against the upper
    one of the others, in whole numbers: fractions would take ten times as long. For 0 < k < E.
    """
    unit = lcm(*(value.denominator for value in (*slope, *offset)))
    rates, values = ([int(value * unit) for value in some] for some in (slope, offset))
    lines = range(len(rates))
    while True:
        if start is None:
            order = sorted(lines, key=lambda i: (rates[i], -values[i], i))
        else:
            heights = _heights(rates, values, start)
            order = sorted(lines, key=lambda i: (-heights[i], -rates[i], i))
        stop = _next_break(order[:k], order[k:], rates, values)
        yield frozenset(order[:k]), start, stop
        if stop is None:
            return
        start = stop


def _heights(rates: Sequence[int], values: Sequence[int], at: Fraction) -> list[int]:
    """The heights of the lines at a place, all times its denominator."""
    p, q = at.numerator, at.denominator
    return [rate * p + value * q for rate, value in zip(rates, values, strict=True)]


def _next_break(
    chosen: Sequence[int], others: Sequence[int], rates: Sequence[int], values: Sequence[int]
) -> Fraction | None:
    """Where one of the others first overtakes a chosen line; None where none ever does."""
    out = min(chosen, key=lambda i: (rates[i], values[i]))
    into = max(others, key=lambda j: (rates[j], values[j]))
    nearest = None
    while rates[into] > rates[out]:
        at = Fraction(values[out] - values[into], rates[into] - rates[out])
        if nearest is not None and at >= nearest:
            break
        nearest, heights = at, _heights(rates, values, at)
        out = min(chosen, key=lambda i: (heights[i], rates[i]))
        into = max(others, key=lambda j: (heights[j], rates[j]))
        if heights[out] >= heights[into]:
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


def crossing_rate(
    count: Float[np.ndarray, "segments"], length: Float64[np.ndarray, "segments"]
) -> tuple[float, float]:
    r"""Facets met per unit of length, :math:`r = \sum_s n_s / \sum_s L_s`, and its standard error.

    Segments are a sample; r is a ratio of means, with the error
    :math:`\sqrt{\sum (n_s - r L_s)^2 / (S (S - 1))} / \bar L` to first order in 1 / S. nan without
    length; the error is nan for less than two segments. Source: Cochran, Sampling Techniques,
    chapter 6; oracle in tests: the bootstrap.
    """
    total, segments = float(length.sum()), len(length)
    if total == 0.0:
        return float("nan"), float("nan")
    rate = float(count.sum()) / total
    if segments < 2:
        return rate, float("nan")
    left = count - rate * length
    error = np.sqrt((left @ left) / (segments * (segments - 1.0))) * segments / total
    return rate, float(error)


# ------------------------------------------------------------------------------------ compiled
#: Eight units of roundoff, a number over all that underflow may lose, and one under all that may
#: overflow.
_ROUNDING, _UNDERFLOW, _LARGE = 2.0**-50, 1e-300, 1e150


@dataclass(frozen=True, eq=False)
class SegmentCrossings:
    """Changes of the top-k set on each segment, and where float64 could not prove them.

    ``at`` are the places of the changes of all segments in a row, from ``first[s]`` to
    ``first[s + 1]``, to a relative error of 1e-15; empty where they were not asked for.
    """

    count: Int64[np.ndarray, "segments"]
    is_exact: Bool[np.ndarray, "segments"]
    first: Int64[np.ndarray, "segments+1"]
    at: Float64[np.ndarray, "changes"]

    @property
    def num_exact(self) -> int:
        """Segments that exact arithmetic decided."""
        return int(self.is_exact.sum())


def segment_crossings(
    logits_a: np.ndarray, logits_b: np.ndarray, k: int, with_places: bool = False
) -> SegmentCrossings:
    """How often the k largest of (1 - t) a + t b change for t from 0 to 1, for pairs of rows.

    Ties as in ``exact_crossings``. A few passes over the E logits for each change and for each end;
    pairs that are not proved (ties at an end, or of three experts) take a thousand times that.
    Raises ValueError for shapes that differ, k outside 1..E and logits that are not finite.
    """
    if logits_a.shape != logits_b.shape or logits_a.ndim != 2:
        raise ValueError(f"logits of segments of shapes {logits_a.shape} and {logits_b.shape}")
    a = np.ascontiguousarray(logits_a, dtype=np.float64)
    b = np.ascontiguousarray(logits_b, dtype=np.float64)
    pairs, experts = a.shape
    if not 1 <= k <= experts:
        raise ValueError(f"top_k {k} of {experts} experts")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("logits at the ends of a segment that are not finite")
    count, first = np.zeros(pairs, np.int64), np.zeros(pairs + 1, np.int64)
    at = np.empty(0)
    if k < experts:
        _count_crossings(a, b, k, count, first, at)
    is_exact = count < 0
    settled = {int(s): exact_crossings(a[s], b[s], k) for s in np.flatnonzero(is_exact)}
    for segment, crossings in settled.items():
        count[segment] = len(crossings)
    np.cumsum(count, out=first[1:])
    if with_places and k < experts:
        at = _places(a, b, k, first, settled)
    return SegmentCrossings(count, is_exact, first, at)


def _places(
    a: np.ndarray, b: np.ndarray, k: int, first: np.ndarray, settled: dict[int, list[Crossing]]
) -> np.ndarray:
    at = np.empty(first[-1])
    proved = np.setdiff1d(np.arange(len(a)), np.array(sorted(settled), np.int64))
    where = np.empty(len(proved) + 1, np.int64)
    where[:-1], where[-1] = first[proved], first[-1]
    _count_crossings(a[proved], b[proved], k, np.empty(len(proved), np.int64), where, at)
    for segment, crossings in settled.items():
        for number, crossing in enumerate(crossings):
            at[first[segment] + number] = float(crossing.at)
    return at


@njit(**INNER)
def _load(a, b, k, lines):
    """Loads the lines, the k largest at the left end first; returns whether no others could be.

    Not for numbers whose differences or their products are beyond float64.
    """
    experts = len(a)
    for i in range(experts):
        if not (abs(a[i]) < _LARGE and abs(b[i]) < _LARGE):
            return False
        lines[0, i], lines[1, i], lines[2, i] = a[i], b[i], b[i] - a[i]
    first = lines[0]
    for place in range(k):
        best = place
        for i in range(place + 1, experts):
            if first[i] > first[best]:
                best = i
        _swap(lines, place, best)
    tied, num_odd = False, 0
    for i in range(k, experts):
        tied |= first[i] == first[k - 1]
    for i in range(experts):
        num_odd += first[i] == first[k - 1] and not _are_equal(lines, i, k - 1)
    return not tied or num_odd == 0


@njit(**INNER)
def _are_equal(lines, one, other):
    return lines[0, one] == lines[0, other] and lines[1, one] == lines[1, other]


@njit(**INNER)
def _swap(lines, one, other):
    for row in range(3):
        lines[row, one], lines[row, other] = lines[row, other], lines[row, one]


@njit(**INNER, fastmath={"nnan", "nsz"})
def _extremes(values, k):
    """The place of the least of the first k values, and of the largest of the others."""
    least, most = values[0], values[k]
    for i in range(1, k):
        least = min(least, values[i])
    for i in range(k + 1, len(values)):
        most = max(most, values[i])
    out, into = 0, k
    while values[out] != least:
        out += 1
    while values[into] != most:
        into += 1
    return out, into


@njit(**INNER)
def _next_exchange(lines, k, values):
    """The pair that is exchanged first, by Newton steps from t = 1; (-1, -1) for no exchange.

    A proposal: of what follows from it nothing is taken that is not proved.
    """
    a, b, slope = lines[0], lines[1], lines[2]
    out, into = _extremes(b, k)
    if b[out] > b[into]:
        return -1, -1
    if _are_equal(lines, out, into):
        for i in range(len(b)):
            if b[i] == b[out] and not _are_equal(lines, i, out):
                return out, into
        return -1, -1
    nearest = np.inf
    one, other = out, into
    while True:
        p, q = a[one] - a[other], b[other] - b[one]
        if not (p > 0.0 and q > 0.0 and p / (p + q) < nearest):
            return out, into
        nearest = p / (p + q)
        out, into = one, other
        for i in range(len(a)):
            values[i] = a[i] + nearest * slope[i]
        one, other = _extremes(values, k)
        if one == out and other == into:
            return out, into


@njit(**INNER)
def _is_proved(lines, k, out, into):
    """Whether the two tie at a point of the segment where all others are on their sides."""
    a, b = lines[0], lines[1]
    p, q = a[out] - a[into], b[into] - b[out]
    if not (p > 0.0 and q > 0.0):
        return False
    height, other_height = a[out], b[out]
    proved = 0
    for i in range(k):
        left, right = (a[i] - height) * q, (b[i] - other_height) * p
        proved += left + right > _ROUNDING * (abs(left) + abs(right)) + _UNDERFLOW
    for i in range(k, len(a)):
        left, right = (height - a[i]) * q, (other_height - b[i]) * p
        proved += left + right > _ROUNDING * (abs(left) + abs(right)) + _UNDERFLOW
    # of ``into`` the two terms are p q and - p q, rounded alike, and that of ``out`` are 0
    if proved == len(a) - 2:
        return True
    of_out, of_into = 0, 0
    for i in range(len(a)):
        of_out += _are_equal(lines, i, out)
        of_into += _are_equal(lines, i, into)
    return min(of_out, of_into) == 1 and proved == len(a) - of_out - of_into


@kernel()
def _count_crossings(a, b, k, count, first, at):
    """Changes of each pair, -1 where they are not proved; their places if there is room in at."""
    pairs, experts = a.shape
    lines, values = np.empty((3, experts)), np.empty(experts)
    for pair in range(pairs):
        count[pair] = -1
        if not _load(a[pair], b[pair], k, lines):
            continue
        number = 0
        while True:
            out, into = _next_exchange(lines, k, values)
            if out < 0:
                count[pair] = number
                break
            if not _is_proved(lines, k, out, into):
                break
            if len(at) > 0:
                p, q = lines[0, out] - lines[0, into], lines[1, into] - lines[1, out]
                at[first[pair] + number] = p / (p + q)
            _swap(lines, out, into)
            number += 1
