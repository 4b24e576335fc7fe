"""Increasing scores of a single logit: value, slope, inverse, and bounds between two logits.

A curve is a score behind an optional soft cap, ``z -> s(cap * tanh(z / cap))``; a multiplier is
folded into logits and rows before. :mod:`moegeom.geometry.boundary.curved` has the numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numba import njit

from moegeom.geometry.boundary.curved import BENDS, ScoreCurve
from moegeom.kernels.cpu import UNCOUNTED

#: What compiled loops select a score by.
_CODES = {"identity": 0, "sigmoid": 1, "sqrt_softplus": 2}
_IDENTITY, _SIGMOID, _SQRT_SOFTPLUS = _CODES.values()


class KernelCurve(NamedTuple):
    """The numbers of a curve, from ``low`` to ``high``; ``own_``: of the score without its cap."""

    code: int
    soft_cap: float
    low: float
    high: float
    steepest: float
    log_slope: float
    bend: float
    convex_until: float
    own_low: float
    own_high: float
    own_steepest: float
    own_peak: float


def curve_of(curve: ScoreCurve) -> KernelCurve:
    """The curve in the layout that compiled loops take."""
    bends, own, cap = curve.bends, BENDS[curve.score], float(curve.soft_cap)
    code, (low, high) = _CODES[curve.score], (own.low, own.high)
    if math.isfinite(cap):
        low, high = (_own_at.py_func(code, end)[0] for end in (-cap, cap))
    return KernelCurve(
        code,
        cap,
        low,
        high,
        bends.steepest,
        bends.log_slope,
        bends.bend,
        bends.convex_until,
        own.low,
        own.high,
        own.steepest,
        own.peak,
    )


@njit(**UNCOUNTED)
def _own_at(code, t):
    if code == _IDENTITY:
        return t, math.inf, 1.0
    decay = math.exp(-abs(t))
    if code == _SIGMOID:
        larger = 1.0 / (1.0 + decay)
        smaller = decay * larger
        if t >= 0.0:
            return larger, smaller, larger * smaller
        return smaller, larger, larger * smaller
    score = math.sqrt(max(t, 0.0) + math.log1p(decay))
    sigmoid = (1.0 if t >= 0.0 else decay) / (1.0 + decay)
    return score, math.inf, sigmoid / (2.0 * score) if score > 0.0 else 0.0


@njit(**UNCOUNTED)
def curve_at(curve: KernelCurve, logit: float) -> tuple[float, float, float]:
    """Score, how far it is below the upper end of the range without a cap, and slope.

    The rest keeps its digits where the score saturates; it is inf for an unbounded score.
    """
    if math.isinf(curve.soft_cap):
        return _own_at(curve.code, logit)
    ratio = math.tanh(logit / curve.soft_cap)
    score, rest, slope = _own_at(curve.code, curve.soft_cap * ratio)
    return score, rest, slope * (1.0 - ratio * ratio)


@njit(**UNCOUNTED)
def curve_inverse(curve: KernelCurve, score: float, rest: float) -> tuple[float, float]:
    """Logit with this score, and the slope there; -inf or inf, and 0, outside the range.

    ``rest`` is how far it is below the upper end of the range without a cap.
    """
    if score <= curve.own_low:
        return -math.inf, 0.0
    if rest <= 0.0:
        return math.inf, 0.0
    inner = score
    slope = 1.0
    if curve.code == _SIGMOID:
        inner = math.log(score / rest)
        slope = score * rest
    elif curve.code == _SQRT_SOFTPLUS:
        square = score * score
        powers = -math.expm1(-square)
        inner = square + math.log(powers)
        slope = powers / (2.0 * score)
    if math.isinf(curve.soft_cap):
        return inner, slope
    ratio = inner / curve.soft_cap
    if abs(ratio) >= 1.0:
        return math.copysign(math.inf, ratio), 0.0
    return curve.soft_cap * math.atanh(ratio), slope * (1.0 - ratio * ratio)


@njit(**UNCOUNTED)
def curve_slopes(curve: KernelCurve, low: float, high: float) -> tuple[float, float]:
    """Least and largest slope between two logits, by the shape of s' and of the cap."""
    c = curve.soft_cap
    if math.isinf(c):
        first = _own_at(curve.code, low)[2] if math.isfinite(low) else 0.0
        last = _own_at(curve.code, high)[2] if math.isfinite(high) else 0.0
        inside = low < curve.own_peak < high
        return min(first, last), curve.own_steepest if inside else max(first, last)
    # the product of the least, and of the largest, values of both factors of the slope
    a = math.tanh(low / c)
    b = math.tanh(high / c)
    first = _own_at(curve.code, c * a)[2]
    last = _own_at(curve.code, c * b)[2]
    flat_first = 1.0 - a * a
    flat_last = 1.0 - b * b
    largest = curve.own_steepest if c * a < curve.own_peak < c * b else max(first, last)
    flattest = 1.0 if low < 0.0 < high else max(flat_first, flat_last)
    return min(flat_first, flat_last) * min(first, last), largest * flattest
