"""The nearest input where several experts tie at the border of the chosen set."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64
from moegeom.geometry.boundary.linear import squared_row_distances

# ------------------------------------------------------------------------------------------- search
Experts = tuple[int, ...]

#: Bounds that differ by less, relatively, count as one.
_SAME = 1e-9

#: What is left to be looked at: bound, tied experts, and others that must be above and below.
_Node = tuple[float, Experts, Experts, Experts]


@dataclass(frozen=True)
class OrderDistance:
    """``lower <= distance <= upper``; ``tied`` are experts that tie at a point at ``upper``.

    inf and no experts where there is no such tie, or none was seen.
    """

    lower: float
    upper: float
    tied: Experts

    @property
    def is_exact(self) -> bool:
        """True when the search came to its end: the bracket is one number."""
        return self.lower == self.upper


@dataclass(frozen=True, eq=False)
class NearestOrder:
    """A point with given ties: its logits, its distance, and what no such point is nearer than."""

    bound: float
    distance: float
    logits: Float64[np.ndarray, "experts"]


@dataclass(frozen=True, eq=False)
class Flat:
    """The nearest point where some experts tie, wherever the others are.

    ``costs`` is, for each expert, a lower bound on the distance to where it ties with them as well.
    """

    nearest: NearestOrder
    costs: Float64[np.ndarray, "experts"]


@dataclass(frozen=True)
class _Step:
    """What one node leads to: nodes, points of the set, and a bound that nothing can improve."""

    children: tuple[_Node, ...] = ()
    seen: tuple[tuple[float, Experts], ...] = ()
    stuck: float = np.inf


def search_ties(
    metric: _Euclidean,
    logits: Float64[np.ndarray, "experts"],
    k: int,
    order: int,
    most_nodes: int,
    threshold: float | None = None,
) -> OrderDistance:
    r"""Distance to the closed set of order n = ``order``, by best-first branch and bound.

    The set is the union over n + 1 tied experts J and sets A of :math:`k - n \le |A| \le k - 1`
    others of the points with :math:`z_A \ge c \ge z_{rest}`, c the logit of J. Sets J are grown
    expert by expert, which only takes them farther away; with J complete, experts are set above or
    below c until the nearest point is one of the set. After ``most_nodes`` steps the bracket stays
    open: ``lower`` is the least bound that is left, ``upper`` the nearest point seen. With a
    ``threshold`` it stays open as soon as both ends are on one side of it, or one is there.
    inf for k = E and for an order that is not in 1 to E - 1.
    """
    if k >= len(logits) or not 1 <= order < len(logits):
        return OrderDistance(np.inf, np.inf, ())
    search = _Search(metric, k, order)
    near = -np.inf if threshold is None else threshold
    best = min(search.windows(logits, near), default=(np.inf, ()))
    num_first = len(logits) - order
    if most_nodes < num_first or best[0] <= near:
        return OrderDistance(0.0, best[0], tuple(sorted(best[1])))
    beyond = np.inf if threshold is None else float(np.nextafter(threshold, np.inf))
    limit = min(best[0], beyond)
    queue = search.pairs(logits, limit)
    heapify(queue)
    stuck = beyond
    for _ in range(most_nodes - num_first):
        if best[0] <= near or not queue or queue[0][0] >= (1.0 - _SAME) * limit:
            break
        node = heappop(queue)
        is_whole = len(node[1]) > order
        step = search.settled(node) if is_whole else search.grown(node, limit)
        best = min([best, *step.seen])
        limit = min(best[0], beyond)
        stuck = min(stuck, step.stuck)
        for child in step.children:
            if child[0] < limit:
                heappush(queue, child)
    lower = min(stuck, queue[0][0] if queue else np.inf)
    upper, tied = best
    is_closed = lower >= (1.0 - _SAME) * upper
    return OrderDistance(upper if is_closed else lower, upper, tuple(sorted(tied)))


@dataclass(frozen=True)
class _Search:
    metric: _Euclidean
    k: int
    order: int

    def windows(
        self, logits: Float64[np.ndarray, "experts"], near: float
    ) -> list[tuple[float, Experts]]:
        """Points where neighbours in rank tie and all others stay on their side: first guesses, up
        to one that is ``near``.
        """
        ranked = np.argsort(-logits, kind="stable").tolist()
        points = []
        for start in range(max(self.k - self.order, 0), self.k):
            end = start + self.order + 1
            if end <= len(ranked) and not (points and min(points)[0] <= near):
                guess = tuple(ranked[start:end]), tuple(ranked[:start]), tuple(ranked[end:])
                points += self._seen(*guess)
        return points

    def pairs(self, logits: Float64[np.ndarray, "experts"], limit: float) -> list[_Node]:
        """What every single expert grows to, as in :meth:`grown`, all at once."""
        experts, costs = len(logits), self.metric.pair_costs
        excess = logits - logits[:, None]
        np.fill_diagonal(excess, 0.0)
        least = np.zeros(experts)
        is_done = np.zeros(experts, dtype=bool)
        sides = excess > self.metric.slack, excess < -self.metric.slack
        for side, most in zip(sides, self._most(experts), strict=True):
            leaving = side.sum(axis=1) - most
            rows = np.flatnonzero((leaving > 0) & ~is_done)
            ordered = np.sort(np.where(side[rows], costs[rows], np.inf), axis=1)
            least[rows] = ordered[np.arange(len(rows)), leaving[rows] - 1]
            is_done[rows] = True
        costs = np.maximum(costs, least[:, None])
        number = np.arange(experts)
        is_later = (number > number[:, None]) & (number < experts - self.order + 1)
        pairs = np.argwhere(is_later & (costs < limit)).tolist()
        return [(float(costs[i, j]), (i, j), (), ()) for i, j in pairs]

    def grown(self, node: _Node, limit: float) -> _Step:
        """One more tied expert, of a higher number, so that each set is made once.

        Only those that a bound below ``limit`` leaves.
        """
        bound, tied, _, _ = node
        flat = self.metric.flat(tied)
        costs = np.maximum(flat.costs, max(bound, self._crossing(flat, tied)))
        first, last = tied[-1] + 1, len(costs) - (self.order - len(tied))
        near = np.flatnonzero(costs[first:last] < limit) + first
        candidates = zip(costs[near].tolist(), near.tolist(), strict=True)
        return _Step(tuple((cost, (*tied, j), (), ()) for cost, j in candidates))

    def settled(self, node: _Node) -> _Step:
        """One more expert on a side, unless the nearest point is of the set already."""
        bound, tied, above, below = node
        flat = self.metric.flat(tied)
        is_first = not above and not below
        nearest = flat.nearest if is_first else self.metric.nearest(tied, above, below)
        bound = max(bound, nearest.bound, self._crossing(flat, tied))
        if bound == np.inf:
            return _Step()
        if self._holds(nearest.logits, tied):
            return _Step(seen=((nearest.distance, tied),), stuck=bound)
        undecided, _ = self._wrong_side(nearest.logits, tied)
        undecided[[*above, *below]] = False
        if not undecided.any():
            return _Step(stuck=bound)
        pick = int(np.argmin(np.where(undecided, flat.costs, np.inf)))
        num_above, num_below = self._most(len(undecided))
        children = []
        if len(above) < num_above:
            children.append((bound, tied, (*above, pick), below))
        if len(below) < num_below:
            children.append((bound, tied, above, (*below, pick)))
        return _Step(tuple(children), self._guess(flat, tied) if is_first else ())

    def _most(self, experts: int) -> tuple[int, int]:
        """How many experts may be above the tied ones, and how many below."""
        others = experts - self.order - 1
        return min(self.k - 1, others), min(experts - 1 - self.k, others)

    def _sides(
        self, logits: Float64[np.ndarray, "experts"], tied: Experts
    ) -> tuple[Bool[np.ndarray, "experts"], Bool[np.ndarray, "experts"]]:
        """Experts that are above the tied ones, and below, by more than the slack."""
        excess = logits - logits[tied[0]]
        excess[list(tied)] = 0.0
        return excess > self.metric.slack, excess < -self.metric.slack

    def _wrong_side(
        self, logits: Float64[np.ndarray, "experts"], tied: Experts
    ) -> tuple[Bool[np.ndarray, "experts"], int]:
        """Experts of the side that holds too many, and how many too many."""
        sides = self._sides(logits, tied)
        for side, most in zip(sides, self._most(len(logits)), strict=True):
            if side.sum() > most:
                return side, int(side.sum()) - most
        return np.zeros(len(logits), dtype=bool), 0

    def _holds(self, logits: Float64[np.ndarray, "experts"], tied: Experts) -> bool:
        is_tie = bool(np.ptp(logits[list(tied)]) <= self.metric.slack)
        return is_tie and self._wrong_side(logits, tied)[1] == 0

    def _crossing(self, flat: Flat, tied: Experts) -> float:
        """What it costs at least that enough experts leave the side that holds too many.

        An expert that leaves joins the tied ones or crosses, and as distance is convex it must come
        as far as its tie in either case.
        """
        wrong, num_leaving = self._wrong_side(flat.nearest.logits, tied)
        return float(np.sort(flat.costs[wrong])[num_leaving - 1]) if num_leaving else 0.0

    def _guess(self, flat: Flat, tied: Experts) -> tuple[tuple[float, Experts], ...]:
        """The point where the cheapest experts cross and all others stay on their side."""
        logits = flat.nearest.logits
        wrong, num_crossing = self._wrong_side(logits, tied)
        is_above, _ = self._sides(logits, tied)
        crossing = np.argsort(np.where(wrong, flat.costs, np.inf), kind="stable")[:num_crossing]
        is_above[crossing] = ~is_above[crossing]
        others = np.setdiff1d(np.arange(len(logits)), tied)
        above = tuple(others[is_above[others]].tolist())
        below = tuple(others[~is_above[others]].tolist())
        return self._seen(tied, above, below)

    def _seen(
        self, tied: Experts, above: Experts, below: Experts
    ) -> tuple[tuple[float, Experts], ...]:
        nearest = self.metric.nearest(tied, above, below)
        is_seen = nearest.bound < np.inf and self._holds(nearest.logits, tied)
        return ((nearest.distance, tied),) if is_seen else ()


# ---------------------------------------------------------------------------------------- distance
#: Length of what is left of a row difference, relative to the rows, that counts as nothing.
_DEPENDENT = 1e-10

#: Difference of logits, relative to their range, that counts as a tie.
_TIE = 1e-10


def row_coordinates(
    weight: Float[np.ndarray, "experts hidden"],
) -> Float64[np.ndarray, "experts dims"]:
    """Router rows, less their mean, in an orthonormal basis of a space that holds them.

    At most as many dimensions as experts. Distances between rows are kept up to rounding, and with
    them every distance below; work it out once for a layer.
    """
    rows = weight.astype(np.float64)
    _, triangle = np.linalg.qr((rows - rows.mean(axis=0)).T)
    return triangle.T


def order_distance(
    logits: Float64[np.ndarray, "experts"],
    rows: Float64[np.ndarray, "experts dims"],
    k: int,
    order: int,
    most_nodes: int = 20_000,
    apart: Float64[np.ndarray, "experts experts"] | None = None,
    threshold: float | None = None,
) -> OrderDistance:
    r"""Euclidean distance of one input to the closed set of order n = ``order``, as a bracket.

    An input is of the set when n + 1 experts have the logit of the border between chosen and not
    chosen; for n = 1 it is the boundary. In units of the router input; not decreasing in n; inf for
    k = E, for n >= E, and where rows allow no such tie. ``lower`` is at least the least distance of
    a flat (all of n + 1 experts tie, wherever the others are) and certified even when the search
    ends after ``most_nodes`` steps. Relative error 1e-8, for affine rules. ``rows`` are the router
    rows, or their :func:`row_coordinates`; ``apart`` are the distances between them
    (:func:`rows_apart`), to be worked out once for many tokens. Where it only matters on which side
    of a ``threshold`` the distance is, the search ends when that is known.

    Source: docs/theory.md A4. Oracle in tests: SLSQP over every flat and every split of the others.
    """
    if k < len(logits) and 1 <= order < len(logits):
        # as many tie where the input is: known before any search, which equal rows never end
        are_equal = not np.ptp(rows, axis=0).any()
        border, below = np.sort(logits)[[-k, -k - 1]]
        # a product may round equal rows apart, by where they stand in it
        same = _ROUNDED_APART * float(np.abs(logits).max()) if are_equal else 0.0
        tied = np.flatnonzero(np.abs(logits - border) <= same)
        if border - below <= same and len(tied) > order:
            return OrderDistance(0.0, 0.0, tuple(tied[: order + 1].tolist()))
        if are_equal:
            return OrderDistance(np.inf, np.inf, ())
    metric = _Euclidean.at(logits, rows, apart)
    return search_ties(metric, logits, k, order, most_nodes, threshold)


#: Relative difference of float32 products of equal rows at most, in any order of summation.
_ROUNDED_APART = 2.0**-18


def rows_apart(rows: Float64[np.ndarray, "experts dims"]) -> Float64[np.ndarray, "experts experts"]:
    """Euclidean distances between rows."""
    return np.sqrt(squared_row_distances(rows))


@dataclass(frozen=True, eq=False)
class _Along:
    """The nearest point of a flat: logits there, and what is left of the rows along the flat."""

    distance: float
    logits: Float64[np.ndarray, "experts"]
    rows: Float64[np.ndarray, "experts dims"]


@dataclass(frozen=True, eq=False)
class _Euclidean:
    """Distances from one input; logits within ``slack`` count as equal."""

    logits: Float64[np.ndarray, "experts"]
    rows: Float64[np.ndarray, "experts dims"]
    apart: Float64[np.ndarray, "experts experts"] | None
    slack: float
    shortest: float

    @classmethod
    def at(
        cls,
        logits: Float64[np.ndarray, "experts"],
        rows: Float64[np.ndarray, "experts dims"],
        apart: Float64[np.ndarray, "experts experts"] | None = None,
    ) -> _Euclidean:
        longest = float(np.sqrt((rows**2).sum(axis=1).max(initial=0.0)))
        slack = _TIE * float(np.ptp(logits)) if len(logits) else 0.0
        return cls(logits, rows, apart, slack, _DEPENDENT * longest)

    @cached_property
    def lengths(self) -> Float64[np.ndarray, "experts experts"]:
        """Distances between rows, nearly equal ones at 0: the search begins with every pair."""
        lengths = rows_apart(self.rows) if self.apart is None else self.apart
        return np.where(lengths <= self.shortest, 0.0, lengths)

    @property
    def pair_costs(self) -> Float64[np.ndarray, "experts experts"]:
        """The ``costs`` of every single expert, of which each flat is the input itself."""
        return self._steps(np.abs(self.logits - self.logits[:, None]), self.lengths)

    def flat(self, tied: Experts) -> Flat:
        """Where ``tied``, two experts or more, have one logit; bound and costs inf if nowhere."""
        flat = self._along(tied)
        if flat is None:
            nowhere = NearestOrder(np.inf, np.inf, self.logits)
            return Flat(nowhere, np.full(len(self.logits), np.inf))
        normals, gaps = self._differences(flat, tied[0])
        steps = self._steps(np.abs(gaps), np.sqrt((normals**2).sum(axis=1)))
        nearest = NearestOrder(flat.distance, flat.distance, flat.logits)
        return Flat(nearest, np.hypot(flat.distance, steps))

    def nearest(self, tied: Experts, above: Experts, below: Experts) -> NearestOrder:
        """As the flat, but with ``above`` not below the tied experts, nor ``below`` above them."""
        flat = self._along(tied)
        if flat is None:
            return NearestOrder(np.inf, np.inf, self.logits)
        normals, gaps = self._differences(flat, tied[0])
        others = [*above, *below]
        sign = np.repeat([1.0, -1.0], [len(above), len(below)])
        least = least_distance(sign[:, None] * normals[others], -sign * gaps[others], self.slack)
        return NearestOrder(
            float(np.hypot(flat.distance, least.bound)),
            float(np.hypot(flat.distance, np.linalg.norm(least.point))),
            flat.logits + flat.rows @ least.point,
        )

    def _steps(
        self, gaps: Float64[np.ndarray, "*some"], lengths: Float64[np.ndarray, "*some"]
    ) -> Float64[np.ndarray, "*some"]:
        """How far it is until each gap is closed; inf where no step along the flat closes it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(gaps <= self.slack, 0.0, gaps / lengths)

    def _differences(
        self, flat: _Along, reference: int
    ) -> tuple[Float64[np.ndarray, "experts dims"], Float64[np.ndarray, "experts"]]:
        """Rows and logits less those of a tied expert; what is nearly 0 along the flat is 0."""
        normals = flat.rows - flat.rows[reference]
        normals[(normals**2).sum(axis=1) <= self.shortest**2] = 0.0
        return normals, flat.logits - flat.logits[reference]

    def _along(self, tied: Experts) -> _Along | None:
        """Expert after expert, each by the part of its row that is new; None when there is none."""
        flat = _Along(0.0, self.logits, self.rows)
        for expert in tied[1:]:
            normals, gaps = self._differences(flat, tied[0])
            normal, gap = normals[expert], float(gaps[expert])
            length = float(np.sqrt(normal @ normal))
            if length == 0.0:
                if abs(gap) > self.slack:
                    return None
                continue
            unit, step = normal / length, gap / length
            along = flat.rows @ unit
            flat = _Along(
                float(np.hypot(flat.distance, step)),
                flat.logits - step * along,
                flat.rows - along[:, None] * unit,
            )
        return flat


#: Residual of the dual problem that counts as 0: no vector meets the inequalities.
_NOTHING_LEFT = 1e-10

_EPSILON = float(np.finfo(np.float64).eps)

_MOST_ROUNDS = 50


@dataclass(frozen=True, eq=False)
class LeastDistance:
    """``point`` meets the inequalities up to rounding, and nothing shorter than ``bound`` does.

    The bound comes from the dual problem, so it holds however exact the point is; it is the length
    of the point up to rounding, or inf (and the point 0) when no vector meets the inequalities.
    """

    point: Float64[np.ndarray, "dims"]
    bound: float


def least_distance(
    normals: Float64[np.ndarray, "constraints dims"],
    offsets: Float64[np.ndarray, "constraints"],
    slack: float,
) -> LeastDistance:
    r"""The x of least :math:`|x|` with :math:`a_c \cdot x \ge o_c` for each constraint c.

    Least distance programming: the nonnegative least-squares problem
    :math:`\min_{v \ge 0} |A^T v|^2 + (o \cdot v - 1)^2` has the residual (r, s) with x = r / s, and
    any :math:`v \ge 0` proves :math:`|x| \ge o \cdot v / |A^T v|`. A normal of zeros asks for
    nothing, or for the impossible when its offset is above ``slack``. When the solver gives up,
    the point is 0 and the bound 0: true, and useless.
    Source: Lawson and Hanson, Solving Least Squares Problems, chapter 23; docs/theory.md A4.
    Oracle in tests: scipy's SLSQP.
    """
    from scipy.optimize import nnls

    origin = np.zeros(normals.shape[1])
    lengths = np.sqrt(np.einsum("cd,cd->c", normals, normals))
    if (offsets[lengths == 0.0] > slack).any():
        return LeastDistance(origin, np.inf)
    binding = lengths > 0.0
    heights = offsets[binding] / lengths[binding]
    farthest = heights.max(initial=0.0)
    if farthest <= 0.0:
        return LeastDistance(origin, 0.0)
    # the farthest single constraint is at distance 1, so that the residual is well scaled
    system = np.vstack([(normals[binding] / lengths[binding, None]).T, heights / farthest])
    target = np.zeros(len(system))
    target[-1] = 1.0
    try:
        dual, residual = nnls(system, target, maxiter=_MOST_ROUNDS * system.shape[1])
    except RuntimeError:
        return LeastDistance(origin, 0.0)
    # what rounding alone leaves where large terms of the dual cancel
    rounding = _EPSILON * system.shape[1] * np.linalg.norm(np.abs(system) @ dual)
    if residual < max(_NOTHING_LEFT, rounding):
        return LeastDistance(origin, np.inf)
    product = system @ dual
    left = target - product
    bound = product[-1] / np.linalg.norm(product[:-1])
    # at the optimum left is at right angles to product: left[-1] = |left|^2, which does not cancel
    return LeastDistance(-left[:-1] / (left @ left) * farthest, float(bound) * farthest)
