"""The nearest input where n + 1 experts tie at the border of the chosen set: a bracket."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64

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


class RowMetric(Protocol):
    """A way to measure distance from one input; logits within ``slack`` count as equal."""

    @property
    def slack(self) -> float: ...

    def flat(self, tied: Experts) -> Flat:
        """Where ``tied``, one expert or more, have one logit; bound and costs inf if nowhere."""
        ...

    def nearest(self, tied: Experts, above: Experts, below: Experts) -> NearestOrder:
        """As the flat, but with ``above`` not below the tied experts, nor ``below`` above them."""
        ...


@dataclass(frozen=True)
class _Step:
    """What one node leads to: nodes, points of the set, and a bound that nothing can improve."""

    children: tuple[_Node, ...] = ()
    seen: tuple[tuple[float, Experts], ...] = ()
    stuck: float = np.inf


def search_ties(
    metric: RowMetric,
    logits: Float64[np.ndarray, "experts"],
    k: int,
    order: int,
    most_nodes: int,
) -> OrderDistance:
    r"""Distance to the closed set of order n = ``order``, by best-first branch and bound.

    The set is the union over n + 1 tied experts J and sets A of :math:`k - n \le |A| \le k - 1`
    others of the points with :math:`z_A \ge c \ge z_{rest}`, c the logit of J. Sets J are grown
    expert by expert, which only takes them farther away; with J complete, experts are set above or
    below c until the nearest point is one of the set. After ``most_nodes`` steps the bracket stays
    open: ``lower`` is the least bound that is left, ``upper`` the nearest point seen.
    inf for k = E and for an order that is not in 1 to E - 1.
    """
    if k >= len(logits) or not 1 <= order < len(logits):
        return OrderDistance(np.inf, np.inf, ())
    search = _Search(metric, k, order)
    best = min(search.windows(logits), default=(np.inf, ()))
    queue: list[_Node] = [(0.0, (expert,), (), ()) for expert in range(len(logits) - order)]
    stuck = np.inf
    for _ in range(most_nodes):
        if not queue or queue[0][0] >= (1.0 - _SAME) * best[0]:
            break
        node = heappop(queue)
        is_whole = len(node[1]) > order
        step = search.settled(node) if is_whole else search.grown(node, best[0])
        best = min([best, *step.seen])
        stuck = min(stuck, step.stuck)
        for child in step.children:
            if child[0] < best[0]:
                heappush(queue, child)
    lower = min(stuck, queue[0][0] if queue else np.inf)
    upper, tied = best
    is_closed = lower >= (1.0 - _SAME) * upper
    return OrderDistance(upper if is_closed else lower, upper, tuple(sorted(tied)))


@dataclass(frozen=True)
class _Search:
    metric: RowMetric
    k: int
    order: int

    def windows(self, logits: Float64[np.ndarray, "experts"]) -> list[tuple[float, Experts]]:
        """Points where neighbours in rank tie and all others stay on their side: first guesses."""
        ranked = np.argsort(-logits, kind="stable").tolist()
        found = []
        for start in range(max(self.k - self.order, 0), self.k):
            end = start + self.order + 1
            if end <= len(ranked):
                guess = tuple(ranked[start:end]), tuple(ranked[:start]), tuple(ranked[end:])
                found += self._seen(*guess)
        return found

    def grown(self, node: _Node, limit: float) -> _Step:
        """One more tied expert, of a higher number, so that each set is made once.

        Only those that a bound below ``limit`` leaves.
        """
        bound, tied, _, _ = node
        flat = self.metric.flat(tied)
        costs = np.maximum(flat.costs, max(bound, self._crossing(flat, tied)))
        first, last = tied[-1] + 1, len(costs) - (self.order - len(tied))
        near = np.flatnonzero(costs[first:last] < limit) + first
        kept = zip(costs[near].tolist(), near.tolist(), strict=True)
        return _Step(tuple((cost, (*tied, j), (), ()) for cost, j in kept))

    def settled(self, node: _Node) -> _Step:
        """One more expert on a side, unless the nearest point is of the set already."""
        bound, tied, above, below = node
        flat = self.metric.flat(tied)
        is_first = not above and not below
        found = flat.nearest if is_first else self.metric.nearest(tied, above, below)
        bound = max(bound, found.bound, self._crossing(flat, tied))
        if bound == np.inf:
            return _Step()
        if self._holds(found.logits, tied):
            return _Step(seen=((found.distance, tied),), stuck=bound)
        undecided, _ = self._wrong_side(found.logits, tied)
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
        excess = logits - logits[list(tied)].mean()
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
        found = self.metric.nearest(tied, above, below)
        is_seen = found.bound < np.inf and self._holds(found.logits, tied)
        return ((found.distance, tied),) if is_seen else ()
