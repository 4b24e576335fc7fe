"""Bounds of the distance for grouped rules and softmax, compiled.

See :mod:`moegeom.geometry.boundary.grouped`.
"""

from __future__ import annotations

import math

from numba import njit

from moegeom.geometry.boundary.first_change import CLOSE, LEAP, MAX_LEAPS, RESOLUTION, SHORTEST
from moegeom.kernels.cpu._inner import INNER
from moegeom.kernels.cpu.curved.barriers import (
    FAR,
    add_fills,
    add_first_swap,
    add_groups,
    add_swaps,
    clear_tally,
    forget_nearest,
    tops_of,
)
from moegeom.kernels.cpu.curved.first_change import (
    first_change,
    is_changed,
    keep_groups,
    point,
    shorter_change,
)
from moegeom.kernels.cpu.curved.token_scores import load_scores, steepest_descent

#: What is looked for in turn: a first change of softmax scores, swaps, other groups.
FIRST_SWAP, SWAPS = 0, 1


@njit(**INNER)
def _search(walls, groups, work, scratch, tally, limit):
    """A verified change through the barrier that seems nearest, or ``limit``."""
    guess = tally.bounds[2]
    is_nowhere = True
    for n in range(5):
        is_nowhere &= tally.way[n] == 0.0
    if guess == 0.0 and is_nowhere:
        return 0.0
    point(walls, scratch, tally.nearest, tally.way, 4)
    low = tally.low_of_nearest[0]
    return min(limit, first_change(walls, groups, work, scratch, low, guess, limit))


@njit(**INNER)
def _sort_out(groups, chosen, work, scratch):
    """Who is chosen, allowed and open; the chosen experts of kept groups, and their number."""
    size = work.q.shape[0] // groups.num_groups
    keep_groups(groups, work.q, scratch.kept)
    for expert in range(work.q.shape[0]):
        scratch.allowed[expert] = scratch.kept[expert // size]
        work.is_open[expert] = scratch.allowed[expert] and not scratch.inside[expert]
    number = 0
    for rank in range(chosen.shape[0]):
        if scratch.allowed[chosen[rank]]:
            scratch.members[number] = chosen[rank]
            number += 1
    return number


@njit(**INNER)
def _along(walls, groups, work, scratch, square, tally, number, low, length, far):
    """Shortest step down the constraint of the tally that changes the set; ``far`` if none does."""
    for of_logits in (False, True):
        for n in range(5):
            tally.coefficients[n] = 0.0
        steepest_descent(
            walls,
            groups,
            work,
            scratch,
            square,
            tally.experts,
            tally.signs,
            number,
            tally.coefficients,
            of_logits,
        )
        point(walls, scratch, tally.experts, tally.coefficients, number)
        trial = length if far == math.inf else far * (1.0 - RESOLUTION)
        far = min(far, shorter_change(walls, groups, work, scratch, low, trial))
    return far


@njit(**INNER)
def _on_rays(walls, groups, work, scratch, square, tally, chosen, low, far):
    """What changes on rays, at lengths that grow until something does."""
    q = work.q
    size, takes = q.shape[0] // groups.num_groups, groups.takes
    last, first = chosen[chosen.shape[0] - 1], -1
    for expert in range(q.shape[0]):
        if not scratch.inside[expert] and (first < 0 or q[expert] > q[first]):
            first = expert
    if first < 0:
        return far
    length = max(low, SHORTEST)
    for _ in range(MAX_LEAPS):
        # those that are out, then those that are chosen, then pairs of groups
        for ray in range(q.shape[0] + chosen.shape[0] + groups.num_groups**2):
            number = 2
            tally.signs[0] = 1.0
            tally.signs[1] = -1.0
            if ray < q.shape[0]:
                if scratch.inside[ray]:
                    continue
                tally.experts[0] = last
                tally.experts[1] = ray
            elif ray < q.shape[0] + chosen.shape[0]:
                tally.experts[0] = chosen[ray - q.shape[0]]
                tally.experts[1] = first
            else:
                pair = ray - q.shape[0] - chosen.shape[0]
                g, h = pair // groups.num_groups, pair % groups.num_groups
                if not scratch.kept[g] or scratch.kept[h]:
                    continue
                ours = tops_of(q, g * size, (g + 1) * size)
                theirs = tops_of(q, h * size, (h + 1) * size)
                number = 2 * takes
                for n in range(takes):
                    tally.experts[n] = ours[n]
                    tally.experts[takes + n] = theirs[n]
                    tally.signs[n] = 1.0
                    tally.signs[takes + n] = -1.0
            far = _along(walls, groups, work, scratch, square, tally, number, low, length, far)
        if far < math.inf or length > FAR:
            return far
        length *= LEAP
    return far


@njit(nogil=True, cache=True, error_model="numpy")
def grouped(walls, groups, work, scratch, tally, logits, chosen, lower, upper, pair):
    """Bounds and pair of each token, into ``lower``, ``upper`` and ``pair``."""
    for token in range(logits.shape[0]):
        square = load_scores(walls, groups, logits[token], work, scratch)
        for expert in range(logits.shape[1]):
            scratch.inside[expert] = False
            scratch.direction[expert] = 0.0
        for rank in range(chosen.shape[1]):
            scratch.inside[chosen[token, rank]] = True
        pair[token, 0] = -1
        pair[token, 1] = -1
        if is_changed(walls, groups, work, scratch, 0.0):
            lower[token] = 0.0
            upper[token] = 0.0
            continue
        number = _sort_out(groups, chosen[token], work, scratch)
        clear_tally(tally)
        members = scratch.members[:number]
        far = math.inf
        for stage in range(3):
            if stage == FIRST_SWAP:
                if groups.is_softmax:
                    add_first_swap(walls, groups, work, scratch, square, tally, members)
            elif stage == SWAPS:
                clear_tally(tally)
                radius = min(far, FAR)
                add_swaps(walls, groups, work, scratch, square, tally, members, radius)
                add_fills(walls, groups, work, scratch, square, tally, members, radius)
            elif groups.num_kept < groups.num_groups:
                forget_nearest(tally)
                radius = min(FAR, far, tally.bounds[0])
                add_groups(walls, groups, work, scratch, square, tally, radius)
            if tally.bounds[2] < far:
                far = _search(walls, groups, work, scratch, tally, far)
        low = min(far, tally.bounds[0])
        if far > CLOSE * low:
            far = _on_rays(walls, groups, work, scratch, square, tally, chosen[token], low, far)
        lower[token] = min(far, tally.bounds[0])
        upper[token] = far
        if tally.bounds[0] < far < math.inf and tally.bounds[1] >= far:
            pair[token, 0] = tally.pair[0]
            pair[token, 1] = tally.pair[1]
