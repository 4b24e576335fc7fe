r"""Distance from one router input to the wall of two experts whose score is curved.

The wall is :math:`\{f(u') + \Delta = f(v')\}` with u, v the logits of a chosen and another expert,
:math:`\Delta = c_i - c_j` and f increasing. Only the plane of the two rows matters. One logit, p,
is the parameter, the other, o, has to come as far as :math:`h(p) = f^{-1}(f(p) \pm \Delta)`; in
orthonormal coordinates x along the row of p and y across it,

.. math:: p' = p + \alpha x, \quad o' = o + \beta x + \gamma y, \quad
    d = \min_x \sqrt{x^2 + y(x)^2}, \quad
    y(x) = \max(0, \pm(h(p + \alpha x) - o - \beta x)) / \gamma.

This is a search in one variable, possibly with several minima. It is certified by branch and
bound: on an interval the slope of h lies between bounds, and so does y.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from moegeom.geometry.boundary.score_curve import ScoreCurve

#: Certified: lower >= (1 - TOLERANCE) upper.
TOLERANCE = 1e-6
#: A row is parallel to another when it leaves its line by less than this share of its length.
PARALLEL = 1e-12
#: Walls of parallel rows beyond this, in units of the router input, are not looked for.
FARTHEST = 1e6
#: Intervals looked at before the bound is taken as it is: one wall needs some dozens.
MAX_SPLITS = 4000


@dataclass(frozen=True)
class Plane:
    """Two rows in orthonormal coordinates: (first, 0) and (along, across).

    ``first_is_chosen`` says which of the two the parameter belongs to.
    """

    first: float
    along: float
    across: float
    first_is_chosen: bool


@dataclass(frozen=True)
class Wall:
    """Bounds of the distance, and the logits (u', v') of the nearest point that was found.

    ``upper`` is inf, and the logits nan, when there is no wall within the limit of the search.
    """

    lower: float
    upper: float
    logits: tuple[float, float]


@dataclass(frozen=True)
class _Node:
    """The wall at x: ``height`` is y(x) times ``across`` before clipping at 0."""

    x: float
    logit: float
    other: float
    ratio: float  # dh/dp
    height: float


@dataclass(frozen=True)
class _Search:
    curve: ScoreCurve
    plane: Plane
    p: float
    o: float
    delta: float

    @property
    def sign(self) -> float:
        return 1.0 if self.plane.first_is_chosen else -1.0

    def node(self, x: float) -> _Node:
        logit = self.p + self.plane.first * x
        here = self.curve.at(logit)
        shift = self.sign * self.delta
        other, slope = self.curve.inverse(here.score + shift, here.rest - shift)
        ratio = here.slope / slope if slope > 0.0 else math.inf
        ratio = ratio if self.plane.first > 0.0 else 0.0
        height = self.sign * (other - self.o - self.plane.along * x)
        return _Node(x, logit, other, ratio, height)

    def cost(self, node: _Node) -> float:
        rise = max(node.height, 0.0)
        if rise == 0.0:
            return abs(node.x)
        if self.plane.across == 0.0:
            return math.inf
        return math.hypot(node.x, rise / self.plane.across)

    def ratios(self, a: _Node, b: _Node) -> tuple[float, float]:
        """Least and largest dh/dp between two nodes.

        h'' has the sign of G(h) - G(p) with G = (1/f')', so that where 1/f' is convex dh/dp is
        monotone; elsewhere it is a quotient of slopes.
        """
        limit = self.curve.bends.convex_until
        if b.logit <= limit and b.other <= limit:
            return min(a.ratio, b.ratio), max(a.ratio, b.ratio)
        least, most = self.curve.slopes(a.logit, b.logit)
        other_least, other_most = self.curve.slopes(a.other, b.other)
        return (
            least / other_most if other_most > 0.0 else 0.0,
            most / other_least if other_least > 0.0 else math.inf,
        )

    def bound(self, a: _Node, b: _Node) -> float:
        """No point of the wall between two nodes is nearer than this."""
        least, most = self.ratios(a, b)
        first, along, across = self.plane.first, self.plane.along, self.plane.across
        slopes = self.sign * (first * least - along), self.sign * (first * most - along)
        low, high = min(slopes), max(slopes)
        width = b.x - a.x
        lowest = _lowest(a.height, b.height, low, high, width)
        nearest = 0.0 if a.x <= 0.0 <= b.x else min(abs(a.x), abs(b.x))
        if lowest <= 0.0:
            return nearest
        if across == 0.0:
            return math.inf
        box = math.hypot(nearest, lowest / across)
        if not (math.isfinite(a.height) and math.isfinite(b.height)):
            return box
        x, y = _nearest_of_chord(a.x, a.height / across, b.x, b.height / across)
        length = math.hypot(x, y)
        if length == 0.0:
            return box
        # the component along (x, y) grows and falls within bounds too
        x, y = x / length, y / length / across
        tilted = _lowest(
            x * a.x + y * a.height, x * b.x + y * b.height, x + y * low, x + y * high, width
        )
        return max(box, tilted)


def _lowest(a: float, b: float, low: float, high: float, width: float) -> float:
    """Least value between two ends of a function whose slope is between ``low`` and ``high``."""
    if a == -math.inf or b == -math.inf:
        return -math.inf
    if a == b == math.inf:
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


def _nearest_of_chord(ax: float, ay: float, bx: float, by: float) -> tuple[float, float]:
    """The point of a segment that is nearest to the origin."""
    dx, dy = bx - ax, by - ay
    square = dx * dx + dy * dy
    step = min(max(-(ax * dx + ay * dy) / square, 0.0), 1.0) if square > 0.0 else 0.0
    return ax + step * dx, ay + step * dy


def wall_distance(
    curve: ScoreCurve,
    logits: tuple[float, float],
    rows: tuple[float, float, float],
    delta: float,
    limit: float = math.inf,
) -> Wall:
    r"""Distance to the wall :math:`f(u') + \Delta = f(v')` from logits (u, v), with a bracket.

    ``rows`` are the length of the row of u, what the row of v has along it, and across it; a zero
    first row leaves the second its length along. Walls at ``limit`` or beyond are not looked for.
    ``lower >= (1 - 1e-6) min(upper, limit)``, up to rounding. In units of the router input: 0 where
    ``f(u) + delta <= f(v)``, inf when delta is beyond the range of the score, when equal rows keep
    a gap, or when the wall of parallel rows is farther than ``FARTHEST``. Where an interval would
    have to be cut more than ``MAX_SPLITS`` times, the bracket stays open; no bound is wrong.

    Source: docs/theory.md E1. Oracle in tests: scipy.optimize.minimize (SLSQP) from many starts.
    """
    u, v = logits
    here, there = curve.at(u), curve.at(v)
    bends = curve.bends
    if here.score + delta <= there.score:
        return Wall(0.0, 0.0, logits)
    if delta >= bends.high - bends.low:
        return Wall(math.inf, math.inf, (math.nan, math.nan))
    first, along, across = rows
    plane = Plane(first, along, across, True)
    length = math.hypot(along, across)
    if here.slope > there.slope and first > 0.0:
        # the flatter end as the parameter: then h is flat
        product = first * along
        plane = Plane(length, product / length, across * first / length, False) if length else plane
    parameter, other = (u, v) if plane.first_is_chosen else (v, u)
    search = _Search(curve, plane, parameter, other, delta)
    best = search.cost(search.node(start := _finite_start(search)))
    if best < limit or limit < math.inf:
        return _branch_and_bound(search, start, limit)
    radius = 1.0 / max(first, length)
    while radius < FARTHEST:
        found = _branch_and_bound(search, 0.0, radius)
        if found.upper < math.inf or found.lower < (1.0 - TOLERANCE) * radius:
            return found
        radius *= 8.0
    return Wall(math.inf, math.inf, (math.nan, math.nan))


def _finite_start(search: _Search) -> float:
    """0, or an x where the other logit is finite: the middle of the scores that allow it."""
    if math.isfinite(search.node(0.0).height) or search.plane.first == 0.0:
        return 0.0
    bends, shift = search.curve.bends, search.sign * search.delta
    low = max(bends.low, bends.low - shift)
    high = min(bends.high, bends.high - shift)
    if low == -math.inf:
        return 0.0
    middle = (low + high) / 2.0 if high < math.inf else low + 1.0
    logit, _ = search.curve.inverse(middle, bends.high - middle)
    return (logit - search.p) / search.plane.first


def _branch_and_bound(search: _Search, start: float, limit: float) -> Wall:
    """The nearest point of the wall nearer than ``limit``."""
    nodes = _descend(search, start, limit)
    nearest = min(nodes, key=search.cost)
    best = min(search.cost(nearest), limit)
    # a short interval around the local minimum: its ends rule the rest out
    short = 5e-4 * best
    cuts = [-best, max(nearest.x - short, -best), min(nearest.x + short, best), best]
    ends = [search.node(x) for x in cuts]
    stack = [(a, b) for a, b in itertools.pairwise(ends) if a.x < b.x]
    lower = math.inf
    for split in range(MAX_SPLITS):
        if not stack:
            break
        a, b = stack.pop()
        bound = search.bound(a, b)
        middle = (a.x + b.x) / 2.0
        is_done = bound >= (1.0 - TOLERANCE) * best or not a.x < middle < b.x
        if is_done or split == MAX_SPLITS - 1:
            lower = min(lower, bound)
            continue
        node = search.node(middle)
        if search.cost(node) < best:
            best, nearest = search.cost(node), node
        stack += [(a, node), (node, b)]
    lower = min([lower, best, *(search.bound(a, b) for a, b in stack)])
    cost = search.cost(nearest)
    if cost >= limit:
        return Wall(lower, math.inf, (math.nan, math.nan))
    return Wall(lower, cost, _logits_at(search, nearest))


def _descend(search: _Search, x: float, limit: float) -> list[_Node]:
    """Nodes that approach a local minimum: the nearest point of each tangent in turn."""
    nodes = [search.node(x)]
    across = search.plane.across
    for _ in range(8):
        node = nodes[-1]
        slope = search.sign * (search.plane.first * node.ratio - search.plane.along)
        if not (math.isfinite(node.height) and math.isfinite(slope)):
            break
        square = across * across + slope * slope
        if square == 0.0:
            break
        # where the score is so low that the other logit does not exist, the tangent is of no use
        following = -slope * (node.height - slope * node.x) / square
        following = min(max(following, -limit), limit)
        nodes.append(search.node(following))
        if abs(following - node.x) <= 1e-6 * abs(following):
            break
    return nodes


def _logits_at(search: _Search, node: _Node) -> tuple[float, float]:
    other = node.other if node.height >= 0.0 else search.o + search.plane.along * node.x
    return (node.logit, other) if search.plane.first_is_chosen else (other, node.logit)
