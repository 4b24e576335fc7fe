"""Proved bounds of the distance of a cell or wall, from what a search in float64 proposes."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.cells.ball._cell_search import appended, ends, evaluate, projected
from moegeom.kernels.cpu._inner import INNER

_UNIT = 2.0**-53

#: How far inside a point is looked for that no rounding can take out, relative to the scale.
_STEPS = (2.0**-36, 2.0**-26, 2.0**-16)

#: What is added to lengths, whose squares may have vanished.
_TINY = 1e-150


@njit(**INNER)
def lower_bound(rows, shift, pairs, multipliers, q, fixed, error):
    """A lower bound of the distance, by weak duality."""
    dims = rows.shape[1]
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
            term = multipliers[m] * (rows[pairs[m, 0], c] - rows[pairs[m, 1], c])
            total += term
            reach += abs(term)
        squared += (abs(total) + gamma * reach) ** 2
    length = math.sqrt(squared) * (1.0 + 2.0 * (dims + 4) * _UNIT) + _TINY
    rise = (rise - 1.01 * loss - _TINY) * (1.0 - 8.0 * _UNIT)
    return rise / length if rise > 0.0 else 0.0


@njit(**INNER)
def _inwards(rows, logits, step, basis, upper, height, share, away, direction, k, out, into, near):
    """Puts a unit direction into ``slope`` in which no tie is left; False where there is none."""
    dims = len(step)
    i, j, low, high = ends(logits, k, -1, -1)
    for c in range(dims):
        direction[c] = 0.0
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
        length, gain = projected(rows, m, first, q, basis, height, away)
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
        direction[c] = 0.0
        for m in range(q):
            direction[c] += share[m] * basis[m, c]
        length += direction[c] * direction[c]
    if length > 0.0:
        for c in range(dims):
            direction[c] /= math.sqrt(length)
    return True


@njit(**INNER)
def _off(rows, columns, shift, logits, moved, k, out, into, rounding, longest):
    """How far a point of the set may be from ``moved``; infinite where that is not proved."""
    dims = len(moved)
    evaluate(columns, shift, moved, logits)
    _, _, low, high = ends(logits, k, out, into)
    if out < 0:
        return 0.0 if low - rounding > high + rounding else np.inf
    length = 0.0
    for c in range(dims):
        length += (rows[out, c] - rows[into, c]) ** 2
    length = math.sqrt(length) * (1.0 - 2.0 * (dims + 4) * _UNIT)
    one, other = logits[out], logits[into]
    off = (abs(one - other) + 2.0 * rounding) / length * (1.0 + 8.0 * _UNIT)
    change = 2.0 * (rounding + 1.01 * off * longest)
    if low - change > min(one, other) and high + change < max(one, other):
        return off
    return np.inf


@njit(**INNER)
def upper_bound(
    rows,
    columns,
    shift,
    logits,
    step,
    basis,
    upper,
    height,
    share,
    away,
    direction,
    moved,
    k,
    out,
    into,
    scale,
    error,
    greatest,
    longest,
):
    """The length of a step surely inside, left in ``moved``; infinite where none is found."""
    dims = len(step)
    gamma = 2.0 * (dims + 4) * _UNIT
    length = 0.0
    for c in range(dims):
        length += step[c] * step[c]
    length = math.sqrt(length)
    rounding = 1.01 * error + gamma * (greatest + longest * length)
    evaluate(columns, shift, step, logits)
    if not _inwards(
        rows,
        logits,
        step,
        basis,
        upper,
        height,
        share,
        away,
        direction,
        k,
        out,
        into,
        64.0 * rounding,
    ):
        return np.inf
    for relative in _STEPS:
        length, is_at_centre = 0.0, True
        for c in range(dims):
            moved[c] = step[c] + relative * scale * direction[c]
            length += moved[c] * moved[c]
            is_at_centre = is_at_centre and moved[c] == 0.0
        length = math.sqrt(length) * (1.0 + gamma) + (0.0 if is_at_centre else _TINY)
        rounding = 1.01 * error + gamma * (greatest + longest * length)
        off = _off(rows, columns, shift, logits, moved, k, out, into, rounding, longest)
        if off < np.inf:
            return (length + off) * (1.0 + 4.0 * _UNIT)
    return np.inf


@njit(**INNER)
def is_empty(rows, shift, pairs, multipliers, basis, upper, q, fixed, error):
    """Whether the multipliers of Farkas surely exist: the last pair in terms of d independent."""
    dims = rows.shape[1]
    if _is_parallel(rows, shift, pairs, q, error):
        return True
    if q < dims + 1:
        return False
    gamma = 2.0 * (dims + 4) * _UNIT
    inverse, slopes, bound = np.zeros((dims, dims)), np.empty((dims, dims)), np.empty(dims)
    for m in range(dims):
        for c in range(dims):
            slopes[m, c] = rows[pairs[m, 0], c] - rows[pairs[m, 1], c]
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
        last = rows[pairs[dims, 0], c] - rows[pairs[dims, 1], c]
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
def _is_parallel(rows, shift, pairs, q, error):
    """Whether the last pair has equal rows, and logits in the wrong order."""
    i, j = pairs[q - 1, 0], pairs[q - 1, 1]
    for c in range(rows.shape[1]):
        if rows[i, c] != rows[j, c]:
            return False
    return abs(shift[i] - shift[j]) * (1.0 - 4.0 * _UNIT) > 2.02 * error


@njit(**INNER)
def magnitudes(weight, shift):
    """The greatest logit in magnitude, and the length of the longest row, rounded up."""
    greatest, longest = 0.0, 0.0
    for j in range(len(shift)):
        greatest = max(greatest, abs(shift[j]))
        length = 0.0
        for c in range(weight.shape[1]):
            length += weight[j, c] * weight[j, c]
        longest = max(longest, length)
    return greatest, math.sqrt(longest) * (1.0 + 2.0 * (weight.shape[1] + 4) * _UNIT) + _TINY
