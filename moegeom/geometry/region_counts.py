r"""How many regions the boundaries of a router and the neurons of its experts make.

On a segment or in a polygon of a plane: within the cell of an expert set the pre-activations of its
neurons are affine, and their signs change on points or lines. The numbers are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int64

Point = tuple[Fraction, Fraction]

#: a, b and c of a x + b y + c.
Line = tuple[Fraction, Fraction, Fraction]


@dataclass(frozen=True, eq=False)
class SegmentRoots:
    """Places where neurons of one expert change their sign, by segment.

    ``is_active`` where the expert is chosen; in the others the neuron is not seen.
    """

    segment: Int64[np.ndarray, "roots"]
    neuron: Int64[np.ndarray, "roots"]
    at: Float64[np.ndarray, "roots"]
    is_active: Bool[np.ndarray, "roots"]


def segment_roots(
    start: Float64[np.ndarray, "segments neurons"],
    stop: Float64[np.ndarray, "segments neurons"],
    first: Int64[np.ndarray, "segments+1"],
    at: Float64[np.ndarray, "changes"],
    is_chosen: Bool[np.ndarray, "pieces"],
) -> SegmentRoots:
    r"""Where :math:`(1 - t) g_a + t g_b` of each neuron changes its sign, :math:`0 < t < 1`.

    .. math:: t = \frac{g_a}{g_a - g_b}, \qquad g_a g_b < 0

    Segment s has changes of the set at ``at[first[s]:first[s + 1]]``, ascending, and one piece more
    than changes; ``is_chosen`` holds all pieces in a row and says where the expert is chosen. A
    neuron that is 0 at an end does not change there. A root at a change of the set counts to the
    piece behind it. Source: docs/theory.md B13; oracle in tests: signs at many points.
    """
    segment, neuron = np.nonzero((start < 0.0) != (stop < 0.0))
    a, b = start[segment, neuron], stop[segment, neuron]
    inside = (a != 0.0) & (b != 0.0)
    segment, neuron, a, b = segment[inside], neuron[inside], a[inside], b[inside]
    # halves cannot overflow
    root = (0.5 * a) / (0.5 * a - 0.5 * b)
    starts = first[:-1] + np.arange(len(first) - 1)  # of the pieces
    # places of all segments in a row: between 2 s and 2 s + 1
    keys = at + 2.0 * np.repeat(np.arange(len(first) - 1), np.diff(first))
    passed = np.searchsorted(keys, root + 2.0 * segment, side="right") - first[segment]
    return SegmentRoots(segment, neuron, root, is_chosen[starts[segment] + passed])


def distinct_places(
    segment: Int64[np.ndarray, "places"], at: Float64[np.ndarray, "places"], num_segments: int
) -> Int64[np.ndarray, "segments"]:
    """How many different places each segment has: equal neurons change at one.

    Source: docs/theory.md B13.
    """
    places = at[np.argsort(segment, kind="stable")]
    stops = np.cumsum(np.bincount(segment, minlength=num_segments))[:-1]
    runs = (np.sort(part) for part in np.split(places, stops))
    return np.array([len(run) and 1 + np.count_nonzero(np.diff(run)) for run in runs], np.int64)


def clipped(corners: Sequence[Point], half_planes: Sequence[Line]) -> list[Point]:
    """The part of a convex polygon where every a x + b y + c is positive, exactly.

    Empty where it has no interior. Source: docs/theory.md B13.
    """
    polygon = list(corners)
    for line in half_planes:
        values = [_value(line, point) for point in polygon]
        inside: list[Point] = []
        for n, value in enumerate(values):
            after = (n + 1) % len(polygon)
            if value >= 0:
                inside.append(polygon[n])
            if value * values[after] < 0:
                inside.append(_between(polygon[n], polygon[after], value / (value - values[after])))
        polygon = inside
        if len(polygon) < 3 or max(values) <= 0:
            return []
    return polygon


def regions_in_polygon(corners: Sequence[Point], lines: Float64[np.ndarray, "lines 3"]) -> int:
    r"""Regions into which lines a x + b y + c = 0 cut the interior of a convex polygon, exactly.

    .. math:: 1 + \#\{\text{lines that meet the interior}\} + \sum_{p} (m(p) - 1)

    over the interior points p in which m(p) >= 2 lines meet. Lines that are equal count once, one
    with a = b = 0 never. Which lines cross inside follows from the order of their ends on the
    border, which float64 proves where their errors leave them apart, else rational numbers; points
    of three lines in the same way from their places on each. Corners in order, either way round.
    Source: Zaslavsky 1975; docs/theory.md B13; oracle in tests: signs of a grid, and Euler's
    formula.
    """  # fmt: skip
    points = np.array([[float(x), float(y), 1.0] for x, y in corners])
    lines = _distinct(lines[_may_meet(lines @ points.T, _error(lines, points))])
    values, error = lines @ points.T, _error(lines, points)
    exact = _Ends(corners, lines)
    # of a line whose signs at the corners are proved the border is crossed where they change
    is_sure = (np.abs(values) > error).all(axis=1)
    line, edge = np.nonzero((values > 0.0) != np.roll(values > 0.0, -1, axis=1))
    is_sure &= np.bincount(line, minlength=len(lines)) == 2
    line, edge = line[is_sure[line]], edge[is_sure[line]]
    after = (edge + 1) % len(points)
    step = values[line, edge] - values[line, after]
    off = 2.0 * np.maximum(error[line, edge], error[line, after]) / np.abs(step) + _ROUNDING
    off[off > 0.25] = 1.0  # so small a step is no divisor: anywhere on the edge
    at, off = [edge + values[line, edge] / step], [off]
    others = [n for n in np.flatnonzero(~is_sure).tolist() if exact.of(n)]
    line = np.r_[line, np.repeat(others, 2)].astype(np.int64)
    at += [np.array([n + float(share)]) for other in others for n, share in exact.of(other)]
    at, off = np.concatenate(at), np.concatenate([*off, np.full(2 * len(others), _ROUNDING)])
    order = np.argsort(at, kind="stable")
    place = np.empty(len(at), np.int64)
    place[order] = np.arange(len(at))
    for first, stop in _near(at[order], off[order]):
        ends = [exact.of(int(line[n]))[n % 2] for n in order[first:stop]]
        ranks = {end: first + rank for rank, end in enumerate(sorted(set(ends)))}
        place[order[first:stop]] = [ranks[end] for end in ends]
    chords = np.sort(place.reshape(-1, 2), axis=1)
    order = np.argsort(chords[:, 0], kind="stable")
    low, high = np.ascontiguousarray(chords[order].T, np.int32)
    cuts, crossings = lines[line[::2][order]], 0
    step = max(1, _AT_ONCE // max(len(cuts), 1))
    for first in range(0, len(cuts), step):
        own = slice(first, first + step)
        before = slice(0, min(first + step, len(cuts)))
        starts, stops = low[own, None], high[own, None]
        is_crossed = (low[before] < starts) & (starts < high[before]) & (high[before] < stops)
        crossings += np.count_nonzero(is_crossed)
        for n in np.flatnonzero(_may_repeat(cuts, own, is_crossed)).tolist():
            crossings -= _repeated(cuts, first + n, np.flatnonzero(is_crossed[n]))
    return 1 + len(cuts) + int(crossings)


#: Rounding of a place on the border, in edges: of a polygon of up to a hundred.
_ROUNDING = 2.0**-45

#: Pairs of lines that are looked at together: what fits a cache.
_AT_ONCE = 2**14


@dataclass(frozen=True, eq=False)
class _Ends:
    """Where lines cut the border, exactly: which edge, and the share of it; nothing of those that
    pass outside.
    """

    corners: Sequence[Point]
    lines: Float64[np.ndarray, "lines 3"]
    cache: dict[int, Sequence[tuple[int, Fraction]]] = field(default_factory=dict)

    def of(self, number: int) -> Sequence[tuple[int, Fraction]]:
        if number not in self.cache:
            line = _reduced(self.lines[number].tolist())
            values, ends = [_value(line, point) for point in self.corners], []
            for n, (one, after) in enumerate(zip(values, [*values[1:], values[0]], strict=True)):
                if one == 0:
                    ends.append((n, Fraction(0)))
                elif one * after < 0:
                    ends.append((n, one / (one - after)))
            self.cache[number] = ends if min(values) < 0 < max(values) else ()
        return self.cache[number]


def _error(
    lines: Float64[np.ndarray, "lines 3"], points: Float64[np.ndarray, "corners 3"]
) -> Float64[np.ndarray, "lines corners"]:
    """What rounding does at most to the values of lines at rounded corners."""
    return 2.0**-48 * (np.abs(lines) @ np.abs(points).T)


def _may_meet(
    values: Float64[np.ndarray, "lines corners"], error: Float64[np.ndarray, "lines corners"]
) -> Bool[np.ndarray, "lines"]:
    """Lines that perhaps meet the interior: all but those that float64 proves to lie outside."""
    return np.logical_not((values > error).all(axis=1) | (values < -error).all(axis=1))


def _distinct(lines: Float64[np.ndarray, "lines 3"]) -> Float64[np.ndarray, "distinct 3"]:
    """One of each line: quotients of equal ones are rounded to the same number."""
    lines = lines[lines[:, :2].any(axis=1)]
    lead = np.where(lines[:, 0] != 0.0, lines[:, 0], lines[:, 1])
    with np.errstate(over="ignore"):
        quotients = lines / lead[:, None] + 0.0
    order = np.lexsort(quotients.T)
    is_same = (quotients[order][1:] == quotients[order][:-1]).all(axis=1)
    again = np.zeros(len(lines), bool)
    of_equal: set[Line] = set()
    for n in np.flatnonzero(np.r_[is_same, False] | np.r_[False, is_same]).tolist():
        line = _reduced(lines[order[n]].tolist())
        again[order[n]] = line in of_equal
        of_equal.add(line)
    return lines[~again]


def _near(
    at: Float64[np.ndarray, "ascending"], off: Float64[np.ndarray, "ascending"]
) -> Iterator[tuple[int, int]]:
    """First and stop of each run of places that their errors do not leave apart."""
    is_near = ~(at[1:] - off[1:] > np.maximum.accumulate(at + off)[:-1])
    bounds = np.flatnonzero(np.diff(np.r_[False, is_near, False].astype(np.int8)))
    for first, last in bounds.reshape(-1, 2).tolist():
        yield first, last + 1


def _along(
    lines: Float64[np.ndarray, "lines 3"], own: int | slice, others: Any
) -> tuple[Float64[np.ndarray, "*pairs"], Float64[np.ndarray, "*pairs"]]:
    """Where other lines cross the own ones, along these, and what rounding does to that at most."""
    a, b, c = (np.atleast_1d(lines[own, n])[:, None] for n in range(3))
    of_a, of_b, of_c = lines[others].T
    with np.errstate(all="ignore"):
        one, other = a * of_b, b * of_a
        determinant = one - other
        x = (b * of_c - c * of_b) / determinant
        y = (c * of_a - a * of_c) / determinant
        off = 1.0 + (np.abs(one) + np.abs(other)) / np.abs(determinant)
        x *= b
        y *= a
        off *= 2.0**-44 * (np.abs(x) + np.abs(y) + np.abs(c))
        return y - x, off


def _may_repeat(
    lines: Float64[np.ndarray, "lines 3"], own: slice, is_crossed: Bool[np.ndarray, "own lines"]
) -> Bool[np.ndarray, "own"]:
    """Lines on which float64 does not prove that all places of others before them differ."""
    along, off = _along(lines, own, slice(0, is_crossed.shape[1]))
    along[~is_crossed], off[~is_crossed] = np.inf, 0.0
    along.sort(axis=1)
    most = off.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # those that do not cross are all at infinity
        is_near = np.diff(along, axis=1) <= 2.0 * most
    return is_near.any(axis=1) | ~np.isfinite(most[:, 0])


def _repeated(
    lines: Float64[np.ndarray, "lines 3"], own: int, others: Int64[np.ndarray, "crossing"]
) -> int:
    """How many of the lines that cross line ``own`` do so where another of them does."""
    if len(others) < 2:
        return 0
    (along,), (off,) = _along(lines, own, others)
    order, count = np.argsort(along), 0
    for first, stop in _near(along[order], off[order]):
        group = [_reduced(lines[n].tolist()) for n in (own, *others[order[first:stop]])]
        count += stop - first - len({_crossing(group[0], other) for other in group[1:]})
    return count


def _crossing(one: Line, other: Line) -> Point:
    determinant = one[0] * other[1] - one[1] * other[0]
    return (
        (one[1] * other[2] - one[2] * other[1]) / determinant,
        (one[2] * other[0] - one[0] * other[2]) / determinant,
    )


def _reduced(row: Sequence[float]) -> Line:
    """The line with 1 in front, so that equal lines are equal."""
    a, b, c = map(Fraction, row)
    lead = a or b or Fraction(1)
    return a / lead, b / lead, c / lead


def _value(line: Line, point: Point) -> Fraction:
    return line[0] * point[0] + line[1] * point[1] + line[2]


def _between(one: Point, other: Point, share: Fraction) -> Point:
    return (one[0] + share * (other[0] - one[0]), one[1] + share * (other[1] - one[1]))
