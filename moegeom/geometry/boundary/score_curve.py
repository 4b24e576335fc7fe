"""Increasing scores of a single logit, as curves: value, slope, inverse, and bounds of their bends.

A curve is a score behind an optional soft cap, ``z -> s(cap * tanh(z / cap))``; a multiplier is
folded into logits and rows before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

#: Position in the tuple is the code that compiled kernels select a score by.
SEPARABLE_SCORES = ("identity", "sigmoid", "sqrt_softplus")


@dataclass(frozen=True)
class Bends:
    """Bounds of the derivatives of a score s.

    ``steepest`` is the largest slope s' and ``peak`` where it is; ``log_slope`` bounds
    ``|s'' / s'|`` and ``bend`` bounds ``|s''|``. Up to ``convex_until`` the function 1 / s' is
    convex, so that the slope of a wall is monotone (:mod:`moegeom.geometry.boundary.curved_wall`).
    """

    low: float
    high: float
    steepest: float
    peak: float
    log_slope: float
    bend: float
    convex_until: float


#: Extrema by high-precision root finding; sigmoid: s'' = s'(1 - 2 s), largest at (3 +- 3^0.5) / 6.
BENDS: dict[str, Bends] = {
    "identity": Bends(-math.inf, math.inf, 1.0, 0.0, 0.0, 0.0, math.inf),
    "sigmoid": Bends(0.0, 1.0, 0.25, 0.0, 1.0, 0.09622504487, math.inf),
    "sqrt_softplus": Bends(
        0.0, math.inf, 0.3190863433, 0.9214225086553604, 0.5, 0.07452048867, 4.1107
    ),
}


@dataclass(frozen=True)
class Point:
    """Score at a logit, how far it is below the upper end of the range, and its slope there.

    ``rest`` keeps its digits where the score saturates; it is inf for an unbounded score.
    """

    score: float
    rest: float
    slope: float


def _identity(t: float) -> Point:
    return Point(t, math.inf, 1.0)


def _sigmoid(t: float) -> Point:
    decay = math.exp(-abs(t))
    larger = 1.0 / (1.0 + decay)
    smaller = decay * larger
    score, rest = (larger, smaller) if t >= 0.0 else (smaller, larger)
    return Point(score, rest, larger * smaller)


def _sqrt_softplus(t: float) -> Point:
    decay = math.exp(-abs(t))
    score = math.sqrt(max(t, 0.0) + math.log1p(decay))
    sigmoid = (1.0 if t >= 0.0 else decay) / (1.0 + decay)
    return Point(score, math.inf, sigmoid / (2.0 * score) if score > 0.0 else 0.0)


def _logit(score: float, rest: float) -> tuple[float, float]:
    return math.log(score / rest), score * rest


def _square_softplus(score: float, rest: float) -> tuple[float, float]:
    square = score * score
    powers = -math.expm1(-square)  # 1 - e^(-s^2), the sigmoid of the result
    return square + math.log(powers), powers / (2.0 * score)


_AT: dict[str, Callable[[float], Point]] = {
    "identity": _identity,
    "sigmoid": _sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}
#: Score and rest, inside the range, to logit and slope there.
_INVERSE: dict[str, Callable[[float, float], tuple[float, float]]] = {
    "identity": lambda score, rest: (score, 1.0),
    "sigmoid": _logit,
    "sqrt_softplus": _square_softplus,
}


@dataclass(frozen=True)
class ScoreCurve:
    """A score of ``SEPARABLE_SCORES`` behind a soft cap; ``soft_cap`` is inf without one."""

    score: str
    soft_cap: float = math.inf

    @property
    def code(self) -> int:
        return SEPARABLE_SCORES.index(self.score)

    @property
    def bends(self) -> Bends:
        """Bounds for the whole curve; a cap flattens, and bends by itself.

        With t = c tanh(z/c): t' <= 1, |t'' / t'| <= 2/c, |t''| <= 4 / (27^(1/2) c). 1 / f' stays
        convex behind a cap for the identity (cosh^2) and the sigmoid: its derivative is
        2 sinh t + (2 + 2 cosh t) sinh(2z/c) / c, increasing in z.
        """
        own = BENDS[self.score]
        c = self.soft_cap
        if math.isinf(c):
            return own
        return Bends(
            low=_AT[self.score](-c).score,
            high=_AT[self.score](c).score,
            steepest=own.steepest,
            peak=own.peak,
            log_slope=own.log_slope + 2.0 / c,
            bend=own.bend + own.steepest * 0.7698003590 / c,
            convex_until=own.convex_until if math.isinf(own.convex_until) else -math.inf,
        )

    def at(self, logit: float) -> Point:
        """Value and slope at a logit."""
        if math.isinf(self.soft_cap):
            return _AT[self.score](logit)
        ratio = math.tanh(logit / self.soft_cap)
        inner = _AT[self.score](self.soft_cap * ratio)
        return Point(inner.score, inner.rest, inner.slope * (1.0 - ratio * ratio))

    def inverse(self, score: float, rest: float) -> tuple[float, float]:
        """Logit with this score, and the slope there; -inf or inf, and 0, outside the range."""
        if BENDS[self.score].low >= score:
            return -math.inf, 0.0
        if rest <= 0.0:
            return math.inf, 0.0
        inner, slope = _INVERSE[self.score](score, rest)
        if math.isinf(self.soft_cap):
            return inner, slope
        ratio = inner / self.soft_cap
        if abs(ratio) >= 1.0:
            return math.copysign(math.inf, ratio), 0.0
        return self.soft_cap * math.atanh(ratio), slope * (1.0 - ratio * ratio)

    def slopes(self, low: float, high: float) -> tuple[float, float]:
        """Least and largest slope between two logits, by the shape of s' and of the cap."""
        ends = [self.at(z).slope if math.isfinite(z) else 0.0 for z in (low, high)]
        if math.isinf(self.soft_cap):
            own = BENDS[self.score]
            return min(ends), own.steepest if low < own.peak < high else max(ends)
        return _capped_slopes(self, low, high)


def _capped_slopes(curve: ScoreCurve, low: float, high: float) -> tuple[float, float]:
    """Product of the least, and of the largest, values of both factors of the slope."""
    c, own = curve.soft_cap, BENDS[curve.score]
    ratios = [math.tanh(z / c) for z in (low, high)]
    flat = [1.0 - r * r for r in ratios]
    steep = [_AT[curve.score](c * r).slope for r in ratios]
    largest = own.steepest if c * ratios[0] < own.peak < c * ratios[1] else max(steep)
    return min(flat) * min(steep), largest * (1.0 if low < 0.0 < high else max(flat))
