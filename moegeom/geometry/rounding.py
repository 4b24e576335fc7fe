"""How far two correct engines can differ: bounds on rounding, and the effect of rounding inputs."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64
from scipy.special import ndtr

#: Unit roundoff of float32 and bfloat16 (half the distance from 1 to the next number).
UNIT_FLOAT32 = 2.0**-24
UNIT_BFLOAT16 = 2.0**-8

#: Root mean square of the relative error when one coordinate is rounded, in units of u
#: (THEORY.md E4: a uniform error over one ulp, averaged over a mantissa; measured .415).
ROUNDING_RMS = 0.4247


def logit_error_bound(
    weight: Float[np.ndarray, "experts hidden"],
    input_norm: Float[np.ndarray, "tokens"],
    bias: Float[np.ndarray, "experts"] | None = None,
) -> Float64[np.ndarray, "tokens"]:
    r"""Largest difference of a logit between two float32 engines, whatever their order of summation.

    :math:`2 \gamma_{D+8} \max_i |w_i| |y| + 2u \max_i |b_i|` with
    :math:`\gamma_n = n u / (1 - n u)`, u = 2^-24: Cauchy-Schwarz on the classical
    :math:`\gamma_D \sum_d |w_d y_d|`, once for each engine. Eight more terms cover a bias and the
    subtraction of a maximum inside a softmax. Source: THEORY.md E4.
    """
    terms = (weight.shape[1] + 8) * UNIT_FLOAT32
    gamma = terms / (1.0 - terms)
    longest = float(np.sqrt((weight.astype(np.float64) ** 2).sum(axis=1).max()))
    largest_bias = 0.0 if bias is None else float(np.abs(bias).max())
    return 2.0 * gamma * longest * input_norm.astype(np.float64) + 2 * UNIT_FLOAT32 * largest_bias


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
    r"""Probability that isotropic noise carries an input across its nearest wall, :math:`\Phi(-d/s)`.

    A lower bound on the probability that the chosen set differs, and its first-order estimate.
    One half on a boundary; 0 at infinite distance; 0 when the noise is 0 and the distance is not.
    Source: THEORY.md A9 (single time), E4. Oracle in tests: Monte Carlo.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        sigmas = np.where(distance == 0.0, 0.0, distance / noise_scale)
    return ndtr(-sigmas)
