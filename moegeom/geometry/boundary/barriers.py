"""What stands between a token and another choice: swaps, the fill of a mask, other groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int32

from moegeom.geometry.boundary.curved import nearest_wall, pair_wall, step_to_wall
from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.geometry.boundary.curved_wall import Wall
from moegeom.geometry.boundary.linear import NEVER
from moegeom.geometry.boundary.token_scores import NO_PAIR, Constraint, TokenScores

#: Stands for no limit, so that products with zero stay zero.
FAR = 1e200


@dataclass(frozen=True, eq=False)
class Token:
    """One token: its scores, the experts of kept groups, and who is chosen, in order."""

    z: Float64[np.ndarray, "experts"]
    scores: TokenScores
    chosen: Int32[np.ndarray, "k"]
    allowed: Bool[np.ndarray, "experts"]
    kept: Bool[np.ndarray, "groups"]

    @property
    def rows(self) -> CurvedRows:
        return self.scores.rows

    @property
    def members(self) -> Int32[np.ndarray, "some"]:
        """The chosen experts of kept groups."""
        return self.chosen[self.allowed[self.chosen]]

    @property
    def is_out(self) -> Bool[np.ndarray, "experts"]:
        """True for the experts that are not chosen."""
        out = np.ones(len(self.z), dtype=bool)
        out[self.chosen] = False
        return out


@dataclass(frozen=True, eq=False)
class Barrier:
    """Nothing changes through it nearer than ``lower``; something may at ``guess``.

    ``logits`` is how they change per unit of length on the way there.
    """

    lower: float
    guess: float
    logits: Float64[np.ndarray, "experts"]
    pair: tuple[int, int] = NO_PAIR


def swap_barriers(token: Token, radius: float) -> Iterator[Barrier]:
    """Swaps between the kept groups that may happen within ``radius``; the nearest, if exact."""
    rows, q, is_open = token.rows, token.scores.q, token.is_out & token.allowed
    if rows.curve is not None:
        found = nearest_wall(token.z, token.members, is_open, rows)
        wall = Wall(found.lower, found.upper, found.logits)
        if wall.lower < math.inf:
            yield _through_wall(token, found.pair, wall)
        return
    low, high = token.scores.within(radius)
    for i, j in itertools.product(token.members[::-1].tolist(), np.flatnonzero(is_open).tolist()):
        if low[i] > high[j]:
            continue
        if rows.bias[i] == rows.bias[j]:  # probabilities order as logits do
            inverse = float(rows.distances.inverse[i, j])
            distance = max(float(token.z[i] - token.z[j]), 0.0) * inverse
            if distance < NEVER:
                there = (rows.gram[:, j] - rows.gram[:, i]) * inverse
                yield Barrier(distance, distance, there, (i, j))
        else:
            constraint = Constraint((i, j), (1.0, -1.0), max(float(q[i] - q[j]), 0.0), (i, j))
            yield _through_constraint(token, constraint, radius)


def first_swap(token: Token) -> list[Barrier]:
    """The swap of the last chosen expert with the first that is not, whatever it takes."""
    is_open = token.is_out & token.allowed
    if len(token.members) == 0 or not is_open.any():
        return []
    q = token.scores.q
    i, j = int(token.members[-1]), int(np.argmax(np.where(is_open, q, -np.inf)))
    constraint = Constraint((i, j), (1.0, -1.0), max(float(q[i] - q[j]), 0.0), (i, j))
    return [_through_constraint(token, constraint, FAR)]


def fill_barriers(token: Token, radius: float) -> Iterator[Barrier]:
    """Scores that pass the value which masked experts have.

    A chosen expert leaves when it falls to the fill and some masked expert is out; one that is out
    enters when it rises to the fill and some masked expert is chosen.
    """
    rows, groups = token.rows, token.rows.groups
    if groups is None or not math.isfinite(groups.fill):
        return
    masked = ~token.allowed
    falling = token.members.tolist() if (masked & token.is_out).any() else []
    rising = np.flatnonzero(token.allowed & token.is_out).tolist()
    rising = rising if (masked & ~token.is_out).any() else []
    for expert, sign in [*((i, 1.0) for i in falling), *((j, -1.0) for j in rising)]:
        gap = max(sign * (float(token.scores.q[expert]) - groups.fill), 0.0)
        if rows.curve is None:
            yield _through_constraint(token, Constraint((expert,), (sign,), gap), radius)
            continue
        score = groups.fill - float(rows.bias[expert])
        there, _ = rows.curve.inverse(score, rows.curve.bends.high - score)
        way, length = sign * (float(token.z[expert]) - there), float(rows.length[expert])
        if gap == 0.0 or (way < math.inf and length > 0.0):
            distance = 0.0 if gap == 0.0 else max(way, 0.0) / length
            unit = -sign / length if length > 0.0 else 0.0
            yield Barrier(distance, distance, unit * rows.gram[:, expert])


def group_barriers(token: Token, radius: float) -> Iterator[Barrier]:
    """Changes of the kept groups that may happen within ``radius``.

    A dropped group h overtakes a kept group g only where one of its sets of experts overtakes the
    set that is now the best of g, because the score of g is at least that sum.
    """
    rows, groups, q = token.rows, token.rows.groups, token.scores.q
    if groups is None or token.kept.all():
        return
    size = len(q) // groups.num_groups
    takes = 2 if groups.score == "top2_sum" and size > 1 else 1
    low, high = (bound.reshape(groups.num_groups, size) for bound in token.scores.within(radius))
    local = np.array(list(itertools.combinations(range(size), takes)))
    for g, h in itertools.product(np.flatnonzero(token.kept), np.flatnonzero(~token.kept)):
        best = np.argsort(-q[g * size : (g + 1) * size], kind="stable")[:takes]
        rivals = high[h][local].sum(axis=1)
        if np.sort(low[g])[-takes:].sum() > rivals.max():
            continue
        top = (g * size + best).tolist()
        for others in (h * size + local[rivals >= low[g][best].sum()]).tolist():
            gap = max(float(q[top].sum() - q[others].sum()), 0.0)
            if takes == 1 and rows.curve is not None:
                wall = pair_wall(rows.curve, token.z, top[0], others[0], rows, radius)
                yield _through_wall(token, (top[0], others[0]), wall, NO_PAIR)
                continue
            signs = (1.0,) * takes + (-1.0,) * takes
            found = _through_constraint(token, Constraint((*top, *others), signs, gap), radius)
            best_of_h = np.sort(q[h * size : (h + 1) * size])[-takes:].sum()
            always = max(float(q[top].sum() - best_of_h), 0.0)
            slope = float(rows.group_slopes[g, h])
            lower = max(found.lower, always / slope if slope > 0.0 else math.inf)
            yield Barrier(lower, found.guess, found.logits)


def rays(token: Token) -> Iterator[Float64[np.ndarray, "experts"]]:
    """Ways on which the set may change, per unit of length, whatever the bounds say of them.

    The last chosen expert against each that is out, each chosen one against the first that is out,
    and the best of each kept group against the best of each dropped one: each way down the
    difference of the scores, and of the logits.
    """
    q, out = token.scores.q, np.flatnonzero(token.is_out).tolist()
    if not out:
        return
    last, first = int(token.chosen[-1]), max(out, key=lambda j: (q[j], -j))
    against = [((last,), (j,)) for j in out] + [((i,), (first,)) for i in token.chosen.tolist()]
    groups = token.rows.groups
    if groups is not None:
        size = len(q) // groups.num_groups
        takes = 2 if groups.score == "top2_sum" and size > 1 else 1
        best = [
            tuple((g * size + np.argsort(-scores, kind="stable")[:takes]).tolist())
            for g, scores in enumerate(q.reshape(-1, size))
        ]
        kept, dropped = np.flatnonzero(token.kept), np.flatnonzero(~token.kept)
        against += [(best[g], best[h]) for g in kept for h in dropped]
    for ours, theirs in against:
        signs = (1.0,) * len(ours) + (-1.0,) * len(theirs)
        constraint = Constraint((*ours, *theirs), signs, 0.0)
        for of_logits in (False, True):
            yield token.scores.direction(constraint, of_logits).logits


def _through_constraint(token: Token, constraint: Constraint, radius: float) -> Barrier:
    way = token.scores.direction(constraint)
    lower = token.scores.reach_of(constraint, way.slope, radius)
    guess = constraint.gap / way.slope if way.slope > 0.0 else math.inf
    return Barrier(lower, guess, way.logits, constraint.pair)


def _through_wall(
    token: Token, pair: tuple[int, int], wall: Wall, swapped: tuple[int, int] | None = None
) -> Barrier:
    """The way to the nearest point of a wall, from the logits of the pair there."""
    swapped = pair if swapped is None else swapped
    if not 0.0 < wall.upper < math.inf:
        return Barrier(wall.lower, wall.upper, np.zeros(len(token.z)), swapped)
    step = step_to_wall(token.z, pair, wall.logits, token.rows)
    return Barrier(wall.lower, wall.upper, step / wall.upper, swapped)
