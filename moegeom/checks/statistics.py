"""Tests on figures with standard errors, and control of the errors of a whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Median absolute deviation to standard deviation, for a normal distribution.
MAD = 1.4826

#: With this probability a defect of the size that is called detectable is found.
POWER = 0.9


def p_above(value: float, limit: float, error: float, freedom: float) -> float:
    """One-sided p-value of "the true value is at most ``limit``", Student's t.

    ``error`` is a standard error with ``freedom`` degrees of freedom. Without error the comparison
    is exact: 0 above the limit, else 1.
    """
    if error == 0.0:
        return 0.0 if value > limit else 1.0
    return _student(freedom, (limit - value) / error)


def p_differs(difference: float, error: float, freedom: float) -> float:
    """Two-sided p-value of "the true difference is 0", Student's t."""
    if error == 0.0:
        return 0.0 if difference != 0.0 else 1.0
    return min(1.0, 2.0 * _student(freedom, -abs(difference) / error))


def welch_freedom(errors: Sequence[float], freedoms: Sequence[float]) -> float:
    """Degrees of freedom of a difference of independent means (Welch and Satterthwaite).

    nan when one of them has none: then nothing about the difference is significant.
    """
    if min(freedoms) <= 0.0:
        return float("nan")
    total = sum(error**2 for error in errors) ** 2
    parts = sum(error**4 / freedom for error, freedom in zip(errors, freedoms, strict=True))
    return total / parts if parts > 0.0 else min(freedoms)


def holm_rejects(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses Holm's procedure rejects at family-wise error ``level``.

    The i-th smallest of m p-values is compared with level / (m - i + 1); the first that is larger
    ends the procedure. Valid under any dependence. Oracle in tests:
    adjusted p-values.
    """
    rejected = [False] * len(p_values)
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def detectable_shift(error: float, freedom: float, level: float, num_tests: int) -> float:
    """Distance beyond a limit that a one-sided test finds with probability POWER.

    The noncentrality at which Student's t exceeds its quantile at 1 - level / m with that
    probability, times the standard error: the least favourable step of Holm.
    """
    from scipy.special import nctdtrinc, stdtrit

    tail = -float(stdtrit(freedom, level / num_tests))
    return float(nctdtrinc(freedom, 1.0 - POWER, tail)) * error


def _student(freedom: float, t: float) -> float:
    """Distribution function of Student's t; 1 for nan, so that nothing unknown is significant."""
    from scipy.special import stdtr

    if math.isnan(t) or math.isnan(freedom):
        return 1.0
    return float(stdtr(freedom, t)) if math.isfinite(t) else float(t > 0)
