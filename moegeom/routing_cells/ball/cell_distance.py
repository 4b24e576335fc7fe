r"""Distances from a centre to cells and facets: a dual active-set search in float64, and its proof.

.. math:: \min |y|^2 \quad\text{s.t.}\quad a_m y + g_m \ge 0, \qquad a_{ij} = w_i - w_j, \;
   g_{ij} = z_i(c) - z_j(c)

for i in S and j not in S, with equality for the pair that a facet exchanges. Any multipliers
:math:`\lambda \ge 0` (of either sign for the equation) prove, by weak duality,

.. math:: |y| \ge -\lambda g \,/\, |\textstyle\sum_m \lambda_m a_m|

for every y that satisfies the constraints, and any point that satisfies them proves the other side.
Rounding is bounded as in a dot product of n terms, :math:`\gamma_n = n u`, each n twice what it
needs to be. A search ends as soon as the radius is passed, and an answer that float64 cannot prove
stays OPEN: :func:`moegeom.routing_cells.exact.exact_nearest.exact_nearest` settles it. Source:
Goldfarb and Idnani 1983; docs/theory.md G2. Oracles in the tests: the same in exact arithmetic, and
the least distance program of Lawson and Hanson by NNLS.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.core.shapes import Bool, Float64, Int16, Int64, UInt8
from moegeom.kernels.cpu import INNER, ONCE, UNCOUNTED, kernel
from moegeom.routing_cells.walk._level_diagram import facets_at
from moegeom.routing_cells.walk.enumeration import Enumeration
from moegeom.routing_cells.walk.level_walk import Weighed, weighed

#: Where a search ended: at the nearest point, past the radius, at a contradiction, nowhere.
SOLVED, PASSED, CONTRADICTED, STUCK = 0, 1, 2, 3

#: What is added to lengths, whose squares may have vanished.
TINY = 1e-150

_UNIT = 2.0**-53


class Limits(NamedTuple):
    """The radius of a search, and the bounds of its rounding errors.

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
    """One cell, its chosen experts first, and the state of the search for its nearest point.

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
def _work_for(experts, dims):
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
def _ordered(ball, inside, order, columns, shift):
    """Puts the experts of a cell first; returns their number."""
    n, k = 0, 0
    for side in (True, False):
        for j in range(len(inside)):
            if inside[j] == side:
                order[n] = j
                shift[n] = ball.shift[j]
                for c in range(len(columns)):
                    columns[c, n] = ball.weight[j, c]
                n += 1
                k += side
    return k


@njit(**UNCOUNTED)
def _evaluate(columns, shift, step, logits):
    """The logits after a step."""
    for j in range(len(shift)):
        logits[j] = shift[j]
    for c in range(len(step)):
        for j in range(len(shift)):
            logits[j] += columns[c, j] * step[c]


@njit(**UNCOUNTED)
def _ends(logits, k, out, into):
    """The least chosen and the greatest other logit, and their experts, without a pair."""
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
def _projected(columns, i, j, q, basis, height, away):
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
def _appended(q, gain, basis, upper, height, away):
    """Appends the slope that was projected last to the basis."""
    root = math.sqrt(gain)
    for m in range(q):
        upper[m, q] = height[m]
    upper[q, q] = root
    for c in range(len(away)):
        basis[q, c] = away[c] / root


@njit(**ONCE)
def _dropped(columns, q, leaving, pairs, multipliers, basis, upper, height, away):
    """Removes one of the active pairs; returns how many remain."""
    for m in range(leaving, q - 1):
        pairs[m, 0], pairs[m, 1] = pairs[m + 1, 0], pairs[m + 1, 1]
        multipliers[m] = multipliers[m + 1]
        _, gain = _projected(columns, pairs[m, 0], pairs[m, 1], m, basis, height, away)
        _appended(m, gain, basis, upper, height, away)
    return q - 1


@njit(**UNCOUNTED)
def _search(work, limits, k, out, into):
    """Returns how the search ended, and the number of pairs that hold its step.

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
        length, _ = _projected(columns, out, into, 0, basis, height, away)
        if length == 0.0:
            multipliers[0] = -1.0 if gap > 0.0 else 1.0
            return CONTRADICTED, 1
        _appended(0, length, basis, upper, height, away)
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
        _evaluate(columns, shift, step, logits)
        i, j, low, high = _ends(logits, k, -1, -1)
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
            length, gain = _projected(columns, i, j, q, basis, height, away)
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
                _appended(q, gain, basis, upper, height, away)
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
        first, j, low, high = _ends(logits, k, -1, -1)
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
        target = 1.0 if m < k else -1.0
        if m == into:
            target = 0.0
        length, gain = _projected(columns, m, first, q, basis, height, away)
        if not gain > 1e-20 * length:
            return False
        _appended(q, gain, basis, upper, height, away)
        value = target - base
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
    """A bound of the distance from ``moved`` to the set; infinite where none is proved."""
    columns, logits, moved = work.columns, work.logits, work.moved
    dims = len(moved)
    _evaluate(columns, work.shift, moved, logits)
    _, _, low, high = _ends(logits, k, out, into)
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
    """The length of a step that is proved to end inside, or infinity; ``moved`` becomes the step.

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
def _excluded(work, limits, k, out, into):
    """BEYOND, EMPTY or OPEN with a lower bound, and whether the search was solved."""
    ended, q = _search(work, limits, k, out, into)
    fixed = 1 if out >= 0 and into >= 0 else 0
    if ended == STUCK:
        return OPEN, 0.0, False
    if ended == CONTRADICTED and limits.radius == np.inf:
        if _is_empty(work, q, fixed, limits.error):
            return EMPTY, np.inf, False
        return OPEN, 0.0, False
    lower = _lower_bound(work, q, fixed, limits.error)
    if lower >= limits.radius:
        return BEYOND, lower, False
    return OPEN, lower, ended == SOLVED


@njit(**INNER)
def _answer(work, limits, k, out, into):
    """The state of a cell, or of a facet where out >= 0, and its bracket.

    For MET, ``moved`` is a step into the relative interior, or no farther from it than rounding
    takes.
    """
    state, lower, is_solved = _excluded(work, limits, k, out, into)
    bound = np.inf
    if state == OPEN and is_solved:
        bound = _upper_bound(work, limits, k, out, into)
        if bound < limits.radius:
            state, lower = MET, min(lower, bound)
    return state, lower, bound


# ------------------------------------------------------------------------- one after the other
#: Cells or facets that are worth a thread.
_LEAST = 4096


class Distances(NamedTuple):
    """The state of each cell or facet, and a proved bracket of its distance.

    ``state`` is OPEN, MET, BEYOND or EMPTY. ``step`` leads from the centre to a point inside each
    that is MET, no farther than ``upper``, NaN elsewhere; with a facet the point may be off the
    hyperplane by rounding.
    """

    state: UInt8[np.ndarray, "cells"]
    lower: Float64[np.ndarray, "cells"]
    upper: Float64[np.ndarray, "cells"]
    step: Float64[np.ndarray, "cells dims"]


class BallFacets(NamedTuple):
    """Arrays for facets: cell, out and into of each, its state and its bracket."""

    facet: Int64[np.ndarray, "most 3"]
    state: UInt8[np.ndarray, "most"]
    bracket: Float64[np.ndarray, "most 2"]


def cell_distance(
    ball: Ball,
    inside: Bool[np.ndarray, "cells experts"],
    exchanged: Int64[np.ndarray, "cells 2"],
    threads: int = 1,
) -> Distances:
    """Distance of each cell, or of its facet where the pair (out, into) ties; (-1, -1) for none.

    A search that passes the radius ends there with a lower bound beyond it. Threads change nothing
    of what is found.
    """
    num, dims = len(inside), ball.weight.shape[1]
    distances = Distances(
        np.zeros(num, np.uint8), np.empty(num), np.empty(num), np.full((num, dims), np.nan)
    )
    rows, pairs = np.ascontiguousarray(inside), np.ascontiguousarray(exchanged)
    cuts = np.linspace(0, num, max(1, min(threads, num // _LEAST)) + 1).astype(int).tolist()
    parts = [slice(*ends) for ends in pairwise(cuts)]

    def fill(part: slice) -> None:
        own = Distances(*(values[part] for values in distances))
        _distance_loop(ball, rows[part], pairs[part], own)

    if len(parts) == 1:
        fill(parts[0])
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(fill, parts))
    return distances


@kernel()
def _distance_loop(ball, inside, exchanged, distances):
    """Fills in the distances of one cell or facet after the other."""
    experts, dims = ball.weight.shape
    work = _work_for(experts, dims)
    order, place = np.empty(experts, np.int64), np.empty(experts, np.int64)
    k = 0
    for n in range(len(inside)):
        if n == 0 or not _is_same(inside[n - 1], inside[n]):
            k = _ordered(ball, inside[n], order, work.columns, work.shift)
            for m in range(experts):
                place[order[m]] = m
        out = place[exchanged[n, 0]] if exchanged[n, 0] >= 0 else -1
        into = place[exchanged[n, 1]] if exchanged[n, 0] >= 0 else -1
        state, distances.lower[n], distances.upper[n] = _answer(work, ball.limits, k, out, into)
        distances.state[n] = state
        if state == MET:
            for c in range(dims):  # an array at once would bring the text of its errors along
                distances.step[n, c] = work.moved[c]


@njit(**UNCOUNTED)
def _is_same(one, other):
    """Whether two cells are one; neighbours in a list of facets often share the first."""
    is_same = True
    for j in range(len(one)):
        is_same = is_same and one[j] == other[j]
    return is_same


@kernel()
def facet_distance_loop(ball, sure, foot, inside, first, listed, facets):
    """All facets of cells from ``first`` on that are MET or OPEN; the next cell, and how many.

    Ends before a cell whose facets may be too many for the room in ``facets``. ``listed`` has
    facets of the same form, in order, that are passed over; ``sure[i, j]`` is true where i is above
    j in the whole ball, ``foot`` bounds the distance of the tie of two.
    """
    experts, dims = ball.weight.shape
    work, order = _work_for(experts, dims), np.empty(experts, np.int64)
    limits, radius = ball.limits, ball.limits.radius
    facet, count, at = facets.facet, 0, 0
    is_known = np.zeros((experts, experts), np.bool_)
    is_free = np.empty(experts, np.bool_)
    while at < len(listed) and listed[at, 0] < first:
        at += 1
    for n in range(first, len(inside)):
        k = _ordered(ball, inside[n], order, work.columns, work.shift)
        if count + k * (experts - k) > len(facet):
            return n, count
        start = at
        while at < len(listed) and listed[at, 0] == n:
            is_known[listed[at, 1], listed[at, 2]] = True
            at += 1
        for m in range(experts):
            own, free = order[m], True
            for l in range(k) if m < k else range(k, experts):
                other = order[l]
                if sure[own, other] if m < k else sure[other, own]:
                    free = False
                    break
            is_free[m] = free
        for m in range(experts):
            if is_free[m]:
                out, into = (m, -1) if m < k else (-1, m)
                state, _, _ = _excluded(work, limits, k, out, into)
                is_free[m] = state == OPEN
        for out in range(k):
            if not is_free[out]:
                continue
            for into in range(k, experts):
                own, other = order[out], order[into]
                if not is_free[into] or foot[own, other] >= radius or is_known[own, other]:
                    continue
                state, lower, upper = _answer(work, limits, k, out, into)
                if state in (BEYOND, EMPTY):
                    continue
                facet[count, 0], facet[count, 1], facet[count, 2] = n, own, other
                facets.state[count] = state
                facets.bracket[count, 0], facets.bracket[count, 1] = lower, upper
                count += 1
        for m in range(start, at):
            is_known[listed[m, 1], listed[m, 2]] = False
    return len(inside), count


# --------------------------------------------------------------------------------- nearest vertices
def nearest_vertices(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    cells: Enumeration,
    centre: Float64[np.ndarray, "dims"],
) -> Float64[np.ndarray, "facets 2"]:
    """Brackets of the distances of facets, infinite where no listed vertex is proved to be nearest.

    Vertices, where they are listed, must be those of the instance, with all that is said of them
    proved.
    """
    bracket, simple = np.full((len(cells.facets), 2), np.inf), cells.simple
    if simple is None:
        return bracket
    seen = weighed(simple.on, weight, bias, centre)
    bits = np.uint32(1) << np.arange(simple.on.shape[1], dtype=np.uint32)
    rising = (seen.multipliers > 0.0) @ bits
    facet, vertex = facets_at(simple.on, simple.above, rising, cells.expert_set, cells.facets)
    is_seen = np.zeros(len(rising), bool)
    is_seen[vertex] = True
    some = np.flatnonzero(is_seen)
    own = Weighed(seen.point[some], seen.error[some], seen.multipliers[some])
    upper = _upper(own, centre)
    lower = np.minimum(_lower(own, simple.on[some], weight, bias, centre), upper)
    bracket[facet] = np.stack([lower, upper], axis=1)[(np.cumsum(is_seen) - 1)[vertex]]
    return bracket


def _upper(seen: Weighed, centre: Float64[np.ndarray, "dims"]) -> Float64[np.ndarray, "vertices"]:
    """The length of the step to each vertex, rounded up; infinite where its place is not proved."""
    growth = 1.0 + 2.0 * (len(centre) + 4) * _UNIT
    away = np.linalg.norm(np.abs(seen.point - centre) * growth + seen.error, axis=1)
    return np.nan_to_num(away * growth + TINY, nan=np.inf)


def _lower(
    seen: Weighed,
    on: Int16[np.ndarray, "vertices on"],
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    centre: Float64[np.ndarray, "dims"],
) -> Float64[np.ndarray, "vertices"]:
    r"""Lower bounds of the distance of every facet whose signs at the vertex fit its multipliers.

    Logits and rows are less those of the first expert. Where the multipliers sum to
    :math:`\sigma` and not to 0, the level adds :math:`\sigma (z_p(x) - z_0(x))`.
    """
    shift, error = shifted(weight, bias, centre)
    num, size = on.shape
    gamma, most = 2.0 * (size + 4) * _UNIT, 2.0 * error.max()
    tallest, longest = np.ptp(shift) + most, 2.0 * np.linalg.norm(weight, axis=1).max()
    weights, sizes = seen.multipliers, np.abs(seen.multipliers)
    reach = sizes.sum(axis=1)
    surplus = 1.01 * (np.abs(weights.sum(axis=1)) + gamma * reach)
    rise, loss = np.zeros(num), most * reach
    total, total_reach = np.zeros((2, num, len(centre)))
    first_shift, first_row = shift[on[:, 0]], weight[on[:, 0]]
    for r in range(1, size):
        gap, slope = shift[on[:, r]] - first_shift, weight[on[:, r]] - first_row
        rise -= weights[:, r] * gap
        loss += gamma * sizes[:, r] * np.abs(gap)
        slope *= weights[:, r, None]
        total += slope
        total_reach += np.abs(slope)
    growth = 1.0 + 2.0 * (len(centre) + 4) * _UNIT
    length = np.linalg.norm(np.abs(total) + gamma * total_reach, axis=1) * growth
    length += 1.01 * surplus * longest + TINY
    rise -= 1.01 * (loss + surplus * tallest) + TINY
    return np.maximum(rise * (1.0 - 8.0 * _UNIT), 0.0) / length
