"""The dual active-set search for the nearest point of a cell or wall, in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numba import njit

from moegeom.kernels.cpu._inner import INNER

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


@njit(nogil=True, cache=True)
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


class Work(NamedTuple):
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
    return Work(
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


@njit(**INNER)
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


@njit(**INNER)
def evaluate(columns, shift, step, logits):
    """The logits after a step."""
    for j in range(len(shift)):
        logits[j] = shift[j]
    for c in range(len(step)):
        for j in range(len(shift)):
            logits[j] += columns[c, j] * step[c]


@njit(**INNER)
def ends(logits, k, out, into):
    """The least of the chosen and the greatest of the others, but for a pair."""
    low, high, i, j = np.inf, -np.inf, -1, -1
    for m in range(k):
        if logits[m] < low and m != out:
            low, i = logits[m], m
    for m in range(k, len(logits)):
        if logits[m] > high and m != into:
            high, j = logits[m], m
    return i, j, low, high


@njit(**INNER)
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


@njit(**INNER)
def appended(q, gain, basis, upper, height, away):
    """Takes what was projected last into the basis."""
    root = math.sqrt(gain)
    for m in range(q):
        upper[m, q] = height[m]
    upper[q, q] = root
    for c in range(len(away)):
        basis[q, c] = away[c] / root


@njit(**INNER)
def _dropped(columns, q, leaving, pairs, multipliers, basis, upper, height, away):
    """Without one of the active pairs; how many are left."""
    for m in range(leaving, q - 1):
        pairs[m, 0], pairs[m, 1] = pairs[m + 1, 0], pairs[m + 1, 1]
        multipliers[m] = multipliers[m + 1]
        _, gain = projected(columns, pairs[m, 0], pairs[m, 1], m, basis, height, away)
        appended(m, gain, basis, upper, height, away)
    return q - 1


@njit(**INNER)
def search(work, limits, k, out, into):
    """Where the search ended, and how many pairs hold its step.

    With both ``out`` and ``into`` the two tie, on a wall; with one of them the cell is cut to where
    that one is the least of the chosen, or the greatest of the others; with none it is whole.
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
