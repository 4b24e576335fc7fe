"""What is known of a cell or wall: a search in float64, and what its outcome proves."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.cells.ball._cell_search import (
    CONTRADICTED,
    SOLVED,
    STUCK,
    TINY,
    appended,
    ends,
    evaluate,
    projected,
    search,
)
from moegeom.kernels.cpu._inner import INNER

#: What is known: nothing; that the open ball is met in full dimension; that it is not; that there
#: is no such cell or wall at all.
OPEN, MET, BEYOND, EMPTY = 0, 1, 2, 3

#: How far inside a point is looked for that no rounding can take out, relative to the scale.
_STEPS = (2.0**-36, 2.0**-26, 2.0**-16)

_UNIT = 2.0**-53


@njit(**INNER)
def _lower_bound(work, q, fixed, error):
    """A lower bound of the distance, by weak duality."""
    columns, shift = work.columns, work.shift
    pairs, multipliers = work.pairs, work.multipliers
    dims = len(columns)
    gamma = 2.0 * (q + 4) * _UNIT
    rise, loss, squared = 0.0, 0.0, 0.0
    for m in range(q):
        if m >= fixed:
            multipliers[m] = max(multipliers[m], 0.0)
        value, i, j = multipliers[m], pairs[m, 0], pairs[m, 1]
        gap = shift[i] - shift[j]
        rise -= value * gap
        loss += abs(value) * (2.0 * error + gamma * abs(gap))
    for c in range(dims):
        total, reach = 0.0, 0.0
        for m in range(q):
            term = multipliers[m] * (columns[c, pairs[m, 0]] - columns[c, pairs[m, 1]])
            total += term
            reach += abs(term)
        squared += (abs(total) + gamma * reach) ** 2
    length = math.sqrt(squared) * (1.0 + 2.0 * (dims + 4) * _UNIT) + TINY
    rise = (rise - 1.01 * loss - TINY) * (1.0 - 8.0 * _UNIT)
    return rise / length if rise > 0.0 else 0.0


@njit(**INNER)
def _inwards(work, k, out, into, near):
    """Makes ``away`` a unit direction in which no tie is left; False where there is none."""
    columns, logits = work.columns, work.logits
    basis, upper = work.basis, work.upper
    height, share, away = work.height, work.share, work.away
    dims = len(away)
    i, j, low, high = ends(logits, k, -1, -1)
    for c in range(dims):
        away[c] = 0.0
    if out < 0 and (j < 0 or low > high + near):
        return True
    level = logits[out] if out >= 0 else 0.5 * (low + high)
    first = out if out >= 0 else i
    base = 0.0 if out >= 0 else 1.0
    q = 0
    for m in range(len(logits)):
        is_near = logits[m] < level + near if m < k else logits[m] > level - near
        if m == first or (not is_near and m != into):
            continue
        if q == dims:
            return False
        wanted = 1.0 if m < k else -1.0
        if m == into:
            wanted = 0.0
        length, gain = projected(columns, m, first, q, basis, height, away)
        if not gain > 1e-20 * length:
            return False
        appended(q, gain, basis, upper, height, away)
        value = wanted - base
        for l in range(q):
            value -= upper[l, q] * share[l]
        share[q] = value / upper[q, q]
        q += 1
    length = 0.0
    for c in range(dims):
        away[c] = 0.0
        for m in range(q):
            away[c] += share[m] * basis[m, c]
        length += away[c] * away[c]
    if length > 0.0:
        for c in range(dims):
            away[c] /= math.sqrt(length)
    return True


@njit(**INNER)
def _off(work, k, out, into, rounding, longest):
    """How far a point of the set may be from ``moved``; infinite where that is not proved."""
    columns, logits, moved = work.columns, work.logits, work.moved
    dims = len(moved)
    evaluate(columns, work.shift, moved, logits)
    _, _, low, high = ends(logits, k, out, into)
    if out < 0:
        return 0.0 if low - rounding > high + rounding else np.inf
    length = 0.0
    for c in range(dims):
        length += (columns[c, out] - columns[c, into]) ** 2
    length = math.sqrt(length) * (1.0 - 2.0 * (dims + 4) * _UNIT)
    one, other = logits[out], logits[into]
    off = (abs(one - other) + 2.0 * rounding) / length * (1.0 + 8.0 * _UNIT)
    change = 2.0 * (rounding + 1.01 * off * longest)
    if low - change > min(one, other) and high + change < max(one, other):
        return off
    return np.inf


@njit(**INNER)
def _upper_bound(work, limits, k, out, into):
    """The length of a step surely inside, left in ``moved``; infinite where none is found."""
    step, moved, direction = work.step, work.moved, work.away
    error, greatest, longest = limits.error, limits.greatest, limits.longest
    dims = len(step)
    gamma = 2.0 * (dims + 4) * _UNIT
    length = 0.0
    for c in range(dims):
        length += step[c] * step[c]
    length = math.sqrt(length)
    rounding = 1.01 * error + gamma * (greatest + longest * length)
    evaluate(work.columns, work.shift, step, work.logits)
    if not _inwards(work, k, out, into, 64.0 * rounding):
        return np.inf
    for relative in _STEPS:
        length, is_at_centre = 0.0, True
        for c in range(dims):
            moved[c] = step[c] + relative * limits.scale * direction[c]
            length += moved[c] * moved[c]
            is_at_centre = is_at_centre and moved[c] == 0.0
        length = math.sqrt(length) * (1.0 + gamma) + (0.0 if is_at_centre else TINY)
        rounding = 1.01 * error + gamma * (greatest + longest * length)
        off = _off(work, k, out, into, rounding, longest)
        if off < np.inf:
            return (length + off) * (1.0 + 4.0 * _UNIT)
    return np.inf


@njit(**INNER)
def _is_empty(work, q, fixed, error):
    """Whether the multipliers of Farkas surely exist: the last pair in terms of d independent."""
    columns, shift = work.columns, work.shift
    pairs, multipliers = work.pairs, work.multipliers
    basis, upper = work.basis, work.upper
    dims = len(columns)
    if _is_parallel(columns, shift, pairs, q, error):
        return True
    if q < dims + 1:
        return False
    gamma = 2.0 * (dims + 4) * _UNIT
    inverse, slopes, bound = np.zeros((dims, dims)), np.empty((dims, dims)), np.empty(dims)
    for m in range(dims):
        for c in range(dims):
            slopes[m, c] = columns[c, pairs[m, 0]] - columns[c, pairs[m, 1]]
    for m in range(dims - 1, -1, -1):
        for c in range(dims):
            value = basis[m, c]
            for l in range(m + 1, dims):
                value -= upper[m, l] * inverse[l, c]
            inverse[m, c] = value / upper[m, m]
    spoiled = 0.0
    for l in range(dims):
        column = 0.0
        for m in range(dims):
            value, reach = -1.0 if m == l else 0.0, 1.0
            for c in range(dims):
                value += inverse[m, c] * slopes[l, c]
                reach += abs(inverse[m, c] * slopes[l, c])
            column += abs(value) + gamma * reach
        spoiled = max(spoiled, column)
    if not spoiled < 0.3:
        return False
    whole = 0.0
    for m in range(dims):
        bound[m] = 0.0
    for c in range(dims):
        last = columns[c, pairs[dims, 0]] - columns[c, pairs[dims, 1]]
        value, reach = last, abs(last)
        for m in range(dims):
            value += multipliers[m] * slopes[m, c]
            reach += abs(multipliers[m] * slopes[m, c])
        for m in range(dims):
            bound[m] += abs(inverse[m, c]) * (abs(value) + gamma * reach)
    for m in range(dims):
        whole += bound[m]
    i, j = pairs[dims, 0], pairs[dims, 1]
    gap = shift[i] - shift[j]
    total, loss = gap, 2.0 * error + gamma * abs(gap)
    for m in range(dims):
        # (I - E)^-1 x is within ||E|| / (1 - ||E||) ||x|| of x
        off = 1.01 * (bound[m] + 1.5 * spoiled * whole)
        value, i, j = multipliers[m], pairs[m, 0], pairs[m, 1]
        if m >= fixed and not value > off:
            return False
        gap = shift[i] - shift[j]
        total += value * gap
        loss += (abs(value) + off) * (2.0 * error + gamma * abs(gap)) + off * abs(gap)
    return total + 1.01 * loss < 0.0


@njit(**INNER)
def _is_parallel(columns, shift, pairs, q, error):
    """Whether the last pair has equal rows, and logits in the wrong order."""
    i, j = pairs[q - 1, 0], pairs[q - 1, 1]
    for c in range(len(columns)):
        if columns[c, i] != columns[c, j]:
            return False
    return abs(shift[i] - shift[j]) * (1.0 - 4.0 * _UNIT) > 2.02 * error


@njit(**INNER)
def excluded(work, limits, k, out, into):
    """BEYOND, EMPTY or OPEN with a lower bound; whether the search was solved; active pairs."""
    ended, q = search(work, limits, k, out, into)
    fixed = 1 if out >= 0 and into >= 0 else 0
    if ended == STUCK:
        return OPEN, 0.0, False, q
    if ended == CONTRADICTED and limits.radius == np.inf:
        if _is_empty(work, q, fixed, limits.error):
            return EMPTY, np.inf, False, q
        return OPEN, 0.0, False, q
    lower = _lower_bound(work, q, fixed, limits.error)
    if lower >= limits.radius:
        return BEYOND, lower, False, q
    return OPEN, lower, ended == SOLVED, q


@njit(**INNER)
def answer(work, limits, k, out, into):
    """What is known of a cell, or of a wall where out >= 0; its bracket, and the active pairs.

    For MET, ``moved`` is a step into the relative interior, or no farther from it than rounding
    takes.
    """
    state, lower, is_solved, q = excluded(work, limits, k, out, into)
    bound = np.inf
    if state == OPEN and is_solved:
        bound = _upper_bound(work, limits, k, out, into)
        if bound < limits.radius:
            state, lower = MET, min(lower, bound)
    return state, lower, bound, q
