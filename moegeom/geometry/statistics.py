"""Standard errors over blocks and clusters, and trends over training steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float64, Integer, Shaped


def jackknife_error(
    leave_one_out: Float[np.ndarray, "blocks *figures"],
) -> Float64[np.ndarray, "*figures"]:
    """Delete-one jackknife: sqrt((g - 1) / g * sum over blocks (v_b - mean v)^2).

    Unit of the figures, float64. nan with fewer than two blocks, and where a value is not finite
    (inf - inf: a quantile beyond the last bin has no error); inf where squares overflow. For a mean
    of equal blocks it is the standard error of the mean exactly.
    Source: Quenouille 1956, Tukey 1958.
    Oracle in tests: scipy.stats.sem.
    """
    # sums follow the layout: one of its own, however the figures came
    values = np.ascontiguousarray(leave_one_out, dtype=np.float64)
    blocks = len(values)
    if blocks < 2:
        return np.full(values.shape[1:], np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        spread = ((values - values.mean(axis=0)) ** 2).sum(axis=0)
    return np.asarray(np.sqrt((blocks - 1) / blocks * spread))


def clustered_error(
    influence: Float64[np.ndarray, "tokens"], cluster: Integer[np.ndarray, "tokens"]
) -> float | None:
    r"""Standard error of a statistic of tokens that are independent between clusters only.

    :math:`\sqrt{\frac{G}{G - 1} \sum_g u_g^2}`, where :math:`u_g` adds up the ``influence`` of the
    tokens of cluster g: by how much each moves the statistic, :math:`(x - \bar x) / n` for a mean.
    Unit of the statistic, float64; None with fewer than two clusters. Linearised: of a ratio or a
    difference of means it is the leading term. Source: Liang and Zeger 1986.
    Oracle in tests: scipy.stats.sem of the means of equal clusters, which it is exactly.
    """
    _, of_token = np.unique(cluster, return_inverse=True)
    added = np.bincount(of_token.ravel(), weights=influence)
    clusters = len(added)
    if clusters < 2:
        return None
    return math.sqrt(clusters / (clusters - 1) * float(added @ added))


def share_error(share: float, number: int) -> float:
    r"""Standard error of a share of ``number`` independent draws, :math:`\sqrt{p (1 - p) / n}`.

    That of one draw of them at least: none or all is known no better.
    """
    spread = max(share * (1.0 - share), (1.0 - 1.0 / number) / number)
    return math.sqrt(spread / number)


def rank_correlation(
    one: Shaped[np.ndarray, "values"], other: Shaped[np.ndarray, "values"]
) -> float | None:
    """Spearman's coefficient, that of Pearson of mean ranks; None where one of them is constant.

    Oracle in tests: scipy.stats.spearmanr.
    """
    from scipy.stats import rankdata

    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(rankdata(one), rankdata(other))[0, 1])


# ------------------------------------------------------------------------------------------- trends
Values = Float64[np.ndarray, "steps"]

#: Level of intervals.
CONFIDENCE = 0.95

#: Steps below which no onset is looked for: with three, one step alone would decide.
LEAST_STEPS = 4


@dataclass(frozen=True)
class Slope:
    """Change per unit of ``step``; ``half_width`` of its 95 % interval, nan when not known."""

    value: float
    half_width: float


def slope(step: Values, value: Values, error: Values | None = None) -> Slope:
    r"""Weighted least-squares slope with the wider of two 95 % intervals.

    :math:`\beta = \sum w (x - \bar x)(y - \bar y) / S`, :math:`S = \sum w (x - \bar x)^2`, means
    weighted, :math:`w = 1 / e^2` where every known step has a standard error above 0, else 1. One
    interval is that of the residuals, :math:`t_{0.975, n-2} \sqrt{\sum w r^2 / (n - 2) / S}`: how
    well a line describes the series. The other, with standard errors, is
    :math:`1.96 \sqrt{1 / S}`, as if errors of different steps were independent: what the choice of
    documents could have done. Steps of the same documents have correlated errors, which neither
    knows; that is why the wider is given. Steps without a value are left out. nan for fewer than
    two different steps; the half-width is nan for two steps without errors.
    Oracle in tests: scipy.optimize.curve_fit, scipy.stats.linregress.
    """
    from scipy.stats import norm, t

    is_finite = np.isfinite(value)
    x, y = step[is_finite], value[is_finite]
    if len(x) < 2 or np.ptp(x) == 0.0:
        return Slope(math.nan, math.nan)
    errors = None if error is None else error[is_finite]
    has_errors = errors is not None and bool((np.isfinite(errors) & (errors > 0.0)).all())
    weight = np.ones(len(x))
    if errors is not None and has_errors:
        # relative to the smallest error, so that no square of a tiny one overflows
        weight = (errors.min() / errors) ** 2
    centred = x - np.average(x, weights=weight)
    height = y - np.average(y, weights=weight)
    square = float(weight @ centred**2)
    beta = float((weight * centred) @ height) / square
    widths = []
    if len(x) > 2:
        rest = height - beta * centred
        spread = math.sqrt(float(weight @ rest**2) / (len(x) - 2) / square)
        widths.append(float(t.ppf(0.5 + CONFIDENCE / 2, len(x) - 2)) * spread)
    if errors is not None and has_errors:
        noise = float(errors.min()) / math.sqrt(square)
        widths.append(float(norm.ppf(0.5 + CONFIDENCE / 2)) * noise)
    return Slope(beta, max(widths, default=math.nan))


def in_logs(value: Values, error: Values) -> tuple[Values, Values]:
    """Logarithms and their errors: those of the figures over the figures, to first order.

    An error of 0 is no certainty where others are not: it becomes the largest of them.
    """
    relative = error / value
    if (relative > 0.0).any():
        relative = np.where(relative > 0.0, relative, relative.max())
    return np.log(value), relative


def departures(value: Values, error: Values, freedom: float) -> Values:
    r"""P-value, for each step, of "the figure has not left its earlier range from here on".

    For step j: over all pairs of a step i before j and a step l from j on,
    :math:`t = (y_l - y_i) / \sqrt{e_l^2 + e_i^2}`. The figure has left the range of the earlier
    steps and stayed out, upward, when every pair says so; the p-value is that of the least pair
    (an intersection-union test needs no correction for their number), doubled for the two
    directions, Student's t with ``freedom`` degrees of freedom. 1 for the first step, for fewer
    than LEAST_STEPS steps, and where a value or an error is not known or an error is 0. Errors of
    the same documents are positively correlated, which makes this cautious.
    """
    from scipy.special import stdtr

    p_values = np.ones(len(value))
    if len(value) < LEAST_STEPS or not np.isfinite(value).all():
        return p_values
    if not (np.isfinite(error) & (error > 0.0)).all():
        return p_values
    t = (value[None, :] - value[:, None]) / np.hypot(error[None, :], error[:, None])
    for j in range(1, len(value)):
        pairs = t[:j, j:]
        least = max(float(pairs.min()), float(-pairs.max()))
        p_values[j] = min(1.0, 2.0 * float(stdtr(freedom, -least)))
    return p_values


def onset(p_values: Values, level: float) -> int | None:
    """The earliest step whose departure is significant at ``level``, or None.

    The steps after the first are as many looks at one series: ``level`` is divided by their number.
    """
    looks = max(len(p_values) - 1, 1)
    steps = np.flatnonzero(p_values <= level / looks)
    return int(steps[0]) if len(steps) else None
