"""Scores of one token and bounds of them, compiled.

A constraint is up to four experts with their signs; what a direction does to logits is given by
coefficients of their rows and, last, one of the mean row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.geometry.boundary.curved_rows import CurvedRows
from moegeom.geometry.boundary.token_scores import BISECTIONS
from moegeom.kernels.cpu._inner import INNER
from moegeom.kernels.cpu.curved.score_curve import curve_at
from moegeom.kernels.cpu.curved.walls import Walls, Work, load_token

_ROUNDING = 1e-14


class Grouping(NamedTuple):
    """Groups of a rule (one of all experts without them), and bounds for softmax."""

    is_softmax: bool
    stretch: np.ndarray
    widest: float
    num_groups: int
    num_kept: int
    takes: int
    fill: float
    slopes: np.ndarray


class Scratch(NamedTuple):
    """What bounds of one token are worked out in, beside :class:`Work`."""

    odds: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    there: np.ndarray
    direction: np.ndarray
    inside: np.ndarray
    allowed: np.ndarray
    kept: np.ndarray
    kept_there: np.ndarray
    members: np.ndarray


def grouping_of(rows: CurvedRows) -> Grouping:
    """The groups of a rule, as arrays."""
    is_softmax = rows.curve is None
    stretch, widest = rows.widest if is_softmax else rows.length, float(rows.widest.max())
    groups = rows.groups
    if groups is None:
        return Grouping(is_softmax, stretch, widest, 1, 1, 1, -np.inf, np.zeros((1, 1)))
    size = rows.num_experts // groups.num_groups
    takes = 2 if groups.score == "top2_sum" and size > 1 else 1
    return Grouping(
        is_softmax,
        stretch,
        widest,
        groups.num_groups,
        groups.num_kept,
        takes,
        float(groups.fill),
        rows.group_slopes,
    )


def scratch_for(num_experts: int, num_groups: int) -> Scratch:
    """Room for the numbers of one token."""
    return Scratch(
        odds=np.empty(num_experts),
        mean=np.empty(num_experts),
        low=np.empty(num_experts),
        high=np.empty(num_experts),
        there=np.empty(num_experts),
        direction=np.empty(num_experts),
        inside=np.empty(num_experts, dtype=np.bool_),
        allowed=np.empty(num_experts, dtype=np.bool_),
        kept=np.empty(num_groups, dtype=np.bool_),
        kept_there=np.empty(num_groups, dtype=np.bool_),
        members=np.empty(num_experts, dtype=np.int64),
    )


@njit(**INNER)
def load_scores(walls: Walls, groups, logits, work: Work, scratch):
    """Scores, slopes and log-odds of one token; returns the square of the mean row."""
    if not groups.is_softmax:
        load_token(walls, logits, work)
        for expert in range(work.z.shape[0]):
            scratch.odds[expert] = work.z[expert]
            scratch.mean[expert] = 0.0
        return 0.0
    z, p, mean = work.z, work.slope, scratch.mean
    top = 0
    for expert in range(z.shape[0]):
        z[expert] = logits[expert] * walls.multiplier
        if z[expert] > z[top]:
            top = expert
    others = 0.0
    for expert in range(z.shape[0]):
        p[expert] = math.exp(z[expert] - z[top])
        if expert != top:
            others += p[expert]
    total = others + p[top]
    for expert in range(z.shape[0]):
        rest = others if expert == top else total - p[expert]
        scratch.odds[expert] = z[expert] - z[top] - math.log(rest) if rest > 0.0 else math.inf
        p[expert] /= total
        work.q[expert] = p[expert] + walls.bias[expert]
    for expert in range(z.shape[0]):
        mean[expert] = 0.0
    for expert in range(z.shape[0]):
        for other in range(z.shape[0]):
            mean[other] += p[expert] * walls.gram[expert, other]
    square = 0.0
    for expert in range(z.shape[0]):
        square += p[expert] * mean[expert]
    return square


@njit(**INNER)
def bound_scores(walls, groups, scratch, radius):
    """Least and largest selection score of each expert within a distance."""
    for expert in range(scratch.odds.shape[0]):
        reach = radius * groups.stretch[expert]
        low = curve_at(walls.curve, scratch.odds[expert] - reach)[0]
        scratch.low[expert] = low + walls.bias[expert]
        high = curve_at(walls.curve, scratch.odds[expert] + reach)[0]
        scratch.high[expert] = high + walls.bias[expert]


@njit(**INNER)
def _bend(walls, groups, scratch, square, experts, signs, number, radius):
    out = 0.0
    variance = groups.widest * groups.widest / 4.0
    for n in range(number):
        expert = experts[n]
        if not groups.is_softmax:
            out += walls.curve.bend * walls.length[expert] ** 2
            continue
        odds = scratch.odds[expert] + radius * groups.stretch[expert]
        largest = curve_at(walls.curve, odds)[0]
        if signs[n] > 0.0:
            out += largest * variance
            continue
        own = walls.gram[expert, expert]
        squared = max(own - 2.0 * scratch.mean[expert] + square, 0.0)
        from_mean = math.sqrt(squared + _ROUNDING * own) + radius * variance
        out += largest * min(from_mean, groups.stretch[expert]) ** 2
    return out


@njit(**INNER)
def _root(bend, slope, gap):
    root = slope + math.sqrt(slope * slope + 2.0 * bend * gap)
    return 2.0 * gap / root if root > 0.0 else math.inf


@njit(**INNER)
def reach_of(walls, groups, scratch, square, experts, signs, number, gap, slope, radius):
    """No input within this distance breaks the constraint."""
    bend = _bend(walls, groups, scratch, square, experts, signs, number, radius)
    reach = min(_root(bend, slope, gap), radius)
    if not groups.is_softmax:
        return reach
    high = radius
    for _ in range(BISECTIONS if reach < radius else 0):
        middle = (reach + high) / 2.0
        bend = _bend(walls, groups, scratch, square, experts, signs, number, middle)
        root = _root(bend, slope, gap)
        if root >= middle:
            reach = middle
        else:
            reach = max(reach, root)
            high = middle
    return max(reach, 2.0 * gap / groups.widest) if groups.widest > 0.0 else reach


@njit(**INNER)
def steepest_descent(
    walls, groups, work, scratch, square, experts, signs, number, coefficients, of_logits
):
    """Slope of a constraint; the coefficients of its steepest descent, of unit length.

    ``of_logits``: of the same sum of logits instead of scores.
    """
    excess = 0.0
    own = 0.0
    squared = 0.0
    with_mean = 0.0
    for n in range(number):
        e = experts[n]
        weight = signs[n] * (1.0 if of_logits else work.slope[e])
        if groups.is_softmax:
            excess += weight
        own += walls.gram[e, e] * weight * weight
        with_mean += weight * scratch.mean[e]
        for m in range(number):
            other = experts[m]
            of_other = signs[m] * (1.0 if of_logits else work.slope[other])
            squared += weight * of_other * walls.gram[e, other]
    squared += excess * (excess * square - 2.0 * with_mean)
    slope = math.sqrt(max(squared, 0.0) + _ROUNDING * own)
    unit = 1.0 / slope if slope > 0.0 else 0.0
    for n in range(number):
        coefficients[n] = -signs[n] * (1.0 if of_logits else work.slope[experts[n]]) * unit
    coefficients[4] = excess * unit
    return slope
