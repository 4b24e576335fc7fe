"""Bounds of the distance to another choice, for group-limited rules and for softmax with a bias.

Every change passes a :class:`~moegeom.geometry.boundary.barriers.Barrier`, so that the least of
their lower bounds is one for the distance; the upper bound is a step after which the rule chose
another set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.geometry.boundary.barriers import (
    FAR,
    Barrier,
    Token,
    fill_barriers,
    first_swap,
    group_barriers,
    rays,
    swap_barriers,
)
from moegeom.geometry.boundary.curved import CurvedBoundary
from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.geometry.boundary.first_change import (
    CLOSE,
    LEAP,
    MAX_LEAPS,
    RESOLUTION,
    SHORTEST,
    first_change,
    is_changed,
    shorter_change,
)
from moegeom.geometry.boundary.token_scores import NO_PAIR, token_scores
from moegeom.geometry.selection.mask import group_scores, kept_groups


@dataclass(frozen=True, eq=False)
class Change:
    """A step after which the rule chose another set: its length, and what it adds to logits."""

    length: float
    step: Float64[np.ndarray, "experts"]


@dataclass(frozen=True, eq=False)
class Bracket:
    """Nothing changes nearer than ``lower``, and something does after ``change``."""

    lower: float
    change: Change
    pair: tuple[int, int]


def grouped_boundary(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: CurvedRows,
) -> CurvedBoundary:
    r"""Bounds of the distance from each router input to the nearest one with another chosen set.

    For scores of one logit in groups, :math:`\min(d_A, d_B)` with d_A the exact distance to a swap
    between the kept groups (or to where a score passes the fill of the mask), and d_B a bound of
    that to another set of kept groups: with :math:`T_g - T_h \le C(y) = \sum_{top\,g} q - \sum_p q`
    falling by at most :math:`n r + H r^2 / 2` (n = slope of C, H = bound of its bend), and by at
    most ``group_slopes`` times r. For softmax, pairs are bounded in the same way, and by half of
    the widest row distance; experts with equal biases by the exact distance of their logits.

    ``upper`` is the length of a step after which the rule itself chose another set: a line search
    along the steepest descent of what seems nearest, and where that leaves more than 5 % to the
    lower bound along each of a number of rays; inf if nothing changes on any of them. Group swaps
    need not change the set, so that ``lower`` may be far below the distance. In units of the
    router input. 0 and 0 where the set is not what the rule makes of these logits: a tie up to
    rounding. The pair is known where everything else is farther than ``upper``.

    Source: docs/theory.md E1b, E2. Oracle in tests: SLSQP, and random steps within ``lower``.
    """
    found = [
        _bracket(z, members, rows)
        for z, members in zip(logits.astype(np.float64) * rows.multiplier, chosen, strict=True)
    ]
    return CurvedBoundary(
        np.array([bracket.lower for bracket in found]),
        np.array([bracket.change.length for bracket in found]),
        np.array([bracket.pair for bracket in found], dtype=np.int32).reshape(-1, 2),
        np.array([bracket.change.step for bracket in found]).reshape(logits.shape),
    )


def _bracket(
    z: Float64[np.ndarray, "experts"], chosen: Int32[np.ndarray, "k"], rows: CurvedRows
) -> Bracket:
    change = Change(math.inf, np.full(len(z), np.nan))
    if is_changed(z, chosen, rows):
        return Bracket(0.0, Change(0.0, np.zeros(len(z))), NO_PAIR)
    token = _token(z, chosen, rows)
    if rows.curve is None:
        change = _nearer_change(token, first_swap(token), change)
    radius = min(change.length, FAR)
    barriers = [*swap_barriers(token, radius), *fill_barriers(token, radius)]
    change = _nearer_change(token, barriers, change)
    radius = min([FAR, change.length, *(barrier.lower for barrier in barriers)])
    groups = list(group_barriers(token, radius))
    change = _nearer_change(token, groups, change)
    barriers += groups
    lower = min([change.length, *(barrier.lower for barrier in barriers)])
    if change.length > CLOSE * lower:
        change = _on_rays(token, lower, change)
    lower = min([change.length, *(barrier.lower for barrier in barriers)])
    near = [barrier.pair for barrier in barriers if barrier.lower < change.length]
    is_known = change.length < math.inf and len(near) == 1
    return Bracket(lower, change, near[0] if is_known else NO_PAIR)


def _token(
    z: Float64[np.ndarray, "experts"], chosen: Int32[np.ndarray, "k"], rows: CurvedRows
) -> Token:
    scores = token_scores(z, rows)
    groups = rows.groups
    kept = np.ones(1, dtype=bool)
    if groups is not None:
        kept = kept_groups(group_scores(scores.q[None], groups), groups.num_kept)[0]
    return Token(z, scores, chosen, np.repeat(kept, len(z) // len(kept)), kept)


def _on_rays(token: Token, low: float, change: Change) -> Change:
    """The nearest of ``change`` and what changes on rays, at lengths that grow until one does."""
    length = max(low, SHORTEST)
    for _ in range(MAX_LEAPS):
        for logits in rays(token):
            trial = length if math.isinf(change.length) else change.length * (1.0 - RESOLUTION)
            found = shorter_change(
                lambda step, way=logits: is_changed(token.z + step * way, token.chosen, token.rows),
                low,
                trial,
            )
            if found < change.length:
                change = Change(found, found * logits)
        if change.length < math.inf or length > FAR:
            return change
        length *= LEAP
    return change


def _nearer_change(token: Token, barriers: Sequence[Barrier], change: Change) -> Change:
    """A verified change through the barrier that seems nearest, if nearer than ``change``."""
    near = [barrier for barrier in barriers if barrier.guess < change.length]
    if not near:
        return change
    nearest = min(near, key=lambda barrier: barrier.guess)
    if nearest.guess == 0.0 and not nearest.logits.any():
        return Change(0.0, np.zeros(len(token.z)))
    length = first_change(
        lambda length: is_changed(token.z + length * nearest.logits, token.chosen, token.rows),
        nearest.lower,
        nearest.guess,
        change.length,
    )
    return Change(length, length * nearest.logits) if length < change.length else change
