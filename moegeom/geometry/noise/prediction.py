"""Probability that an arithmetic turns a gap round, from its noise alone."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

#: Of a deviation and a step, the less counts for nothing below this share of the other.
_NEGLIGIBLE = 1e-4


def flip_prediction(
    gap: Float64[np.ndarray, "tokens"],
    deviation: Float64[np.ndarray, "tokens"],
    step: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Probability that noise in a gap, and rounding of its two logits after it, turn it round.

    .. math:: p = P(g + \sigma N + \delta U < 0) = \frac{\sigma}{2 \delta}
              \left(I\left(\tfrac{\delta - g}{\sigma}\right)
              - I\left(\tfrac{-\delta - g}{\sigma}\right)\right),
              \quad I(x) = x \Phi(x) + \varphi(x)

    with N normal and U uniform on [-1, 1]. ``gap`` g is the logit difference of the nearest
    boundary, ``deviation`` the standard deviation of the noise in it, ``step`` the spacing of the
    output format there. Rounding never turns two logits round, it makes those that are x apart
    equal with probability 1 - |x| / step, and of ties half fall to either side: together one half
    less x / (2 step), as if the gap moved by U. Phi(-g / deviation) for step 0, the ramp alone for
    deviation 0, 0 for both. Source: docs/theory.md E4. Oracle in tests: simulation.
    """
    from scipy.special import ndtr  # takes longer to import than many a scan takes to run

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        crossed = np.where(deviation > 0.0, ndtr(-gap / deviation), 0.0)
        ramp = np.clip(0.5 - 0.5 * gap / step, 0.0, 1.0)
        upper, lower = (step - gap) / deviation, (-step - gap) / deviation
        between = (_integral(upper) - _integral(lower)) * deviation / (2.0 * step)
    # a step that is nothing beside the noise, or the other way round: the quotients lose digits
    both = np.where(deviation > _NEGLIGIBLE * step, between, ramp)
    return np.clip(np.where(step > _NEGLIGIBLE * deviation, both, crossed), 0.0, 1.0)


def _integral(x: Float64[np.ndarray, "tokens"]) -> Float64[np.ndarray, "tokens"]:
    r"""x Phi(x) + phi(x), whose derivative is Phi."""
    from scipy.special import ndtr

    return x * ndtr(x) + np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi)


def tie_probability(
    margin: Float64[np.ndarray, "tokens"], step: Float64[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens"]:
    r"""Probability that rounding to multiples of ``step`` makes two numbers equal.

    :math:`\max(0, 1 - m / \delta)` for two numbers that are ``margin`` m apart and lie anywhere; 0
    for step 0. Source: docs/theory.md E4. Oracle in tests: the fixture, simulation.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(step > 0.0, np.maximum(0.0, 1.0 - margin / step), 0.0)


def spacing(values: Float64[np.ndarray, "tokens"], unit: float) -> Float64[np.ndarray, "tokens"]:
    r"""Distance of neighbouring numbers of a format with unit u around each value.

    :math:`2 u \cdot 2^{\lfloor \log_2 |x| \rfloor}`; 0 for 0. Oracle in tests: numpy.spacing.
    """
    mantissa, exponent = np.frexp(np.abs(values))
    return np.where(mantissa > 0.0, np.ldexp(unit, exponent), 0.0)
