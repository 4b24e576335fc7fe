r"""How many regions the boundaries of a router and the neurons of its experts make.

On a segment or in a polygon of a plane: within the cell of an expert set the pre-activations of its
neurons are affine, and their signs change on points or lines. The numbers are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

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
    segment, a, b = segment[inside], a[inside], b[inside]
    # halves cannot overflow
    root = (0.5 * a) / (0.5 * a - 0.5 * b)
    starts = first[:-1] + np.arange(len(first) - 1)  # of the pieces
    # places of all segments in a row: between 2 s and 2 s + 1
    keys = at + 2.0 * np.repeat(np.arange(len(first) - 1), np.diff(first))
    passed = np.searchsorted(keys, root + 2.0 * segment, side="right") - first[segment]
    return SegmentRoots(segment, root, is_chosen[starts[segment] + passed])


def distinct_places(
    segment: Int64[np.ndarray, "places"], at: Float64[np.ndarray, "places"], num_segments: int
) -> Int64[np.ndarray, "segments"]:
    """How many different places each segment has: equal neurons change at one.

    Source: docs/theory.md B13.
    """
    if not len(segment):
        return np.zeros(num_segments, np.int64)
    order = np.lexsort((at, segment))
    segment, at = segment[order], at[order]
    is_new = np.r_[True, (np.diff(segment) != 0) | (np.diff(at) != 0.0)]
    return np.bincount(segment[is_new], minlength=num_segments)


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
    border, in rational numbers; points of three lines from their determinant. Corners in order,
    either way round. Source: Zaslavsky 1975; docs/theory.md B13; oracle in tests: signs of a grid,
    and Euler's formula.
    """  # fmt: skip
    chords = {}
    is_cut = _meets(corners, lines)
    for row in lines[is_cut].tolist():
        line = _reduced(row)
        if line in chords:
            continue
        values = [_value(line, point) for point in corners]
        ends = []
        for n, (one, after) in enumerate(zip(values, [*values[1:], values[0]], strict=True)):
            if one == 0:
                ends.append((n, Fraction(0)))
            elif one * after < 0:
                ends.append((n, one / (one - after)))
        if min(values) < 0 < max(values):
            chords[line] = (ends[0], ends[1])
    if not chords:
        return 1
    ends = sorted({end for pair in chords.values() for end in pair})
    place = {end: rank for rank, end in enumerate(ends)}
    low = np.array([place[one] for one, _ in chords.values()])
    high = np.array([place[other] for _, other in chords.values()])
    cuts = list(chords)
    coefficients = np.array([[float(v) for v in line] for line in cuts])
    points = 0
    for n in range(1, len(cuts)):
        i = np.flatnonzero(
            ((low[:n] < low[n]) & (low[n] < high[:n]) & (high[:n] < high[n]))
            | ((low[n] < low[:n]) & (low[:n] < high[n]) & (high[n] < high[:n]))
        )
        points += len(i) - _repeated(cuts, coefficients, n, i)
    return 1 + len(cuts) + points


def _repeated(
    lines: Sequence[Line],
    coefficients: Float64[np.ndarray, "lines 3"],
    own: int,
    others: Int64[np.ndarray, "crossing"],
) -> int:
    """How many of the lines that cross line ``own`` do so where another of them does."""
    if len(others) < 2:
        return 0
    a, b, c = coefficients[own]
    determinant = a * coefficients[others, 1] - b * coefficients[others, 0]
    with np.errstate(all="ignore"):
        x = (b * coefficients[others, 2] - c * coefficients[others, 1]) / determinant
        y = (c * coefficients[others, 0] - a * coefficients[others, 2]) / determinant
        along = -b * x + a * y
    order = np.argsort(along)
    gap = np.diff(along[order])
    size = np.abs(b * x) + np.abs(a * y) + np.abs(c)
    lost = np.abs(a * coefficients[others, 1]) + np.abs(b * coefficients[others, 0])
    error = (2.0**-44 * size * (1.0 + lost / np.abs(determinant)))[order]
    near = ~(gap > error[1:] + error[:-1])  # of nearly parallel lines float64 says nothing
    count, n = 0, 0
    while n < len(near):
        if not near[n]:
            n += 1
            continue
        stop = n
        while stop < len(near) and near[stop]:
            stop += 1
        group = others[order[n : stop + 1]]
        count += len(group) - len({_crossing(lines[own], lines[other]) for other in group})
        n = stop
    return count


def _crossing(one: Line, other: Line) -> Point:
    determinant = one[0] * other[1] - one[1] * other[0]
    return (
        (one[1] * other[2] - one[2] * other[1]) / determinant,
        (one[2] * other[0] - one[0] * other[2]) / determinant,
    )


def _meets(
    corners: Sequence[Point], lines: Float64[np.ndarray, "lines 3"]
) -> Bool[np.ndarray, "lines"]:
    """Lines that perhaps meet the interior: all but those that float64 proves to lie outside."""
    points = np.array([[float(x), float(y), 1.0] for x, y in corners])
    values = lines @ points.T
    error = 2.0**-48 * (np.abs(lines) @ np.abs(points).T)
    outside = (values > error).all(axis=1) | (values < -error).all(axis=1)
    return np.logical_not(outside)


def _reduced(row: Sequence[float]) -> Line:
    """The line with 1 in front, so that equal lines are equal."""
    a, b, c = map(Fraction, row)
    lead = a or b or Fraction(1)
    return a / lead, b / lead, c / lead


def _value(line: Line, point: Point) -> Fraction:
    return line[0] * point[0] + line[1] * point[1] + line[2]


def _between(one: Point, other: Point, share: Fraction) -> Point:
    return (one[0] + share * (other[0] - one[0]), one[1] + share * (other[1] - one[1]))
