"""Trends of a figure over training steps: slope with interval, and onset of a change."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

Values = Float64[np.ndarray, "steps"]

#: Level of intervals and onsets.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Slope:
    """Change per unit of ``step``; ``half_width`` of its 95 % interval, nan when not known."""

    value: float
    half_width: float


def slope(step: Values, value: Values, error: Values | None = None) -> Slope:
    r"""Least-squares slope with the wider of two 95 % intervals.

    :math:`\beta = \sum (x - \bar x)(y - \bar y) / \sum (x - \bar x)^2`. One interval is that of the
    residuals, :math:`t_{0.975, n-2} \sqrt{RSS / (n - 2) / S_{xx}}`: how well a line describes the
    series. The other, with standard errors e, is
    :math:`1.96 \sqrt{\sum (x - \bar x)^2 e^2} / S_{xx}`, as if errors of different steps were
    independent: what the choice of documents could have done. Steps without a value are left out.
    nan for fewer than two different steps; the half-width is nan for two steps without errors.
    Oracle in tests: scipy.stats.linregress.
    """
    from scipy.stats import t

    known = np.isfinite(value)
    x, y = step[known], value[known]
    if len(x) < 2 or np.ptp(x) == 0.0:
        return Slope(math.nan, math.nan)
    centred = x - x.mean()
    square = float(centred @ centred)
    found = float(centred @ (y - y.mean())) / square
    widths = []
    if len(x) > 2:
        rest = y - y.mean() - found * centred
        spread = math.sqrt(float(rest @ rest) / (len(x) - 2) / square)
        widths.append(float(t.ppf(0.5 + CONFIDENCE / 2, len(x) - 2)) * spread)
    if error is not None and np.isfinite(error[known]).all():
        noise = math.sqrt(float((centred**2 * error[known] ** 2).sum())) / square
        widths.append(1.959964 * noise)
    return Slope(found, max(widths, default=math.nan))


def onset(value: Values, error: Values) -> int | None:
    """First step from which on the value has left that of the first step for good.

    The index of the earliest step such that at it and at every later one the value differs from the
    first one, on the same side, by more than the 95 % interval of the difference (normal, errors
    taken as independent, the level divided by the number of later steps). None when there is no
    such step, for fewer than three steps, and where a value or an error is not known. Errors of the
    same documents are positively correlated, which makes this cautious.
    """
    from scipy.stats import norm

    if len(value) < 3 or not (np.isfinite(value).all() and np.isfinite(error).all()):
        return None
    wide = float(norm.ppf(1.0 - (1.0 - CONFIDENCE) / 2.0 / (len(value) - 1)))
    change = value[1:] - value[0]
    left = np.abs(change) > wide * np.hypot(error[1:], error[0])
    sides = np.where(left, np.sign(change), 0.0)
    if sides[-1] == 0.0:
        return None
    other = np.flatnonzero(sides != sides[-1])
    return int(other[-1]) + 2 if len(other) else 1
