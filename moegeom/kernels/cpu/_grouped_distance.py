"""Bounds of the distance for grouped rules and softmax, compiled.

See :mod:`moegeom.geometry.grouped_boundary`.
"""

from __future__ import annotations

import math

from numba import njit

from moegeom.kernels.cpu._barriers import (
    FAR,
    add_fills,
    add_first_swap,
    add_groups,
    add_swaps,
    clear_tally,
    forget_nearest,
)
from moegeom.kernels.cpu._first_change import first_change, is_changed, keep_groups, point
from moegeom.kernels.cpu._inner import INNER
from moegeom.kernels.cpu._token_scores import load_scores

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
        lower[token] = min(far, tally.bounds[0])
        upper[token] = far
        if tally.bounds[0] < far < math.inf and tally.bounds[1] >= far:
            pair[token, 0] = tally.pair[0]
            pair[token, 1] = tally.pair[1]
