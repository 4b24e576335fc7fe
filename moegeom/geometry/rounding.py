"""How far two correct engines can differ: bounds on rounding, and the effect of rounding inputs."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64

#: Unit roundoff of float32 and bfloat16 (half the distance from 1 to the next number).
UNIT_FLOAT32 = 2.0**-24
UNIT_BFLOAT16 = 2.0**-8

#: Root mean square of the relative error when one coordinate is rounded, in units of u
#: (THEORY.md E4: a uniform error over one ulp, averaged over a mantissa; measured .415).
ROUNDING_RMS = 0.4247

#: exp(-87) is the last whole power above the smallest normal float32.
LARGEST_EXPONENT = 87.0

#: Beyond this many standard deviations a probability counts as 0.
FARTHEST_SIGMAS = 9.0


def logit_error_bound(
    input_norm: Float[np.ndarray, "tokens"],
    hidden_size: int,
    longest_row: float,
    largest_bias: float = 0.0,
) -> Float64[np.ndarray, "tokens"]:
    r"""Largest difference of a logit between two float32 engines, in any order of summation.

    :math:`2 \gamma_{D+8} (\max_i |w_i| |y| + \max_i |b_i|)` with
    :math:`\gamma_n = n u / (1 - n u)`, u = 2^-24: Cauchy-Schwarz on the classical
    :math:`\gamma_n (\sum_d |w_d y_d| + |b|)`, once for each engine; the bias may be the first term
    of the sum, so one more term would do.
    Source: THEORY.md E4. Oracle in tests: exact sums.
    """
    terms = (hidden_size + 8) * UNIT_FLOAT32
    gamma = terms / (1.0 - terms)
    return 2.0 * gamma * (longest_row * input_norm + largest_bias)


def score_resolution(
    score: str,
    largest: Float64[np.ndarray, "tokens"],
    last: Float64[np.ndarray, "tokens"],
    following: Float64[np.ndarray, "tokens"],
) -> Float64[np.ndarray, "tokens"]:
    r"""How far two logits must be apart for their float32 scores to differ in the same sense.

    Engines compare scores, not logits: :math:`8u\, s / s'` at the boundary of the chosen set, which
    is 8u for softmax (and as much again for each unit below the largest logit, which is subtracted
    first), :math:`8u (1 + e^z)` for sigmoid (saturated at z = 17), and inf where the score
    underflows: softmax probabilities 87 below the largest logit are 0 or lose their digits, so that
    an engine breaks ties among them. 0 for raw logits.

    ``largest``, ``last`` and ``following`` are the first, k-th and (k+1)-th logit.
    Source: THEORY.md E1, E4. Oracle in tests: torch.softmax and torch.sigmoid in float32.
    """
    unit = 8.0 * UNIT_FLOAT32
    if score == "identity":
        return np.zeros(len(last))
    if score == "softmax":
        spread = largest - following
        return np.where(spread > LARGEST_EXPONENT, np.inf, unit * (1.0 + spread))
    lost = following < -LARGEST_EXPONENT
    if score == "sigmoid":
        return np.where(lost, np.inf, unit * (1.0 + np.exp(np.minimum(last, 700.0))))
    return np.where(lost, np.inf, 2.0 * unit * np.maximum(last, 1.0))


def bf16_noise_scale(
    input_norm: Float[np.ndarray, "tokens"], hidden_size: int
) -> Float64[np.ndarray, "tokens"]:
    r"""Standard deviation, per coordinate, of the error of rounding a router input to bfloat16.

    :math:`s = 0.4247 \cdot 2^{-8} |y| / \sqrt{D}`: the mean over coordinates, taken as isotropic.
    Source: THEORY.md E4 and the isotropic analogue of A9.
    """
    return ROUNDING_RMS * UNIT_BFLOAT16 * input_norm.astype(np.float64) / np.sqrt(hidden_size)


def switch_probability(
    distance: Float64[np.ndarray, "tokens"], noise_scale: Float64[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens"]:
    r"""Probability :math:`\Phi(-d/s)` that isotropic noise crosses the nearest wall.

    A lower bound on the probability that the chosen set differs, and its first-order estimate.
    One half on a boundary; 0 beyond 9 sigmas (where it is under 2e-19), at infinite distance, and
    when the noise is 0 and the distance is not.
    Source: THEORY.md A9 (single time), E4. Oracle in tests: Monte Carlo.
    """
    from scipy.special import ndtr  # takes longer to import than many a scan takes to run

    with np.errstate(divide="ignore", invalid="ignore"):
        sigmas = np.where(distance == 0.0, 0.0, distance / noise_scale)
    probability = np.zeros(len(sigmas))
    near = sigmas < FARTHEST_SIGMAS
    probability[near] = ndtr(-sigmas[near])
    return probability
