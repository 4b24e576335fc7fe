"""Increasing scores of a single logit, as curves: bounds of their bends.

A curve is a score behind an optional soft cap, ``z -> s(cap * tanh(z / cap))``; a multiplier is
folded into logits and rows before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Bends:
    """Range of a score s, without a cap, and bounds of its derivatives.

    ``steepest`` is the largest slope s' and ``peak`` where it is; ``log_slope`` bounds
    ``|s'' / s'|`` and ``bend`` bounds ``|s''|``. Up to ``convex_until`` the function 1 / s' is
    convex, so that the slope of a boundary is monotone
    (:mod:`moegeom.kernels.cpu.curved.boundaries`).
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
class ScoreCurve:
    """A score of ``BENDS`` behind a soft cap; ``soft_cap`` is inf without one."""

    score: str
    soft_cap: float = math.inf

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
        return replace(
            own,
            log_slope=own.log_slope + 2.0 / c,
            bend=own.bend + own.steepest * 0.7698003590 / c,
            convex_until=own.convex_until if math.isinf(own.convex_until) else -math.inf,
        )
