"""The nearest curved wall of one token, compiled; see :mod:`moegeom.geometry.boundary.curved`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.geometry.boundary.linear import NEVER
from moegeom.geometry.boundary.score_curve import ScoreCurve
from moegeom.kernels.cpu._inner import INNER
from moegeom.kernels.cpu.curved.score_curve import Curve, curve_at, curve_of
from moegeom.kernels.cpu.curved.wall import NO_WALL_FOUND, STACK_SHAPE, wall_distance

_SAFE = 1.0 + 1e-9
_FAR = 1e200
#: Typed as other experts are: a literal would be compiled apart.
_NOBODY = np.int64(-1)


class Walls(NamedTuple):
    """Arrays of a router as compiled loops take them."""

    curve: Curve
    multiplier: float
    bias: np.ndarray
    length: np.ndarray
    longest: float
    gram: np.ndarray
    across: np.ndarray
    inverse: np.ndarray


class Work(NamedTuple):
    """What one call of a kernel works in."""

    z: np.ndarray
    q: np.ndarray
    slope: np.ndarray
    reach: np.ndarray
    is_open: np.ndarray
    stack: np.ndarray


def walls_of(rows: CurvedRows) -> Walls:
    """The walls of a rule, as arrays."""
    # a probability is the sigmoid of its log-odds
    curve = ScoreCurve("sigmoid") if rows.curve is None else rows.curve
    return Walls(
        curve_of(curve),
        float(rows.multiplier),
        rows.bias,
        rows.length,
        float(rows.length.max()),
        rows.gram,
        rows.across,
        rows.distances.inverse,
    )


def work_for(num_experts: int) -> Work:
    """Room for the numbers of one token and for the search."""
    return Work(
        z=np.empty(num_experts),
        q=np.empty(num_experts),
        slope=np.empty(num_experts),
        reach=np.empty(num_experts),
        is_open=np.empty(num_experts, dtype=np.bool_),
        stack=np.empty(STACK_SHAPE),
    )


@njit(**INNER)
def load_token(walls, logits, work):
    """Logits times the multiplier, selection scores and slopes of one token."""
    for expert in range(logits.shape[0]):
        z = logits[expert] * walls.multiplier
        score, _, slope = curve_at(walls.curve, z)
        work.z[expert] = z
        work.q[expert] = score + walls.bias[expert]
        work.slope[expert] = slope


@njit(**INNER)
def pair_wall(walls, work, i, j, limit):
    """Bounds of the distance at which j catches up with i, and both logits there."""
    u = work.z[i]
    v = work.z[j]
    delta = walls.bias[i] - walls.bias[j]
    if delta == 0.0:
        inverse = walls.inverse[i, j]
        distance = max(u - v, 0.0) * inverse
        if distance >= min(limit, NEVER):
            return NO_WALL_FOUND
        step = distance * inverse
        gram = walls.gram
        there = u - step * (gram[i, i] - gram[i, j])
        return distance, distance, there, v - step * (gram[i, j] - gram[j, j])
    first = walls.length[i]
    along = walls.gram[i, j] / first if first > 0.0 else walls.length[j]
    return wall_distance(
        walls.curve, u, v, first, along, walls.across[i, j], delta, limit, work.stack
    )


@njit(**INNER)
def slope_bounds(walls, slope, factor):
    """Least and largest slope where it changes by ``factor`` at most."""
    return slope / factor, min(max(slope, 1e-300) * factor, walls.curve.steepest)


@njit(**INNER)
def slope_factor(walls, radius):
    """By how much any slope may change within ``radius``."""
    exponent = min(radius, _FAR) * walls.curve.log_slope * walls.longest
    return math.exp(min(exponent, 600.0)) * _SAFE


@njit(**INNER)
def _steepest_difference(walls, work, i, j, factor):
    squared = 0.0
    gram = walls.gram
    for s in slope_bounds(walls, work.slope[i], factor):
        for t in slope_bounds(walls, work.slope[j], factor):
            value = s * s * gram[i, i] - 2.0 * s * t * gram[i, j] + t * t * gram[j, j]
            squared = max(squared, value)
    return math.sqrt(squared)


@njit(**INNER)
def nearest_wall(walls, work, members):
    """Lower and upper bound, pair and logits there, between ``members`` and ``work.is_open``."""
    q = work.q
    is_open = work.is_open
    first_out = _NOBODY
    for expert in range(q.shape[0]):
        if is_open[expert] and (first_out < 0 or q[expert] > q[first_out]):
            first_out = expert
    if first_out < 0 or members.shape[0] == 0:
        return math.inf, math.inf, _NOBODY, _NOBODY, math.nan, math.nan
    last = members[-1]
    lower, upper, at_out, at_in = pair_wall(walls, work, last, first_out, math.inf)
    out, entering = (last, first_out) if upper < math.inf else (_NOBODY, _NOBODY)
    lower = min(lower, upper)
    factor = slope_factor(walls, upper)
    far = min(upper, _FAR)
    for expert in range(q.shape[0]):
        most = slope_bounds(walls, work.slope[expert], factor)[1]
        work.reach[expert] = far * most * walls.length[expert] * _SAFE
    for rank in range(members.shape[0] - 1, -1, -1):
        i = members[rank]
        least = q[i] - work.reach[i]
        if least > q[first_out] + far * walls.curve.steepest * walls.longest * _SAFE:
            continue
        for j in range(q.shape[0]):
            if least > q[j] + work.reach[j] or not is_open[j]:
                continue
            if upper == 0.0 or (i == last and j == first_out):
                continue
            steepest = _steepest_difference(walls, work, i, j, factor)
            if q[i] - q[j] > min(upper, _FAR) * steepest * _SAFE:
                continue
            found = pair_wall(walls, work, i, j, upper)
            lower = min(lower, found[0])
            if found[1] < upper:
                upper, at_out, at_in = found[1], found[2], found[3]
                out, entering = i, j
            lower = min(lower, upper)
    return lower, upper, out, entering, at_out, at_in
