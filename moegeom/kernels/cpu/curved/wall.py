"""Distance to one curved wall, compiled; see :mod:`moegeom.geometry.boundary.curved_wall`.

A node of the wall is (x, logit, other logit, ratio of slopes, height); the stack of the search is
an array that the caller owns.
"""

from __future__ import annotations

import math

from numba import njit

from moegeom.geometry.boundary.curved_wall import FARTHEST, MAX_SPLITS, TOLERANCE
from moegeom.kernels.cpu._inner import INNER
from moegeom.kernels.cpu.curved.score_curve import curve_at, curve_inverse, curve_slopes

#: Every split leaves one interval more.
STACK_SHAPE = (MAX_SPLITS + 4, 10)
NO_WALL_FOUND = (math.inf, math.inf, math.nan, math.nan)


@njit(**INNER)
def _node(curve, plane, p, o, delta, x):
    first, along, _, sign = plane
    logit = p + first * x
    score, rest, slope = curve_at(curve, logit)
    shift = sign * delta
    other, there = curve_inverse(curve, score + shift, rest - shift)
    ratio = slope / there if there > 0.0 else math.inf
    ratio = ratio if first > 0.0 else 0.0
    return x, logit, other, ratio, sign * (other - o - along * x)


@njit(**INNER)
def _cost(plane, node):
    rise = max(node[4], 0.0)
    if rise == 0.0:
        return abs(node[0])
    if plane[2] == 0.0:
        return math.inf
    return math.hypot(node[0], rise / plane[2])


@njit(**INNER)
def _lowest(a, b, low, high, width):
    if a == -math.inf or b == -math.inf:
        return -math.inf
    if a == math.inf and b == math.inf:
        return math.inf
    if low >= 0.0 or b == math.inf:
        return a + min(low, 0.0) * width
    if high <= 0.0 or a == math.inf:
        return b - max(high, 0.0) * width
    if high == math.inf:
        return a + low * width
    if low == -math.inf:
        return b - high * width
    step = min(max((a - b + high * width) / (high - low), 0.0), width)
    return a + low * step


@njit(**INNER)
def _ratios(curve, a, b):
    limit = curve.convex_until
    if b[1] <= limit and b[2] <= limit:
        return min(a[3], b[3]), max(a[3], b[3])
    least, most = curve_slopes(curve, a[1], b[1])
    other_least, other_most = curve_slopes(curve, a[2], b[2])
    lower = least / other_most if other_most > 0.0 else 0.0
    upper = most / other_least if other_least > 0.0 else math.inf
    return lower, upper


@njit(**INNER)
def _bound(curve, plane, a, b):
    first, along, across, sign = plane
    least, most = _ratios(curve, a, b)
    one = sign * (first * least - along)
    two = sign * (first * most - along)
    low = min(one, two)
    high = max(one, two)
    width = b[0] - a[0]
    lowest = _lowest(a[4], b[4], low, high, width)
    nearest = 0.0 if a[0] <= 0.0 <= b[0] else min(abs(a[0]), abs(b[0]))
    if lowest <= 0.0:
        return nearest
    if across == 0.0:
        return math.inf
    box = math.hypot(nearest, lowest / across)
    if not (math.isfinite(a[4]) and math.isfinite(b[4])):
        return box
    ay = a[4] / across
    by = b[4] / across
    dx = b[0] - a[0]
    dy = by - ay
    square = dx * dx + dy * dy
    step = min(max(-(a[0] * dx + ay * dy) / square, 0.0), 1.0) if square > 0.0 else 0.0
    x = a[0] + step * dx
    y = ay + step * dy
    length = math.hypot(x, y)
    if length == 0.0:
        return box
    x = x / length
    y = y / length / across
    tilted = _lowest(x * a[0] + y * a[4], x * b[0] + y * b[4], x + y * low, x + y * high, width)
    return max(box, tilted)


@njit(**INNER)
def _push(stack, top, a, b):
    for entry in range(5):
        stack[top, entry] = a[entry]
        stack[top, 5 + entry] = b[entry]
    return top + 1


@njit(**INNER)
def _read(stack, top, offset):
    row = stack[top]
    return row[offset], row[offset + 1], row[offset + 2], row[offset + 3], row[offset + 4]


@njit(**INNER)
def _descended(curve, plane, p, o, delta, x, limit):
    node = _node(curve, plane, p, o, delta, x)
    nearest = node
    for _ in range(8):
        slope = plane[3] * (plane[0] * node[3] - plane[1])
        if not (math.isfinite(node[4]) and math.isfinite(slope)):
            break
        square = plane[2] * plane[2] + slope * slope
        if square == 0.0:
            break
        following = -slope * (node[4] - slope * node[0]) / square
        following = min(max(following, -limit), limit)
        before = node[0]
        node = _node(curve, plane, p, o, delta, following)
        if _cost(plane, node) < _cost(plane, nearest):
            nearest = node
        if abs(following - before) <= 1e-6 * abs(following):
            break
    return nearest


@njit(**INNER)
def _branch_and_bound(curve, plane, p, o, delta, start, limit, stack):
    nearest = _descended(curve, plane, p, o, delta, start, limit)
    best = min(_cost(plane, nearest), limit)
    short = 5e-4 * best
    left = _node(curve, plane, p, o, delta, -best)
    top = 0
    for cut in (max(nearest[0] - short, -best), min(nearest[0] + short, best), best):
        right = _node(curve, plane, p, o, delta, cut)
        if left[0] < right[0]:
            top = _push(stack, top, left, right)
        left = right
    lower = math.inf
    splits = 0
    while top > 0:
        top -= 1
        a = _read(stack, top, 0)
        b = _read(stack, top, 5)
        bound = _bound(curve, plane, a, b)
        middle = (a[0] + b[0]) / 2.0
        splits += 1
        is_done = bound >= (1.0 - TOLERANCE) * best or not a[0] < middle < b[0]
        if is_done or splits >= MAX_SPLITS:
            lower = min(lower, bound)
            continue
        node = _node(curve, plane, p, o, delta, middle)
        cost = _cost(plane, node)
        if cost < best:
            best = cost
            nearest = node
        top = _push(stack, top, a, node)
        top = _push(stack, top, node, b)
    lower = min(lower, best)
    cost = _cost(plane, nearest)
    if cost >= limit:
        return lower, math.inf, math.nan, math.nan
    other = nearest[2] if nearest[4] >= 0.0 else o + plane[1] * nearest[0]
    if plane[3] > 0.0:
        return lower, cost, nearest[1], other
    return lower, cost, other, nearest[1]


@njit(**INNER)
def _finite_start(curve, plane, p, o, delta):
    if plane[0] == 0.0 or math.isfinite(_node(curve, plane, p, o, delta, 0.0)[4]):
        return 0.0
    shift = plane[3] * delta
    low = max(curve.low, curve.low - shift)
    high = min(curve.high, curve.high - shift)
    if low == -math.inf:
        return 0.0
    middle = (low + high) / 2.0 if high < math.inf else low + 1.0
    logit, _ = curve_inverse(curve, middle, curve.high - middle)
    return (logit - p) / plane[0]


@njit(**INNER)
def wall_distance(curve, u, v, first, along, across, delta, limit, stack):
    """Lower and upper bound, and the logits of the nearest point; inf and nan without a wall."""
    score, _, slope = curve_at(curve, u)
    other_score, _, other_slope = curve_at(curve, v)
    if score + delta <= other_score:
        return 0.0, 0.0, u, v
    if delta >= curve.high - curve.low:
        return NO_WALL_FOUND
    length = math.hypot(along, across)
    plane = (first, along, across, 1.0)
    p, o = u, v
    if slope > other_slope and first > 0.0 and length > 0.0:
        plane = (length, first * along / length, across * first / length, -1.0)
        p, o = v, u
    start = _finite_start(curve, plane, p, o, delta)
    best = _cost(plane, _node(curve, plane, p, o, delta, start))
    if best < limit or limit < math.inf:
        return _branch_and_bound(curve, plane, p, o, delta, start, limit, stack)
    radius = 1.0 / max(first, length)
    while radius < FARTHEST:
        found = _branch_and_bound(curve, plane, p, o, delta, 0.0, radius, stack)
        if found[1] < math.inf or found[0] < (1.0 - TOLERANCE) * radius:
            return found
        radius *= 8.0
    return NO_WALL_FOUND
