"""Segments of straight lines: where the choice of any rule changes, between proved pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from moegeom.core.router import LogitMap, Rule
from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.geometry.boundary.curved import ScoreCurve
from moegeom.kernels.cpu import INNER, kernel
from moegeom.kernels.cpu.score_curve import KernelCurve, curve_at, curve_of
from moegeom.routing_cells.plane.raster import (
    CHUNK,
    FLOOR,
    SPARE,
    UNIT,
    Enclosure,
    certain_choice,
    compared_ranges,
)

#: Pieces that a segment begins with, and how often one that is not proved is halved.
_PIECES, _HALVINGS = 8, 18


@dataclass(frozen=True, eq=False)
class BracketedChanges:
    """Changes of the chosen set on each segment, each between two points with different sets.

    ``at`` are the places of the changes of all segments in a row, from ``first[s]`` to
    ``first[s + 1]``. ``is_unknown`` where a piece was left, with one set at both of its ends, of
    which it is not proved that no other set is chosen in between.
    """

    is_unknown: Bool[np.ndarray, "segments"]
    first: Int64[np.ndarray, "segments+1"]
    at: Float64[np.ndarray, "changes"]


def bracketed_changes(
    logits_a: Float64[np.ndarray, "segments experts"],
    logits_b: Float64[np.ndarray, "segments experts"],
    rule: Rule,
    bias: Float64[np.ndarray, "experts"] | None,
) -> BracketedChanges:
    """Where the choice of any rule at (1 - t) a + t b changes for t from 0 to 1.

    Pieces are halved until one set is proved for each by :func:`certain_choice`; what is left at
    2^-21 of the segment holds a change where the sets beside it differ. Two changes within one such
    piece count as one. Oracle in tests: the rule at many points.
    """
    slope, segments = logits_b - logits_a, len(logits_a)
    size = np.maximum(np.abs(logits_a), np.abs(logits_b))
    segment = np.repeat(np.arange(segments), _PIECES)
    low = np.tile(np.arange(_PIECES) / _PIECES, segments)
    width, proved = 1.0 / _PIECES, []
    step, loop = max(CHUNK // logits_a.shape[1], 1), _loop_of(rule, bias, logits_a.shape[1])

    def enclosed(of: np.ndarray, at: np.ndarray, half: float) -> tuple[np.ndarray, np.ndarray]:
        logits = Enclosure(
            logits_a[of] + at[:, None] * slope[of],
            slope[of],
            np.zeros((len(of), slope.shape[1])),
            16.0 * UNIT * size[of] + FLOOR,
            np.column_stack([np.full(len(of), half), np.zeros(len(of))]),
        )
        is_one, chosen = certain_choice(compared_ranges(logits, rule, bias), rule)
        return is_one, chosen[is_one]

    for halving in range(_HALVINGS + 1):
        at, left, some = low + 0.5 * width, np.ones(len(segment), bool), []
        if loop is not None:
            is_one, chosen = loop(logits_a, slope, size, segment, at, 0.5 * width)
            left &= ~is_one
            proved.append((segment[is_one], at[is_one], np.full(len(chosen), width), chosen))
        rest = np.flatnonzero(left)
        is_open = width < _FINE and len(rest) > _MANY * len(segment)
        if loop is None or halving == _HALVINGS or is_open:
            some = [rest[start : start + step] for start in range(0, len(rest), step)]
        for rows in some:
            is_one, chosen = enclosed(segment[rows], at[rows], 0.5 * width)
            hits = rows[is_one]
            left[hits] = False
            proved.append((segment[hits], at[hits], np.full(len(hits), width), chosen))
        width *= 0.5
        segment = np.repeat(segment[left], 2)
        low = np.repeat(low[left], 2) + np.tile([0.0, width], int(left.sum()))
        if not len(segment):
            break
    of, at, widths, sets = (np.concatenate(part) for part in zip(*proved, strict=True))
    order = np.lexsort((at, of))
    of, at, widths, sets = of[order], at[order], widths[order], sets[order]
    follows = of[1:] == of[:-1]
    differs = (sets[1:] != sets[:-1]).any(axis=1)
    end, begin = at[:-1] + 0.5 * widths[:-1], at[1:] - 0.5 * widths[1:]
    change = np.flatnonzero(follows & differs)
    first = np.zeros(segments + 1, np.int64)
    np.cumsum(np.bincount(of[change], minlength=segments), out=first[1:])
    is_unknown = np.ones(segments, bool)
    is_unknown[of] = False  # of a segment without a proved piece nothing is known
    is_unknown[of[:-1][follows & ~differs & (begin - end > 1e-12)]] = True
    return BracketedChanges(is_unknown, first, 0.5 * (end + begin)[change])


# ------------------------------------------------------------------------------------ compiled
#: Pieces shorter than this are looked at by :func:`certain_choice` where more than this share of
#: them is not proved, as the last ones are: the loop knows neither duels of groups nor fills.
_FINE, _MANY = 2.0**-7, 0.7


class _Compared(NamedTuple):
    """A rule as the loop takes it; without groups, one of all experts."""

    curve: KernelCurve
    multiplier: float
    bias: np.ndarray
    num_groups: int
    num_kept: int
    takes: int
    fill: float


def _loop_of(rule: Rule, bias: np.ndarray | None, experts: int) -> Callable[..., Any] | None:
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
        logit, units = (a[e] + at * slope[e]) * of.multiplier, size[e] * of.multiplier * UNIT
        value, _, steep = curve_at(curve, logit)
        width = abs(slope[e]) * of.multiplier * half + 16.0 * units
        bend = curve.log_slope * width
        bend = curve.log_slope * steep / (1.0 - bend) if bend < 0.9 else curve.bend
        bend = min(bend, curve.bend) * (1.0 + 1e-6)
        each[_VALUE, e] = value + of.bias[e]
        each[_CHANGE, e] = steep * slope[e] * of.multiplier * half
        rest = 0.5 * bend * width * width + curve.steepest * 96.0 * units + SPARE * width * steep
        each[_REST, e] = rest + 64.0 * UNIT * (abs(value) + abs(of.bias[e])) + FLOOR


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
def _are_kept(of, each, tops, scores, is_kept):
    """Marks the groups that are kept in the middle; are they on the whole piece?"""
    size = each.shape[1] // of.num_groups
    for g in range(of.num_groups):
        first, second = g * size, -1
        for e in range(g * size + 1, (g + 1) * size):
            if each[_VALUE, e] > each[_VALUE, first]:
                first, second = e, first
            elif second < 0 or each[_VALUE, e] > each[_VALUE, second]:
                second = e
        tops[g, 0], tops[g, 1], is_kept[g] = first, second, False
        scores[g] = each[_VALUE, first] + (each[_VALUE, second] if of.takes == 2 else 0.0)
    for _ in range(of.num_kept):
        best = -1
        for g in range(of.num_groups):
            if not is_kept[g] and (best < 0 or scores[g] > scores[best]):
                best = g
        is_kept[best] = True
    for g in range(of.num_groups):
        for h in range(of.num_groups):
            if is_kept[g] and not is_kept[h] and not _is_group_ahead(of, each, tops, size, g, h):
                return False
    return True


@kernel(error_model="numpy")
def _prove(of, a, slope, size, segment, at, half, is_one, chosen):
    experts, k = a.shape[1], chosen.shape[1]
    each, rivals = np.empty((3, experts)), np.empty(experts)
    tops, scores = np.empty((of.num_groups, 2), np.int64), np.empty(of.num_groups)
    is_kept, per_group = np.ones(of.num_groups, np.bool_), experts // of.num_groups
    for piece in range(len(segment)):
        s = segment[piece]
        _load(of, a[s], slope[s], size[s], at[piece], half, each)
        if of.num_groups > 1 and not _are_kept(of, each, tops, scores, is_kept):
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
