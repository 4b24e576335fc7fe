"""Probability that an arithmetic switches a token, from its noise alone."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64


def switch_prediction(
    gap: Float64[np.ndarray, "tokens"],
    deviation: Float64[np.ndarray, "tokens"],
    margin: Float64[np.ndarray, "tokens"],
    step: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    r"""First-order probability that noise moves a token across its nearest wall, or a tie decides.

    .. math:: p = \Phi(-g / \sigma) + \tfrac12 \max(0, 1 - m / \delta)

    ``gap`` g is the logit difference of the nearest wall, ``deviation`` the standard deviation of
    the noise in it; ``margin`` m that of the last chosen and the first other expert, ``step`` the
    spacing of the output format there: rounding to it never turns two logits round, it makes them
    equal, with probability 1 - m / step, and of ties half fall to the other side. At most 1.
    0 where deviation and step are 0. Source: THEORY.md E4. Oracle in tests: simulation.
    """
    from scipy.special import ndtr  # takes longer to import than many a scan takes to run

    with np.errstate(divide="ignore", invalid="ignore"):
        crossed = np.where(deviation > 0.0, ndtr(-gap / deviation), 0.0)
    return np.minimum(crossed + 0.5 * tie_probability(margin, step), 1.0)


def tie_probability(
    margin: Float64[np.ndarray, "tokens"], step: Float64[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens"]:
    r"""Probability that rounding to multiples of ``step`` makes two numbers equal.

    :math:`\max(0, 1 - m / \delta)` for two numbers that are ``margin`` m apart and lie anywhere; 0
    for step 0. Source: THEORY.md E4. Oracle in tests: the fixture, simulation.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(step > 0.0, np.maximum(0.0, 1.0 - margin / step), 0.0)


def spacing(values: Float64[np.ndarray, "tokens"], unit: float) -> Float64[np.ndarray, "tokens"]:
    r"""Distance of neighbouring numbers of a format with unit u around each value.

    :math:`2 u \cdot 2^{\lfloor \log_2 |x| \rfloor}`; 0 for 0. Oracle in tests: numpy.spacing.
    """
    mantissa, exponent = np.frexp(np.abs(values))
    return np.where(mantissa > 0.0, np.ldexp(unit, exponent), 0.0)
