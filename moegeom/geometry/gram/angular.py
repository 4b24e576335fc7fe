"""Caps of the sphere: how narrow a cone of directions is."""

from __future__ import annotations

import math


def cap_half_angle(radius: float, mean_length: float) -> float:
    r"""Half-angle of the cone around mu that holds the ball of the radius, arcsin(R / |mu|).

    In radians, 0 to pi / 2; nan when the ball reaches the origin (R >= |mu|) and for a mean of 0.
    Source: docs/theory.md B10 (S1 Proposition 5.6).
    """
    if not 0.0 <= radius < mean_length:
        return float("nan")
    return math.asin(radius / mean_length)


def mean_pairwise_cosine(resultant_length: float, num: int) -> float:
    r"""Mean cosine between two different of ``num`` unit vectors, from the length of their sum.

    :math:`|\sum u|^2 = T + T (T - 1) \overline{\cos}`. From -1 / (T - 1) to 1; nan for fewer than
    two. Source: docs/theory.md B10. Oracle in tests: scikit-learn.
    """
    return (resultant_length**2 - num) / (num * (num - 1)) if num > 1 else float("nan")


def cap_constant(dimension: int) -> float:
    r"""Limit of the area of a small cap over :math:`\sin^{n-1}\theta`.

    :math:`C_n = \Gamma(n/2) / (2 \sqrt\pi\, \Gamma((n+1)/2))`, about :math:`1 / \sqrt{2 \pi n}`. In
    high dimensions the area is :math:`C_n \sin^{n-1}\theta / \cos\theta`, larger by a factor.
    Source: docs/theory.md B10. Oracle in tests: mpmath.
    """
    from scipy.special import beta

    return 1.0 / ((dimension - 1) * float(beta((dimension - 1) / 2.0, 0.5)))


def cap_area_log10(sine: float, dimension: int) -> float:
    r"""log10 of the share of the sphere within an angle of at most 90 degrees of a point.

    :math:`A = \tfrac12 I_{\sin^2\theta}(\tfrac{n-1}{2}, \tfrac12)` for the sphere of directions of
    n dimensions, at least 2. -inf for a sine of 0, log10 of 1/2 for 1, above which a sine is taken
    as 1; nan for a negative one. Wide caps by the band between them and the half sphere, narrow
    ones by the series :math:`I_x(a, b) = x^a (1-x)^b {}_2F_1(a+b, 1; a+1; x) / (a B(a, b))` with
    positive terms, so that the logarithm is good to 1e-11 of itself where A underflows.
    Source: docs/theory.md A6, B10. Oracle in tests: mpmath.
    """
    from scipy.special import betainc, betaln

    if not sine >= 0.0:
        return math.nan
    if sine == 0.0:
        return -math.inf
    sine = min(sine, 1.0)
    a, b = (dimension - 1) / 2.0, 0.5
    square, rest = sine * sine, (1.0 - sine) * (1.0 + sine)
    band = float(betainc(b, a, rest))
    if band < 0.5:
        return (math.log1p(-band) - math.log(2.0)) / math.log(10.0)
    logarithm = 2.0 * a * math.log(sine) + b * math.log(rest) - math.log(a) - float(betaln(a, b))
    return (logarithm + math.log(_hypergeometric(a, b, square) / 2.0)) / math.log(10.0)


def _hypergeometric(a: float, b: float, x: float) -> float:
    """2F1(a + b, 1; a + 1; x) for b <= 1, a sum of positive terms that fall at least like x^n."""
    total, term, step = 1.0, 1.0, 0
    while term > 1e-17 * total:
        term *= (a + b + step) / (a + 1.0 + step) * x
        total += term
        step += 1
    return total
