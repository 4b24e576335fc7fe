r"""What is known of a cell or facet: a dual active-set search in float64, and what it proves.

.. math:: \min |y|^2 \quad\text{s.t.}\quad a_m y + g_m \ge 0, \qquad a_{ij} = w_i - w_j, \;
   g_{ij} = z_i(c) - z_j(c)

for i in S and j not in S, with equality for the pair that a facet exchanges. Any multipliers
:math:`\lambda \ge 0` (of either sign for the equation) prove, by weak duality,

.. math:: |y| \ge -\lambda g \,/\, |\textstyle\sum_m \lambda_m a_m|

for every y that satisfies the constraints, and any point that satisfies them proves the other side.
Rounding is bounded as in a dot product of n terms, :math:`\gamma_n = n u`, each n twice what it
needs to be. Source: Goldfarb and Idnani 1983; docs/theory.md G2. Oracles in the tests: the same in
exact arithmetic, and the least distance program of Lawson and Hanson by NNLS.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.core.shapes import Float64, Int64
from moegeom.kernels.cpu import INNER, ONCE, UNCOUNTED, kernel

#: Where a search ended: at the nearest point, past the radius, at a contradiction, nowhere.
SOLVED, PASSED, CONTRADICTED, STUCK = 0, 1, 2, 3

#: What is added to lengths, whose squares may have vanished.
TINY = 1e-150

_UNIT = 2.0**-53


class Limits(NamedTuple):
    """How far from the centre is looked, and what rounding may do.

    ``error`` is what any logit at the centre may be off by, ``scale`` a typical distance;
    ``greatest`` bounds the logits, ``longest`` the length of rows.
    """

    radius: float
    scale: float
    error: float
    greatest: float
    longest: float


class Ball(NamedTuple):
    """A router, its logits at the centre of a ball, and the limits of a search there."""

    weight: Float64[np.ndarray, "experts dims"]
    shift: Float64[np.ndarray, "experts"]
    limits: Limits


def shifted(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    centre: Float64[np.ndarray, "dims"],
) -> tuple[Float64[np.ndarray, "experts"], Float64[np.ndarray, "experts"]]:
    """Logits at the centre, and bounds of their rounding; none where the centre is 0."""
    terms = weight * centre
    reach = np.abs(bias) + np.abs(terms).sum(axis=1)
    gamma = 2.0 * (weight.shape[1] + 2) * _UNIT if terms.any() else 0.0
    return bias + terms.sum(axis=1), gamma * reach


def ball_around(
    weight: Float64[np.ndarray, "experts dims"],
    shift: Float64[np.ndarray, "experts"],
    error: float,
    radius: float,
    scale: float,
) -> Ball:
    """A ball with the bounds that its numbers have."""
    rows, logits = np.ascontiguousarray(weight), np.ascontiguousarray(shift)
    greatest, longest = _magnitudes(rows, logits)
    limits = Limits(float(radius), float(scale), float(error), greatest, longest)
    return Ball(rows, logits, limits)


@kernel()
def _magnitudes(weight, shift):
    """The greatest logit in magnitude, and the length of the longest row, rounded up."""
    greatest, longest = 0.0, 0.0
    for j in range(len(shift)):
        greatest = max(greatest, abs(shift[j]))
        length = 0.0
        for c in range(weight.shape[1]):
            length += weight[j, c] * weight[j, c]
        longest = max(longest, length)
    return greatest, math.sqrt(longest) * (1.0 + 2.0 * (weight.shape[1] + 4) * _UNIT) + TINY


class BallWork(NamedTuple):
    """One cell, its chosen experts first, and what is known of its nearest point.

    ``columns`` are the router in that order, ``shift`` and ``logits`` its logits at the centre and
    after a step. ``pairs`` with their ``multipliers`` hold the nearest point, ``step``, from which
    ``moved`` goes on into the cell; the slopes of the pairs are ``basis`` times ``upper``. A slope
    that was projected is ``height`` on the basis and ``away`` off it, ``share`` in terms of pairs.
    """

    columns: Float64[np.ndarray, "dims experts"]
    shift: Float64[np.ndarray, "experts"]
    logits: Float64[np.ndarray, "experts"]
    pairs: Int64[np.ndarray, "dims+1 2"]
    multipliers: Float64[np.ndarray, "dims+1"]
    basis: Float64[np.ndarray, "dims dims"]
    upper: Float64[np.ndarray, "dims dims"]
    height: Float64[np.ndarray, "dims"]
    share: Float64[np.ndarray, "dims"]
    away: Float64[np.ndarray, "dims"]
    step: Float64[np.ndarray, "dims"]
    moved: Float64[np.ndarray, "dims"]


@njit(**INNER)
def work_for(experts, dims):
    """Room for one cell after the other."""
    return BallWork(
        np.empty((dims, experts)),
        np.empty(experts),
        np.empty(experts),
        np.empty((dims + 1, 2), np.int64),
        np.empty(dims + 1),
        np.empty((dims, dims)),
        np.empty((dims, dims)),
        np.empty(dims),
        np.empty(dims),
        np.empty(dims),
        np.empty(dims),
        np.empty(dims),
    )


@njit(**UNCOUNTED)
def ordered(ball, inside, order, columns, shift):
    """Puts the experts of a cell first; how many they are."""
    n, k = 0, 0
    for wanted in (True, False):
        for j in range(len(inside)):
            if inside[j] == wanted:
                order[n] = j
                shift[n] = ball.shift[j]
                for c in range(len(columns)):
                    columns[c, n] = ball.weight[j, c]
                n += 1
                k += wanted
    return k


@njit(**UNCOUNTED)
def evaluate(columns, shift, step, logits):
    """The logits after a step."""
    for j in range(len(shift)):
        logits[j] = shift[j]
    for c in range(len(step)):
        for j in range(len(shift)):
            logits[j] += columns[c, j] * step[c]


@njit(**UNCOUNTED)
def ends(logits, k, out, into):
    """The least of the chosen and the greatest of the others, but for a pair."""
    # values first: a place that is kept along with them costs a wrong guess at each new one
    low, high, i, j = np.inf, -np.inf, -1, -1
    for m in range(k):
        value = np.inf if m == out else logits[m]
        low = value if value < low else low
    for m in range(k, len(logits)):
        value = -np.inf if m == into else logits[m]
        high = value if value > high else high
    for m in range(k):
        if logits[m] == low < np.inf and m != out:
            i = m
            break
    for m in range(k, len(logits)):
        if logits[m] == high > -np.inf and m != into:
            j = m
            break
    return i, j, low, high


@njit(**UNCOUNTED)
def projected(columns, i, j, q, basis, height, away):
    """Slope of a pair, its heights on the basis and the rest; both squared lengths."""
    length, gain = 0.0, 0.0
    for c in range(len(away)):
        away[c] = columns[c, i] - columns[c, j]
        length += away[c] * away[c]
    for m in range(q):
        height[m] = 0.0
    for _ in range(2):
        for m in range(q):
            part = 0.0
            for c in range(len(away)):
                part += basis[m, c] * away[c]
            height[m] += part
            for c in range(len(away)):
                away[c] -= part * basis[m, c]
        gain = 0.0
        for c in range(len(away)):
            gain += away[c] * away[c]
        if gain > 0.1 * length:
            break
    return length, gain


@njit(**UNCOUNTED)
def appended(q, gain, basis, upper, height, away):
    """Takes what was projected last into the basis."""
    root = math.sqrt(gain)
    for m in range(q):
        upper[m, q] = height[m]
    upper[q, q] = root
    for c in range(len(away)):
        basis[q, c] = away[c] / root


@njit(**ONCE)
def _dropped(columns, q, leaving, pairs, multipliers, basis, upper, height, away):
    """Without one of the active pairs; how many are left."""
    for m in range(leaving, q - 1):
        pairs[m, 0], pairs[m, 1] = pairs[m + 1, 0], pairs[m + 1, 1]
        multipliers[m] = multipliers[m + 1]
        _, gain = projected(columns, pairs[m, 0], pairs[m, 1], m, basis, height, away)
        appended(m, gain, basis, upper, height, away)
    return q - 1


@njit(**UNCOUNTED)
def search(work, limits, k, out, into):
    """Where the search ended, and how many pairs hold its step.

    With both ``out`` and ``into`` the two tie, on a facet; with one of them the cell is cut to
    where that one is the least of the chosen, or the greatest of the others; with none it is whole.
    Logits closer than rounding can tell count as tied.
    """
    # out of the bundle once: the compiler counts references at every access
    columns, shift, logits = work.columns, work.shift, work.logits
    pairs, multipliers, step = work.pairs, work.multipliers, work.step
    basis, upper, height = work.basis, work.upper, work.height
    share, away = work.share, work.away
    dims, q, fixed = len(step), 0, 0
    unit = 4.0 * (dims + 4) * _UNIT
    rounding, slack = 2.0 * limits.error + unit * limits.greatest, unit * limits.longest
    reach = (limits.radius * (1.0 + 1e-9)) ** 2
    for c in range(dims):
        step[c] = 0.0
    if out >= 0 and into >= 0:
        pairs[0, 0], pairs[0, 1] = out, into
        gap = shift[out] - shift[into]
        length, _ = projected(columns, out, into, 0, basis, height, away)
        if length == 0.0:
            multipliers[0] = -1.0 if gap > 0.0 else 1.0
            return CONTRADICTED, 1
        appended(0, length, basis, upper, height, away)
        multipliers[0] = -gap / length
        for c in range(dims):
            step[c] = -gap / length * away[c]
        q = fixed = 1
    for _ in range(20 * (dims + 2)):
        squared = 0.0
        for c in range(dims):
            squared += step[c] * step[c]
        if squared >= reach:
            return PASSED, q
        evaluate(columns, shift, step, logits)
        i, j, low, high = ends(logits, k, -1, -1)
        if out >= 0 and into < 0:
            if low + high < 2.0 * logits[out]:
                j, high = out, logits[out]
            else:
                i, low = out, logits[out]
        elif into >= 0 and out < 0:
            if low + high < 2.0 * logits[into]:
                j, high = into, logits[into]
            else:
                i, low = into, logits[into]
        if j < 0 or low - high >= -rounding - slack * math.sqrt(squared):
            return SOLVED, q
        for m in range(q):
            if pairs[m, 0] == i and pairs[m, 1] == j:
                return SOLVED, q
        own = 0.0
        while True:
            length, gain = projected(columns, i, j, q, basis, height, away)
            gap = low - high
            for m in range(q - 1, -1, -1):
                value = height[m]
                for l in range(m + 1, q):
                    value -= upper[m, l] * share[l]
                share[m] = value / upper[m, m]
            least, leaving = np.inf, -1
            for m in range(fixed, q):
                if share[m] > 1e-13 and multipliers[m] < least * share[m]:
                    least, leaving = multipliers[m] / share[m], m
            full = np.inf
            if q < dims and gain > 1e-24 * length:
                full = -gap / gain
            if least == np.inf and full == np.inf:
                for m in range(q):
                    multipliers[m] = -share[m]
                multipliers[q] = 1.0
                pairs[q, 0], pairs[q, 1] = i, j
                return CONTRADICTED, q + 1
            change = max(0.0, min(least, full))
            own += change
            for m in range(q):
                multipliers[m] -= change * share[m]
            if full < np.inf:
                for c in range(dims):
                    step[c] += change * away[c]
                low += change * gain
            if full <= least:
                appended(q, gain, basis, upper, height, away)
                pairs[q, 0], pairs[q, 1] = i, j
                multipliers[q] = own
                q += 1
                break
            q = _dropped(columns, q, leaving, pairs, multipliers, basis, upper, height, away)
    return STUCK, q


#: What is known: nothing; that the open ball is met in full dimension; that it is not; that there
#: is no such cell or facet at all.
OPEN, MET, BEYOND, EMPTY = 0, 1, 2, 3

#: How far inside a point is looked for that no rounding can take out, relative to the scale and,
#: far from the centre, to the distance: there without the last one, which a bracket would show.
_STEPS = (2.0**-36, 2.0**-26, 2.0**-16)


@njit(**UNCOUNTED)
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


@njit(**ONCE)
def _inwards(work, k, out, into, near):
    """Makes ``away`` a unit direction in which no tie is left; False where there is none."""
    columns, logits = work.columns, work.logits
    basis, upper = work.basis, work.upper
    height, share, away = work.height, work.share, work.away
    dims = len(away)
    for c in range(dims):
        away[c] = 0.0
    if out >= 0:
        level, first, base = logits[out], out, 0.0
    else:
        first, j, low, high = ends(logits, k, -1, -1)
        if j < 0 or low > high + near:
            return True
        level, base = 0.5 * (low + high), 1.0
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


@njit(**ONCE)
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


@njit(**UNCOUNTED)
def _upper_bound(work, limits, k, out, into):
    """The length of a step surely inside, left in ``moved``; infinite where none is found.

    Logits are those after the step that was searched.
    """
    step, moved, direction = work.step, work.moved, work.away
    error, greatest, longest = limits.error, limits.greatest, limits.longest
    dims = len(step)
    gamma = 2.0 * (dims + 4) * _UNIT
    length = 0.0
    for c in range(dims):
        length += step[c] * step[c]
    length = math.sqrt(length)
    rounding = 1.01 * error + gamma * (greatest + longest * length)
    if not _inwards(work, k, out, into, 64.0 * rounding):
        return np.inf
    far = length
    for attempt in range(2 * len(_STEPS) - 1):
        relative, unit = _STEPS[attempt % len(_STEPS)], limits.scale
        if attempt >= len(_STEPS):
            if not far > unit:
                break
            unit = far
        length, is_at_centre = 0.0, True
        for c in range(dims):
            moved[c] = step[c] + relative * unit * direction[c]
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


@njit(**ONCE)
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
    """What is known of a cell, or of a facet where out >= 0; its bracket, and the active pairs.

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
