r"""The nearest curved boundary of one token.

A boundary is :math:`\{f(u') + \Delta = f(v')\}` with u, v the logits of a chosen and another
expert,
:math:`\Delta = c_i - c_j` and f increasing. Only the plane of the two rows matters. One logit, p,
is the parameter, the other, o, has to come as far as :math:`h(p) = f^{-1}(f(p) \pm \Delta)`; in
orthonormal coordinates x along the row of p and y across it,

.. math:: p' = p + \alpha x, \quad o' = o + \beta x + \gamma y, \quad
    d = \min_x \sqrt{x^2 + y(x)^2}, \quad
    y(x) = \max(0, \pm(h(p + \alpha x) - o - \beta x)) / \gamma.

This is a search in one variable, possibly with several minima. It is certified by branch and
bound: on an interval the slope of h lies between bounds, and so does y. A plane is (alpha, beta,
gamma, sign), the sign saying whether the parameter is the chosen one; a node of the boundary is (x,
logit, other logit, ratio of slopes dh/dp, height), the height being y(x) times gamma before
clipping at 0. The stack of the search is an array that the caller owns.

Source: docs/theory.md E1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from moegeom.geometry.boundary.curved import CurvedRows, ScoreCurve
from moegeom.geometry.boundary.linear import NEVER
from moegeom.kernels.cpu import ONCE, UNCOUNTED
from moegeom.kernels.cpu.score_curve import (
    KernelCurve,
    curve_at,
    curve_inverse,
    curve_of,
    curve_slopes,
)

#: Certified: lower >= (1 - TOLERANCE) upper.
TOLERANCE = 1e-6
#: Boundaries of parallel rows beyond this, in units of the router input, are not looked for.
FARTHEST = 1e6
#: Intervals looked at before the bound is taken as it is: one boundary needs some dozens.
MAX_SPLITS = 4000
#: Every split leaves one interval more.
STACK_SHAPE = (MAX_SPLITS + 4, 10)
NO_BOUNDARY_FOUND = (math.inf, math.inf, math.nan, math.nan)
#: Rounding of a bound: what is nearer than this share is looked at all the same.
_SAFE = 1.0 + 1e-9
#: Stands for no limit, so that products with zero stay zero.
FAR = 1e200
#: Typed as other experts are: a literal would be compiled apart.
NOBODY = np.int64(-1)


class Boundaries(NamedTuple):
    """A rule and its rows as compiled loops take them; without groups, one of all experts.

    ``curve`` is the sigmoid for softmax: a probability is the sigmoid of its log-odds, and
    ``stretch`` bounds the slope of what the curve is taken of.
    """

    curve: KernelCurve
    multiplier: float
    bias: np.ndarray
    length: np.ndarray
    longest: float
    gram: np.ndarray
    across: np.ndarray
    inverse: np.ndarray
    is_softmax: bool
    stretch: np.ndarray
    widest: float
    num_groups: int
    num_kept: int
    takes: int
    fill: float
    slopes: np.ndarray


def boundaries_of(rows: CurvedRows) -> Boundaries:
    """The boundaries of a rule, as arrays."""
    groups, is_softmax = rows.groups, rows.curve is None
    num_groups, num_kept, takes, fill = 1, 1, 1, -np.inf
    if groups is not None:
        num_groups, num_kept, fill = groups.num_groups, groups.num_kept, float(groups.fill)
        takes = 2 if groups.score == "top2_sum" and rows.num_experts > num_groups else 1
    return Boundaries(
        curve=curve_of(ScoreCurve("sigmoid") if rows.curve is None else rows.curve),
        multiplier=float(rows.multiplier),
        bias=rows.bias,
        length=rows.length,
        longest=float(rows.length.max()),
        gram=rows.gram,
        across=rows.across,
        inverse=rows.distances.inverse,
        is_softmax=is_softmax,
        stretch=rows.widest if is_softmax else rows.length,
        widest=float(rows.widest.max()),
        num_groups=num_groups,
        num_kept=num_kept,
        takes=takes,
        fill=fill,
        slopes=np.zeros((1, 1)) if groups is None else rows.group_slopes,
    )


#: By expert: multiplied logit ``z``, selection score ``q``, ``slope`` of the score (the probability
#: for softmax) and how far it can ``reach``, the ``odds`` that the score is the curve of, product
#: ``with_mean`` of the rows under softmax, bounds ``low`` and ``high`` of the score,
#: the score ``there`` after a step along ``direction``, whether it is chosen (``inside``), of a
#: kept group (``allowed``), and both that and not chosen (``is_open``).
_EXPERT = np.dtype(
    [
        *((name, np.float64) for name in ("z", "q", "slope", "reach", "odds", "with_mean")),
        *((name, np.float64) for name in ("low", "high", "there", "direction")),
        *((name, np.bool_) for name in ("is_open", "inside", "allowed")),
    ],
    align=True,
)
#: Of the barriers so far, ``bounds`` are the least and the second of their bounds, and the least
#: guess of where something changes; ``pair`` is that of the least bound, ``low_of_nearest``,
#: ``nearest`` and ``way`` the bound, experts and coefficients of the least guess. ``experts``,
#: ``signs`` and ``coefficients`` are those of the barrier that is looked at: up to four rows and,
#: last, the mean row. ``stack`` is that of the branch and bound.
_SEARCH = np.dtype(
    [
        ("mean_square", np.float64),
        ("bounds", np.float64, 3),
        ("low_of_nearest", np.float64),
        ("pair", np.int64, 2),
        ("nearest", np.int64, 4),
        ("way", np.float64, 5),
        ("experts", np.int64, 4),
        ("signs", np.float64, 4),
        ("coefficients", np.float64, 5),
        ("stack", np.float64, STACK_SHAPE),
    ],
    align=True,
)


class Work(NamedTuple):
    """Scratch arrays of the search for one token.

    ``members`` are the chosen experts of kept groups, ``is_kept`` the groups kept here and
    ``is_kept_there`` after a step. Records, not one array a name: an array is passed as seven
    numbers, and calls with hundreds of arguments take long to compile. Their fields are attributes
    in compiled code alone.
    """

    each: Any
    search: Any
    members: np.ndarray
    is_kept: np.ndarray
    is_kept_there: np.ndarray


def work_for(boundaries: Boundaries) -> Work:
    """Room for the numbers of one token and for the search."""
    experts = len(boundaries.bias)
    return Work(
        each=np.zeros(experts, _EXPERT),
        search=np.zeros(1, _SEARCH)[0],
        members=np.empty(experts, dtype=np.int64),
        is_kept=np.empty(boundaries.num_groups, dtype=np.bool_),
        is_kept_there=np.empty(boundaries.num_groups, dtype=np.bool_),
    )


@njit(**UNCOUNTED)
def fill(values: np.ndarray, value: float) -> None:
    """Sets all entries; a slice would be compiled to much more."""
    for n in range(values.shape[0]):
        values[n] = value


@njit(**UNCOUNTED)
def _node(curve, plane, p, o, delta, x):
    first, along, _, sign = plane
    logit = p + first * x
    score, rest, slope = curve_at(curve, logit)
    shift = sign * delta
    other, there = curve_inverse(curve, score + shift, rest - shift)
    ratio = slope / there if there > 0.0 else math.inf
    ratio = ratio if first > 0.0 else 0.0
    return x, logit, other, ratio, sign * (other - o - along * x)


@njit(**UNCOUNTED)
def _cost(plane, node):
    rise = max(node[4], 0.0)
    if rise == 0.0:
        return abs(node[0])
    if plane[2] == 0.0:
        return math.inf
    return math.hypot(node[0], rise / plane[2])


@njit(**UNCOUNTED)
def _lowest(a, b, low, high, width):
    """Least value between two ends of a function whose slope is between ``low`` and ``high``."""
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


@njit(**ONCE)
def _ratios(curve, a, b):
    """Least and largest dh/dp between two nodes.

    h'' has the sign of G(h) - G(p) with G = (1/f')', so that where 1/f' is convex dh/dp is
    monotone; elsewhere it is a quotient of slopes.
    """
    limit = curve.convex_until
    if b[1] <= limit and b[2] <= limit:
        return min(a[3], b[3]), max(a[3], b[3])
    least, most = curve_slopes(curve, a[1], b[1])
    other_least, other_most = curve_slopes(curve, a[2], b[2])
    lower = least / other_most if other_most > 0.0 else 0.0
    upper = most / other_least if other_least > 0.0 else math.inf
    return lower, upper


@njit(**ONCE)
def _bound(curve, plane, a, b):
    """No point of the boundary between two nodes is nearer than this."""
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
    # the nearest point of the chord; along it, what grows and falls within bounds is bounded too
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


@njit(**UNCOUNTED)
def _push(stack, top, a, b):
    for entry in range(5):
        stack[top, entry] = a[entry]
        stack[top, 5 + entry] = b[entry]
    return top + 1


@njit(**UNCOUNTED)
def _read(stack, top, offset):
    row = stack[top]
    return row[offset], row[offset + 1], row[offset + 2], row[offset + 3], row[offset + 4]


@njit(**ONCE)
def _descended(curve, plane, p, o, delta, x, limit):
    """The nearest of nodes that approach a local minimum: that of each tangent in turn."""
    node = _node(curve, plane, p, o, delta, x)
    nearest = node
    for _ in range(8):
        slope = plane[3] * (plane[0] * node[3] - plane[1])
        if not (math.isfinite(node[4]) and math.isfinite(slope)):
            break
        square = plane[2] * plane[2] + slope * slope
        if square == 0.0:
            break
        # where the score is so low that the other logit is infinite, the tangent is of no use
        following = -slope * (node[4] - slope * node[0]) / square
        following = min(max(following, -limit), limit)
        before = node[0]
        node = _node(curve, plane, p, o, delta, following)
        if _cost(plane, node) < _cost(plane, nearest):
            nearest = node
        if abs(following - before) <= 1e-6 * abs(following):
            break
    return nearest


@njit(**UNCOUNTED)
def _branch_and_bound(curve, plane, p, o, delta, start, limit, stack):
    """The nearest point of the boundary nearer than ``limit``."""
    nearest = _descended(curve, plane, p, o, delta, start, limit)
    best = min(_cost(plane, nearest), limit)
    # a short interval around the local minimum: its ends rule the rest out
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


@njit(**ONCE)
def _finite_start(curve, plane, p, o, delta):
    """0, or an x where the other logit is finite: the middle of the scores that allow it."""
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


@njit(**ONCE)
def _boundary_distance(curve, u, v, first, along, across, delta, limit, stack):
    """Lower and upper bound of the distance to a boundary, and both logits at its nearest point.

    The row of u is ``first`` long; that of v has ``along`` along it and ``across`` across it, or
    its length along a row of u that is zero. Boundaries at ``limit`` or beyond are not looked for:
    ``lower >= (1 - 1e-6) min(upper, limit)``, up to rounding. In units of the router input: 0 where
    ``f(u) + delta <= f(v)``; inf, and nan for the logits, when delta is beyond the range of the
    score, when equal rows keep a gap, or when the boundary of parallel rows is farther than
    ``FARTHEST``. Where an interval would have to be cut more than ``MAX_SPLITS`` times, the bracket
    stays open; no bound is wrong.
    """
    score, _, slope = curve_at(curve, u)
    other_score, _, other_slope = curve_at(curve, v)
    if score + delta <= other_score:
        return 0.0, 0.0, u, v
    if delta >= curve.high - curve.low:
        return NO_BOUNDARY_FOUND
    length = math.hypot(along, across)
    plane = (first, along, across, 1.0)
    p, o = u, v
    # the flatter end as the parameter: then h is flat
    if slope > other_slope and first > 0.0 and length > 0.0:
        plane = (length, first * along / length, across * first / length, -1.0)
        p, o = v, u
    start = _finite_start(curve, plane, p, o, delta)
    best = _cost(plane, _node(curve, plane, p, o, delta, start))
    if best < limit or limit < math.inf:
        return _branch_and_bound(curve, plane, p, o, delta, start, limit, stack)
    radius = 1.0 / max(first, length)
    while radius < FARTHEST:
        bracket = _branch_and_bound(curve, plane, p, o, delta, 0.0, radius, stack)
        if bracket[1] < math.inf or bracket[0] < (1.0 - TOLERANCE) * radius:
            return bracket
        radius *= 8.0
    return NO_BOUNDARY_FOUND


@njit(**UNCOUNTED)
def load_token(boundaries: Boundaries, logits: np.ndarray, work: Work) -> None:
    """Logits times the multiplier, selection scores and slopes of one token."""
    for expert in range(logits.shape[0]):
        z = logits[expert] * boundaries.multiplier
        score, _, slope = curve_at(boundaries.curve, z)
        work.each[expert].z = z
        work.each[expert].q = score + boundaries.bias[expert]
        work.each[expert].slope = slope


@njit(**UNCOUNTED)
def pair_boundary(
    boundaries: Boundaries, work: Work, i: int | np.int64, j: int | np.int64, limit: float
) -> tuple[float, float, float, float]:
    """As :func:`_boundary_distance`, of j catching up with i; linear for equal biases."""
    u = work.each[i].z
    v = work.each[j].z
    delta = boundaries.bias[i] - boundaries.bias[j]
    if delta == 0.0:
        inverse = boundaries.inverse[i, j]
        distance = max(u - v, 0.0) * inverse
        if distance >= min(limit, NEVER):
            return NO_BOUNDARY_FOUND
        step = distance * inverse
        gram = boundaries.gram
        there = u - step * (gram[i, i] - gram[i, j])
        return distance, distance, there, v - step * (gram[i, j] - gram[j, j])
    first = boundaries.length[i]
    along = boundaries.gram[i, j] / first if first > 0.0 else boundaries.length[j]
    return _boundary_distance(
        boundaries.curve,
        u,
        v,
        first,
        along,
        boundaries.across[i, j],
        delta,
        limit,
        work.search.stack,
    )


@njit(**UNCOUNTED)
def _slope_bounds(boundaries, slope, factor):
    """Least and largest slope where it changes by ``factor`` at most."""
    return slope / factor, min(max(slope, 1e-300) * factor, boundaries.curve.steepest)


@njit(**ONCE)
def _slope_factor(boundaries, radius):
    """By how much any slope may change within ``radius``.

    The logarithm of a slope changes by at most ``log_slope`` per unit of the logit, and no logit by
    more than the longest row per unit of distance.
    """
    exponent = min(radius, FAR) * boundaries.curve.log_slope * boundaries.longest
    return math.exp(min(exponent, 600.0)) * _SAFE


@njit(**ONCE)
def _steepest_difference(boundaries, work, i, j, factor):
    """Largest norm of s w_i - t w_j over slopes s and t within their bounds: at a corner."""
    squared = 0.0
    gram = boundaries.gram
    for s in _slope_bounds(boundaries, work.each[i].slope, factor):
        for t in _slope_bounds(boundaries, work.each[j].slope, factor):
            value = s * s * gram[i, i] - 2.0 * s * t * gram[i, j] + t * t * gram[j, j]
            squared = max(squared, value)
    return math.sqrt(squared)


@njit(**UNCOUNTED)
def nearest_boundary(
    boundaries: Boundaries, work: Work, members: np.ndarray
) -> tuple[float, float, int | np.int64, int | np.int64, float, float]:
    """Lower and upper bound, pair and logits there, between ``members`` and ``work.each.is_open``.

    ``members`` come in descending order of selection scores. Pairs are passed over when bounds of
    the slopes within the best distance so far put their boundary beyond it.
    """
    q = work.each.q
    is_open = work.each.is_open
    first_out = NOBODY
    for expert in range(q.shape[0]):
        if is_open[expert] and (first_out < 0 or q[expert] > q[first_out]):
            first_out = expert
    if first_out < 0 or members.shape[0] == 0:
        return math.inf, math.inf, NOBODY, NOBODY, math.nan, math.nan
    last = members[-1]
    lower, upper, at_out, at_in = pair_boundary(boundaries, work, last, first_out, math.inf)
    out, entering = (last, first_out) if upper < math.inf else (NOBODY, NOBODY)
    lower = min(lower, upper)
    factor = _slope_factor(boundaries, upper)
    far = min(upper, FAR)
    for expert in range(q.shape[0]):
        most = _slope_bounds(boundaries, work.each[expert].slope, factor)[1]
        work.each[expert].reach = far * most * boundaries.length[expert] * _SAFE
    for rank in range(members.shape[0] - 1, -1, -1):
        i = members[rank]
        least = q[i] - work.each[i].reach
        if least > q[first_out] + far * boundaries.curve.steepest * boundaries.longest * _SAFE:
            continue
        for j in range(q.shape[0]):
            if least > q[j] + work.each[j].reach or not is_open[j]:
                continue
            if upper == 0.0 or (i == last and j == first_out):
                continue
            steepest = _steepest_difference(boundaries, work, i, j, factor)
            if q[i] - q[j] > min(upper, FAR) * steepest * _SAFE:
                continue
            bracket = pair_boundary(boundaries, work, i, j, upper)
            lower = min(lower, bracket[0])
            if bracket[1] < upper:
                upper, at_out, at_in = bracket[1], bracket[2], bracket[3]
                out, entering = i, j
            lower = min(lower, upper)
    return lower, upper, out, entering, at_out, at_in
