"""The loops of :mod:`moegeom.geometry.boundary.barriers`: one pass over the pairs of each point."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.core.shapes import Float64, Int64
from moegeom.geometry.boundary.barriers import COINCIDES, NOTHING, Barriers
from moegeom.geometry.boundary.curved import ScoreCurve
from moegeom.geometry.boundary.linear import NEVER
from moegeom.kernels.cpu import INNER, kernel
from moegeom.kernels.cpu.curved_distance import keep_groups, tops_of
from moegeom.kernels.cpu.score_curve import KernelCurve, curve_at, curve_of


class _Loops(NamedTuple):
    """A rule and its cells as compiled loops take them; without groups, one of all experts."""

    curve: KernelCurve
    multiplier: float
    bias: np.ndarray
    is_affine: bool
    is_softmax: bool
    gram: np.ndarray
    pairs: np.ndarray
    inside: np.ndarray
    outside: np.ndarray
    scale: np.ndarray
    num_groups: int
    num_kept: int
    takes: int
    fill: float


#: Rows of the numbers of experts at one point: selection score, and the same masked; slope of the
#: score, product of the row with the mean one less half of the square of that, squared slope.
_VALUE, _MASKED, _SLOPE, _MEAN, _SQUARE = range(5)
#: Of groups: the score, whether it is kept, and whether an expert of it is chosen or would come.
_SCORE, _KEPT, _CHOSEN, _COMES = range(4)


@njit(**INNER)
def _load_probabilities(of, logits, each):
    """Softmax of the logits of one point, and its mean row."""
    experts, largest, total, square = len(logits), -np.inf, 0.0, 0.0
    for e in range(experts):
        largest = max(largest, logits[e] * of.multiplier)
        each[_MEAN, e] = 0.0
    for e in range(experts):
        each[_SLOPE, e] = math.exp(logits[e] * of.multiplier - largest)
        total += each[_SLOPE, e]
    for e in range(experts):
        each[_SLOPE, e] /= total
        each[_VALUE, e] = each[_SLOPE, e] + of.bias[e]
        for other in range(experts):
            each[_MEAN, other] += each[_SLOPE, e] * of.gram[e, other]
    for e in range(experts):
        square += each[_SLOPE, e] * each[_MEAN, e]
        each[_SLOPE, e] *= of.multiplier
    for e in range(experts):
        each[_MEAN, e] -= 0.5 * square


@njit(**INNER)
def _load(of, logits, each):
    """Scores of one point and their slopes along the noise."""
    if of.is_softmax:
        _load_probabilities(of, logits, each)
    else:
        for e in range(len(logits)):
            value, _, slope = curve_at(of.curve, logits[e] * of.multiplier)
            each[_VALUE, e], each[_SLOPE, e] = value + of.bias[e], slope * of.multiplier
            each[_MEAN, e] = 0.0
    for e in range(len(logits)):
        own = of.gram[e, e] - 2.0 * each[_MEAN, e]
        each[_SQUARE, e] = own * each[_SLOPE, e] * each[_SLOPE, e]
        each[_MASKED, e] = each[_VALUE, e]


@njit(**INNER)
def _load_groups(of, ours, each, groups, tops):
    """Scores and best experts of the groups, which of them are kept, and who is masked."""
    size, last = each.shape[1] // of.num_groups, np.inf
    is_kept = np.empty(of.num_groups, np.bool_)
    keep_groups(of, each[_VALUE], is_kept)
    for g in range(of.num_groups):
        first, second = tops_of(each[_VALUE], g * size, (g + 1) * size)
        tops[g, 0], tops[g, 1] = first, second
        groups[_SCORE, g] = each[_VALUE, first] + (each[_VALUE, second] if of.takes == 2 else 0.0)
        groups[_KEPT, g], groups[_CHOSEN, g] = 1.0 if is_kept[g] else 0.0, 0.0
    for e in range(each.shape[1]):
        if groups[_KEPT, e // size] == 0.0:
            each[_MASKED, e] = of.fill
    for e in ours:
        groups[_CHOSEN, e // size] = 1.0
        last = min(last, each[_MASKED, e])
    for g in range(of.num_groups):
        groups[_COMES, g] = 1.0 if each[_VALUE, tops[g, 0]] > last else 0.0


@njit(**INNER)
def _product(of, each, one, other):
    """Product of the slopes of two scores along the noise."""
    rows = of.gram[one, other] - each[_MEAN, one] - each[_MEAN, other]
    return rows * each[_SLOPE, one] * each[_SLOPE, other]


@njit(**INNER)
def _over_root(gap, square):
    """A gap over the root of a square; inf where nothing closes it, 0 where there is none."""
    ratio = gap / math.sqrt(square if square > 0.0 else 0.0)
    ratio = 0.0 if ratio != ratio else ratio  # of two that are masked, or equal, with one slope
    return ratio if ratio <= NEVER else np.inf


@njit(**INNER)
def _load_swaps(of, each, groups, tops, out):
    """Of a kept group and a dropped one, where their exchange would change the set."""
    for g in range(of.num_groups):
        for h in range(of.num_groups):
            out[g * of.num_groups + h] = np.inf
            is_swap = groups[_KEPT, g] == 1.0 and groups[_KEPT, h] == 0.0
            if not is_swap or (groups[_CHOSEN, g] == 0.0 and groups[_COMES, h] == 0.0):
                continue
            square = 0.0
            for i in range(of.takes):
                for j in range(of.takes):
                    square += _product(of, each, tops[g, i], tops[g, j])
                    square += _product(of, each, tops[h, i], tops[h, j])
                    square -= 2.0 * _product(of, each, tops[g, i], tops[h, j])
            gap = groups[_SCORE, g] - groups[_SCORE, h]
            out[g * of.num_groups + h] = _over_root(gap, square)


@njit(**INNER)
def _load_pairs(of, c, each, groups, behind, out):
    """Of a chosen expert and another one; all that are masked are the first of them."""
    others, size = of.outside.shape[1], each.shape[1] // of.num_groups
    is_first = True
    for n in range(others):
        e = of.outside[c, n]
        is_masked = groups[_KEPT, e // size] == 0.0
        for row in range(5):
            behind[row, n] = each[row, e]
        if is_masked:
            behind[_SLOPE, n], behind[_SQUARE, n] = 0.0, 0.0
            behind[_MASKED, n] = of.fill if is_first else -np.inf
            is_first = False
    for i in range(of.inside.shape[1]):
        e = of.inside[c, i]
        is_masked = groups[_KEPT, e // size] == 0.0
        own, mean = each[_MASKED, e], each[_MEAN, e]
        slope = 0.0 if is_masked else -2.0 * each[_SLOPE, e]
        square = 0.0 if is_masked else each[_SQUARE, e]
        for n in range(others):
            rows = of.pairs[c, i, n] - mean - behind[_MEAN, n]
            apart = square + behind[_SQUARE, n] + rows * slope * behind[_SLOPE, n]
            out[i * others + n] = _over_root(own - behind[_MASKED, n], apart)


@kernel(error_model="numpy")
def _sigmas(of, cell, logits, out):
    experts, others = logits.shape[1], of.outside.shape[1]
    each, behind = np.empty((5, experts)), np.empty((5, others))
    groups, tops = np.ones((4, of.num_groups)), np.empty((of.num_groups, 2), np.int64)
    for point in range(len(cell)):
        c, row = cell[point], out[point]
        if of.is_affine:
            for n in range(others):
                behind[_VALUE, n] = logits[point, of.outside[c, n]]
            for i in range(of.inside.shape[1]):
                own = logits[point, of.inside[c, i]]
                for n in range(others):
                    ratio = (own - behind[_VALUE, n]) * of.pairs[c, i, n]
                    row[i * others + n] = (ratio if ratio <= NEVER else np.inf) / of.scale[c]
            continue
        _load(of, logits[point], each)
        if of.num_groups > 1:
            _load_groups(of, of.inside[c], each, groups, tops)
            _load_swaps(of, each, groups, tops, row[of.inside.shape[1] * others :])
        _load_pairs(of, c, each, groups, behind, row)
        for n in range(len(row)):
            row[n] /= of.scale[c]


@kernel(error_model="numpy")
def _staying(before, after, step, out):
    for point in range(len(before)):
        total, most = 0.0, 0.0
        for n in range(before.shape[1]):
            start, stop = before[point, n], after[point, n]
            crossing = 0.0
            if start <= 0.0 or stop <= 0.0:
                crossing = 1.0
            elif start * stop * (2.0 / step) < NOTHING:
                crossing = math.exp(-start * stop * (2.0 / step))
            total += crossing
            most = max(most, crossing)
        out[0, point], out[1, point] = max(1.0 - total, 0.0), 1.0 - most


@kernel()
def _two_least(ahead, is_start, number, least, following):
    for point in range(len(ahead)):
        best = 0
        for n in range(ahead.shape[1]):
            if ahead[point, n] < ahead[point, best]:
                best = n
        number[point], least[point], following[point] = best, ahead[point, best], np.inf
        bound = (1.0 + COINCIDES) * least[point]
        for n in range(ahead.shape[1]):
            if (n != best) if is_start else (ahead[point, n] > bound):
                following[point] = min(following[point], ahead[point, n])


class CompiledBarriers(Barriers):
    """The same barriers, by compiled loops."""

    @cached_property
    def _loops(self) -> _Loops:
        rule, groups, experts = self.rule, self.rule.groups, len(self.moves)
        logit_map, is_softmax = rule.logit_map, rule.score == "softmax"
        is_plain = rule.is_affine or is_softmax
        cap = math.inf if logit_map is None or rule.is_affine else float(logit_map.soft_cap)
        curve = ScoreCurve("identity") if is_plain else ScoreCurve(rule.score, cap)
        of_groups = (1, 1, 1, -np.inf)
        if groups is not None:
            takes = 2 if groups.score == "top2_sum" and experts > groups.num_groups else 1
            of_groups = (groups.num_groups, groups.num_kept, takes, float(groups.fill))
        bias = np.zeros(experts) if self.bias is None else self.bias
        arrays = (self._gram, self._of_pairs, self.inside, self.outside, self.scale)
        gram, pairs, inside, outside, scale = map(np.ascontiguousarray, arrays)
        return _Loops(
            curve_of(curve),
            1.0 if logit_map is None else float(logit_map.multiplier),
            np.ascontiguousarray(bias, np.float64),
            rule.is_affine,
            is_softmax,
            gram,
            pairs,
            inside,
            outside,
            scale,
            *of_groups,
        )

    def sigmas(
        self,
        cell: Int64[np.ndarray, "points"],
        logits: Float64[np.ndarray, "points experts"],
        out: Float64[np.ndarray, "points barriers"] | None = None,
    ) -> Float64[np.ndarray, "points barriers"]:
        out = np.empty((len(cell), self.num_barriers)) if out is None else out
        _sigmas(self._loops, cell, np.ascontiguousarray(logits), out)
        return out

    def staying(
        self,
        before: Float64[np.ndarray, "paths barriers"],
        after: Float64[np.ndarray, "paths barriers"],
        step: float,
    ) -> Float64[np.ndarray, "2 paths"]:
        out = np.empty((2, len(before)))
        _staying(before, after, float(step), out)
        return out

    def two_least(
        self, ahead: Float64[np.ndarray, "walks barriers"], is_start: bool
    ) -> tuple[
        Int64[np.ndarray, "walks"], Float64[np.ndarray, "walks"], Float64[np.ndarray, "walks"]
    ]:
        number, (least, following) = np.empty(len(ahead), np.int64), np.empty((2, len(ahead)))
        _two_least(ahead, is_start, number, least, following)
        return number, least, following
