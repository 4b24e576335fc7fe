"""Pieces of segments on which one set is chosen, proved in a loop for scores of one logit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from moegeom.core.router import LogitMap, Rule
from moegeom.geometry.boundary.curved import ScoreCurve
from moegeom.kernels.cpu import INNER, kernel
from moegeom.kernels.cpu.curved_distance import keep_groups, tops_of
from moegeom.kernels.cpu.score_curve import KernelCurve, curve_at, curve_of

#: Unit of rounding, and what bounds take beside it, as enclosures of a plane do.
_UNIT, _SPARE, _FLOOR = 2.0**-53, 2.0**-40, 1e-150


class _Compared(NamedTuple):
    """A rule as the loop takes it; without groups, one of all experts."""

    curve: KernelCurve
    multiplier: float
    bias: np.ndarray
    num_groups: int
    num_kept: int
    takes: int
    fill: float


def segment_loop(rule: Rule, bias: np.ndarray | None, experts: int) -> Callable[..., Any] | None:
    """What proves most pieces of scores of one logit; None for softmax."""
    groups, logit_map = rule.groups, LogitMap() if rule.logit_map is None else rule.logit_map
    if rule.score == "softmax":
        return None
    of_groups = (1, 1, 1, -np.inf)
    if groups is not None:
        takes = 2 if groups.score == "top2_sum" and experts > groups.num_groups else 1
        of_groups = (groups.num_groups, groups.num_kept, takes, float(groups.fill))
    compared = _Compared(
        curve_of(ScoreCurve(rule.score, float(logit_map.soft_cap))),
        float(logit_map.multiplier),
        np.zeros(experts) if bias is None else np.ascontiguousarray(bias, np.float64),
        *of_groups,
    )

    def loop(
        a: np.ndarray, slope: np.ndarray, size: np.ndarray, of: np.ndarray, *at: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        is_one, chosen = np.zeros(len(of), bool), np.empty((len(of), rule.top_k), np.int64)
        _prove(compared, *map(np.ascontiguousarray, (a, slope, size)), of, *at, is_one, chosen)
        return is_one, np.sort(chosen[is_one], axis=1)

    return loop


#: Rows of the numbers of experts on one piece: score in the middle, its linear change up to the
#: end, and a bound of the rest.
_VALUE, _CHANGE, _REST = range(3)


@njit(**INNER)
def _load(of, a, slope, size, at, half, each):
    """First-order enclosures of the scores on one piece, as :func:`compared_ranges` has them."""
    curve = of.curve
    for e in range(len(a)):
        logit, units = (a[e] + at * slope[e]) * of.multiplier, size[e] * of.multiplier * _UNIT
        value, _, steep = curve_at(curve, logit)
        width = abs(slope[e]) * of.multiplier * half + 16.0 * units
        bend = curve.log_slope * width
        bend = curve.log_slope * steep / (1.0 - bend) if bend < 0.9 else curve.bend
        bend = min(bend, curve.bend) * (1.0 + 1e-6)
        each[_VALUE, e] = value + of.bias[e]
        each[_CHANGE, e] = steep * slope[e] * of.multiplier * half
        rest = 0.5 * bend * width * width + curve.steepest * 96.0 * units + _SPARE * width * steep
        each[_REST, e] = rest + 64.0 * _UNIT * (abs(value) + abs(of.bias[e])) + _FLOOR


@njit(**INNER)
def _is_ahead(each, i, j):
    """Is expert i ahead of j on the whole piece?"""
    gap = each[_VALUE, i] - each[_VALUE, j] - abs(each[_CHANGE, i] - each[_CHANGE, j])
    return gap > each[_REST, i] + each[_REST, j]


@njit(**INNER)
def _is_group_ahead(of, each, tops, size, g, h):
    """Is group g ahead of h, by the best of g in the middle and all that h may be counted by?"""
    a, b = tops[g, 0], tops[g, 1]
    if of.takes == 1:
        number = 0
        for c in range(h * size, (h + 1) * size):
            number += _is_ahead(each, a, c)
        return number == size
    value, change = each[_VALUE, a] + each[_VALUE, b], each[_CHANGE, a] + each[_CHANGE, b]
    rest, most = each[_REST, a] + each[_REST, b], -np.inf
    low = value - abs(change) - rest
    for c in range(h * size, (h + 1) * size):
        most = max(most, each[_VALUE, c] + abs(each[_CHANGE, c]) + each[_REST, c])
    for c in range(h * size, (h + 1) * size):
        if each[_VALUE, c] + abs(each[_CHANGE, c]) + each[_REST, c] + most < low:
            continue
        for d in range(c + 1, (h + 1) * size):
            gap = value - each[_VALUE, c] - each[_VALUE, d]
            gap -= abs(change - each[_CHANGE, c] - each[_CHANGE, d])
            if not gap > rest + each[_REST, c] + each[_REST, d]:
                return False
    return True


@njit(**INNER)
def _are_kept(of, each, tops, is_kept):
    """Marks the groups that are kept in the middle; are they on the whole piece?"""
    size = each.shape[1] // of.num_groups
    keep_groups(of, each[_VALUE], is_kept)
    for g in range(of.num_groups):
        tops[g, 0], tops[g, 1] = tops_of(each[_VALUE], g * size, (g + 1) * size)
    for g in range(of.num_groups):
        for h in range(of.num_groups):
            if is_kept[g] and not is_kept[h] and not _is_group_ahead(of, each, tops, size, g, h):
                return False
    return True


@kernel(error_model="numpy")
def _prove(of, a, slope, size, segment, at, half, is_one, chosen):
    experts, k = a.shape[1], chosen.shape[1]
    each, rivals = np.empty((3, experts)), np.empty(experts)
    tops = np.empty((of.num_groups, 2), np.int64)
    is_kept, per_group = np.ones(of.num_groups, np.bool_), experts // of.num_groups
    for piece in range(len(segment)):
        s = segment[piece]
        _load(of, a[s], slope[s], size[s], at[piece], half, each)
        if of.num_groups > 1 and not _are_kept(of, each, tops, is_kept):
            continue
        for g in range(of.num_groups):
            for e in range(g * per_group, (g + 1) * per_group):
                rivals[e] = each[_VALUE, e] if is_kept[g] else -np.inf
        lowest = np.inf
        for rank in range(k):
            best = 0
            for e in range(1, experts):
                if rivals[e] > rivals[best]:
                    best = e
            low = rivals[best] - abs(each[_CHANGE, best]) - each[_REST, best]
            chosen[piece, rank], rivals[best], lowest = best, -np.inf, min(lowest, low)
        is_proved = lowest > of.fill
        for e in range(experts):
            high = rivals[e] + abs(each[_CHANGE, e]) + each[_REST, e]
            if is_proved and high >= lowest:
                for rank in range(k):
                    is_proved &= _is_ahead(each, chosen[piece, rank], e)
        is_one[piece] = is_proved
