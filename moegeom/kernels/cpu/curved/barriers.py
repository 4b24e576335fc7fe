"""What stands between a token and another choice, compiled.

Barriers are not kept: the two least of their bounds are, and the way through the nearest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.geometry.boundary.linear import NEVER
from moegeom.kernels.cpu._inner import INNER
from moegeom.kernels.cpu.curved.first_change import best_sum
from moegeom.kernels.cpu.curved.score_curve import curve_inverse
from moegeom.kernels.cpu.curved.token_scores import bound_scores, reach_of, steepest_descent
from moegeom.kernels.cpu.curved.walls import nearest_wall, pair_wall

#: Stands for no limit, so that products with zero stay zero.
FAR = 1e200
#: Numbers of a type of their own would be compiled apart: these are typed like all others.
_NOBODY, _ONE, _TWO = np.int64(-1), np.int64(1), np.int64(2)


class Tally(NamedTuple):
    """The barriers so far, and the one that is looked at.

    ``bounds`` are the least and the second of their bounds, and the least guess of where something
    changes; ``pair`` is that of the least bound, ``nearest`` and ``way`` the experts and
    coefficients of the least guess.
    """

    bounds: np.ndarray
    low_of_nearest: np.ndarray
    pair: np.ndarray
    nearest: np.ndarray
    way: np.ndarray
    experts: np.ndarray
    signs: np.ndarray
    coefficients: np.ndarray


def empty_tally() -> Tally:
    """Room for the barriers of one token."""
    return Tally(
        np.empty(3),
        np.empty(1),
        np.empty(2, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        np.zeros(5),
        np.zeros(4, dtype=np.int64),
        np.zeros(4),
        np.zeros(5),
    )


@njit(**INNER)
def _clear(tally):
    for n in range(5):
        tally.coefficients[n] = 0.0


@njit(**INNER)
def clear_tally(tally):
    """No barrier yet."""
    for n in range(3):
        tally.bounds[n] = math.inf
    tally.pair[0] = -1
    tally.pair[1] = -1
    for n in range(4):
        tally.experts[n] = 0
    _clear(tally)


@njit(**INNER)
def forget_nearest(tally):
    """Begin to look for the nearest again; bounds stay."""
    tally.bounds[2] = math.inf


@njit(**INNER)
def _add(tally, lower, guess, out, entering):
    bounds = tally.bounds
    if lower < bounds[0]:
        bounds[1] = bounds[0]
        bounds[0] = lower
        tally.pair[0] = out
        tally.pair[1] = entering
    elif lower < bounds[1]:
        bounds[1] = lower
    if guess < bounds[2]:
        bounds[2] = guess
        tally.low_of_nearest[0] = lower
        for n in range(4):
            tally.nearest[n] = tally.experts[n]
            tally.way[n] = tally.coefficients[n]
        tally.way[4] = tally.coefficients[4]


@njit(**INNER)
def _add_constraint(
    walls, groups, work, scratch, square, tally, number, gap, always, out, entering, radius
):
    _clear(tally)
    coefficients = tally.coefficients
    experts, signs = tally.experts, tally.signs
    slope = steepest_descent(
        walls, groups, work, scratch, square, experts, signs, number, coefficients, False
    )
    lower = reach_of(walls, groups, scratch, square, experts, signs, number, gap, slope, radius)
    _add(tally, max(lower, always), gap / slope if slope > 0.0 else math.inf, out, entering)


@njit(**INNER)
def _add_wall(walls, work, tally, i, j, lower, upper, at_i, at_j, out, entering):
    _clear(tally)
    coefficients = tally.coefficients
    tally.experts[0] = i
    tally.experts[1] = j
    if 0.0 < upper < math.inf:
        du = at_i - work.z[i]
        dv = at_j - work.z[j]
        length = walls.length[i]
        across = walls.across[i, j]
        if length == 0.0:
            coefficients[1] = dv / walls.gram[j, j] / upper
        else:
            along = walls.gram[i, j] / length
            x = du / length
            of_j = (dv - along * x) / (across * across) if across > 0.0 else 0.0
            coefficients[0] = (x - along * of_j) / length / upper
            coefficients[1] = of_j / upper
    _add(tally, lower, upper, out, entering)


@njit(**INNER)
def _add_swap(walls, groups, work, scratch, square, tally, i, j, radius):
    tally.experts[0] = i
    tally.experts[1] = j
    tally.signs[0] = 1.0
    tally.signs[1] = -1.0
    gap = max(work.q[i] - work.q[j], 0.0)
    _add_constraint(walls, groups, work, scratch, square, tally, _TWO, gap, 0.0, i, j, radius)


@njit(**INNER)
def add_first_swap(walls, groups, work, scratch, square, tally, members):
    """The swap of the last chosen expert with the first that is not."""
    first_out = _NOBODY
    for expert in range(work.q.shape[0]):
        if work.is_open[expert] and (first_out < 0 or work.q[expert] > work.q[first_out]):
            first_out = expert
    if first_out >= 0 and members.shape[0] > 0:
        _add_swap(walls, groups, work, scratch, square, tally, members[-1], first_out, FAR)


@njit(**INNER)
def add_swaps(walls, groups, work, scratch, square, tally, members, radius):
    """Swaps between the kept groups; for scores of one logit the nearest, which is exact."""
    if not groups.is_softmax:
        lower, upper, out, entering, at_out, at_in = nearest_wall(walls, work, members)
        if lower < math.inf:
            _add_wall(walls, work, tally, out, entering, lower, upper, at_out, at_in, out, entering)
        return
    bound_scores(walls, groups, scratch, radius)
    for rank in range(members.shape[0] - 1, _NOBODY, _NOBODY):
        i = members[rank]
        for j in range(work.q.shape[0]):
            if not work.is_open[j] or scratch.low[i] > scratch.high[j]:
                continue
            if walls.bias[i] != walls.bias[j]:
                _add_swap(walls, groups, work, scratch, square, tally, i, j, radius)
                continue
            inverse = walls.inverse[i, j]
            distance = max(work.z[i] - work.z[j], 0.0) * inverse
            if distance < NEVER:
                tally.experts[0] = i
                tally.experts[1] = j
                _clear(tally)
                tally.coefficients[0] = -inverse
                tally.coefficients[1] = inverse
                _add(tally, distance, distance, i, j)


@njit(**INNER)
def _add_fill(walls, groups, work, scratch, square, tally, expert, sign, radius):
    gap = max(sign * (work.q[expert] - groups.fill), 0.0)
    tally.experts[0] = expert
    tally.signs[0] = sign
    if groups.is_softmax:
        _add_constraint(
            walls, groups, work, scratch, square, tally, _ONE, gap, 0.0, _NOBODY, _NOBODY, radius
        )
        return
    score = groups.fill - walls.bias[expert]
    there, _ = curve_inverse(walls.curve, score, walls.curve.high - score)
    way = sign * (work.z[expert] - there)
    length = walls.length[expert]
    if gap == 0.0 or (way < math.inf and length > 0.0):
        distance = 0.0 if gap == 0.0 else max(way, 0.0) / length
        _clear(tally)
        tally.coefficients[0] = -sign / length if length > 0.0 else 0.0
        _add(tally, distance, distance, _NOBODY, _NOBODY)


@njit(**INNER)
def add_fills(walls, groups, work, scratch, square, tally, members, radius):
    """Scores that pass the value which masked experts have."""
    if not math.isfinite(groups.fill):
        return
    masked_out = False
    masked_in = False
    for expert in range(work.q.shape[0]):
        if not scratch.allowed[expert]:
            masked_in |= scratch.inside[expert]
            masked_out |= not scratch.inside[expert]
    if masked_out:
        for rank in range(members.shape[0]):
            _add_fill(walls, groups, work, scratch, square, tally, members[rank], 1.0, radius)
    if masked_in:
        for expert in range(work.q.shape[0]):
            if work.is_open[expert]:
                _add_fill(walls, groups, work, scratch, square, tally, expert, -1.0, radius)


@njit(**INNER)
def _add_rival(walls, groups, work, scratch, square, tally, tops, rivals, always, radius):
    takes = groups.takes
    if takes == 1 and not groups.is_softmax:
        i, j = tops[0], rivals[0]
        lower, upper, at_i, at_j = pair_wall(walls, work, i, j, radius)
        _add_wall(walls, work, tally, i, j, lower, upper, at_i, at_j, _NOBODY, _NOBODY)
        return
    ours = 0.0
    theirs = 0.0
    for n in range(takes):
        tally.experts[n] = tops[n]
        tally.signs[n] = 1.0
        tally.experts[takes + n] = rivals[n]
        tally.signs[takes + n] = -1.0
        ours += work.q[tops[n]]
        theirs += work.q[rivals[n]]
    gap = max(ours - theirs, 0.0)
    _add_constraint(
        walls,
        groups,
        work,
        scratch,
        square,
        tally,
        2 * takes,
        gap,
        always,
        _NOBODY,
        _NOBODY,
        radius,
    )


@njit(**INNER)
def tops_of(q, start, stop):
    """The largest and the second largest of a range of experts, -1 where there is none."""
    first = start
    for expert in range(start, stop):
        if q[expert] > q[first]:
            first = expert
    second = -1
    for expert in range(start, stop):
        if expert != first and (second < 0 or q[expert] > q[second]):
            second = expert
    return first, second


@njit(**INNER)
def add_groups(walls, groups, work, scratch, square, tally, radius):
    """Dropped groups that may overtake kept ones."""
    q, low, high = work.q, scratch.low, scratch.high
    size = q.shape[0] // groups.num_groups
    takes = groups.takes
    bound_scores(walls, groups, scratch, radius)
    for g in range(groups.num_groups):
        if not scratch.kept[g]:
            continue
        tops = tops_of(q, g * size, (g + 1) * size)
        least_of_g = best_sum(low, g * size, (g + 1) * size, takes)
        own = low[tops[0]] + low[tops[1]] if takes == 2 else low[tops[0]]
        best_of_g = best_sum(q, g * size, (g + 1) * size, takes)
        for h in range(groups.num_groups):
            if scratch.kept[h]:
                continue
            start, stop = h * size, (h + 1) * size
            if least_of_g > best_sum(high, start, stop, takes):
                continue
            slope = groups.slopes[g, h]
            highest = best_sum(high, start, stop, 1)
            gap = max(best_of_g - best_sum(q, start, stop, takes), 0.0)
            always = gap / slope if slope > 0.0 else math.inf
            for one in range(start, stop):
                if takes == 1:
                    if high[one] >= own:
                        rivals = (one, one)
                        _add_rival(
                            walls,
                            groups,
                            work,
                            scratch,
                            square,
                            tally,
                            tops,
                            rivals,
                            always,
                            radius,
                        )
                    continue
                if high[one] + highest < own:
                    continue
                for two in range(one + 1, stop):
                    if high[one] + high[two] >= own:
                        rivals = (one, two)
                        _add_rival(
                            walls,
                            groups,
                            work,
                            scratch,
                            square,
                            tally,
                            tops,
                            rivals,
                            always,
                            radius,
                        )
