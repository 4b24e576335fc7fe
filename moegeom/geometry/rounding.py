"""How far two correct engines can differ: bounds on sums and roundings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Float, Float32, Float64, Int32

# --------------------------------------------------------------------------------------------- sums
#: Products that one instruction of a matrix unit adds up; all of its sums are taken as sequential.
_BLOCK = 16

#: Threads and lanes of the kernel whose order is known.
_THREADS, _LANES, _RUN = 128, 32, 8


@dataclass(frozen=True)
class SummationOrder:
    """``depth(D)`` roundings at most on the way of any of D products into the sum.

    ``sums`` computes in that order, in float32; None where the order is not known.
    """

    name: str
    depth: Callable[[int], int]
    sums: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None


def gamma(depth: int, unit: float) -> float:
    r"""The classical :math:`\gamma_n = n u / (1 - n u)`; inf where n u reaches 1.

    A sum of products in floating point is off by at most :math:`\gamma_n \sum_d |w_d y_d|` where
    each product takes part in at most n roundings. Source: docs/theory.md E4.
    """
    terms = depth * unit
    return terms / (1.0 - terms) if terms < 1.0 else float("inf")


def _sequential(
    values: Float[np.ndarray, "tokens hidden"], weight: Float[np.ndarray, "experts hidden"]
) -> Float32[np.ndarray, "tokens experts"]:
    total = np.zeros((len(values), len(weight)), np.float32)
    for d in range(values.shape[1]):
        total += values[:, d, None] * weight[None, :, d]
    return total


def _float64(
    values: Float[np.ndarray, "tokens hidden"], weight: Float[np.ndarray, "experts hidden"]
) -> Float32[np.ndarray, "tokens experts"]:
    """Float64 accumulation, narrowed at the end."""
    return (values.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)


def _pairwise(
    values: Float[np.ndarray, "tokens hidden"], weight: Float[np.ndarray, "experts hidden"]
) -> Float32[np.ndarray, "tokens experts"]:
    out = np.empty((len(values), len(weight)), np.float32)
    for token, row in enumerate(values):  # one at a time: the products of all are too many
        products = row * weight
        while products.shape[1] > 1:
            if products.shape[1] % 2:
                products = np.concatenate([products, np.zeros_like(products[:, :1])], axis=1)
            products = products[:, 0::2] + products[:, 1::2]
        out[token] = products[:, 0]
    return out


def _strided(
    values: Float[np.ndarray, "tokens hidden"], weight: Float[np.ndarray, "experts hidden"]
) -> Float32[np.ndarray, "tokens experts"]:
    """128 threads take runs of 8 in turn; a butterfly adds 32 lanes, then come 4 warps in order."""
    width = -(-values.shape[1] // (_THREADS * _RUN)) * _THREADS * _RUN
    padding = ((0, 0), (0, width - values.shape[1]))
    y, w = (np.pad(a, padding).reshape(len(a), -1, _THREADS, _RUN) for a in (values, weight))
    lanes = np.zeros((len(values), len(weight), _THREADS), np.float32)
    for i in range(y.shape[1]):
        for r in range(_RUN):
            lanes += y[:, None, i, :, r] * w[None, :, i, :, r]
    lanes = lanes.reshape(*lanes.shape[:2], _THREADS // _LANES, _LANES)
    for step in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., np.arange(_LANES) ^ step]
    total = np.zeros(lanes.shape[:2], np.float32)
    for warp in range(lanes.shape[2]):
        total = total + lanes[:, :, warp, 0]
    return total


#: Orders by the name that presets use. Depths count the rounding of a product as one.
SUMMATION_ORDERS: dict[str, SummationOrder] = {
    order.name: order
    for order in (
        SummationOrder("any", lambda width: width),
        # blocks of 16 products one after the other: what matrix units do, whichever the tiling
        SummationOrder("blocks_of_16", lambda width: -(-width // _BLOCK) + _BLOCK + 1),
        SummationOrder("sequential", lambda width: width, _sequential),
        SummationOrder("float64", lambda width: 1, _float64),
        SummationOrder("pairwise", lambda width: max(width - 1, 1).bit_length() + 1, _pairwise),
        SummationOrder(
            "strided_128",
            lambda width: -(-width // _THREADS) + _RUN + 5 + _THREADS // _LANES + 1,
            _strided,
        ),
    )
}


def ordered_sums(
    values: Float[np.ndarray, "tokens hidden"],
    weight: Float[np.ndarray, "experts hidden"],
    order: str,
) -> Float32[np.ndarray, "tokens experts"]:
    r"""Logits :math:`W y` in float32, every product rounded and then added in the order ``order``.

    Products of two bfloat16 numbers are exact, so that a fused multiply-add gives the same. The
    sums differ from the exact ones by at most :math:`\gamma_n \sum_d |w_d y_d|`, n the depth of
    the order (``float64``: rounded once, at the end). Slow: meant for the few tokens that a bound
    leaves open.

    Raises
    ------
    KeyError
        For an order that is not known.
    ValueError
        For one that has a bound only.

    Source: docs/theory.md E4. Oracle in tests: sums of Fractions, the order written out in Python.
    """
    sums = SUMMATION_ORDERS[order].sums
    if sums is None:
        raise ValueError(f"order {order} has a bound and no sums")
    return sums(values.astype(np.float32), weight.astype(np.float32))


# -------------------------------------------------------------------------------- logits and inputs
#: Unit roundoff of float32 and bfloat16 (half the distance from 1 to the next number).
UNIT_FLOAT32 = 2.0**-24
UNIT_BFLOAT16 = 2.0**-8

#: Root mean square of the relative error when one coordinate is rounded, in units of u: an error
#: uniform over one ulp, 1/3 in square, over a mantissa m that is log-uniform in [1, 2), whose mean
#: 1/m^2 is 3 / (8 log 2). That is 0.42466 (docs/theory.md E4 writes .4247; measured .415).
ROUNDING_RMS = (8.0 * math.log(2.0)) ** -0.5

#: Terms that add up to less cannot leave float32, whatever the order.
LARGEST_SIZE = 2.0**127

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
    of the sum, so one more term would do. Products below the normal numbers add
    :math:`4 (D + 8) 2^{-150}`; inf where the terms reach 2^127, because partial sums may then end
    in infinity, and 0 where all are 0.
    Source: docs/theory.md E4. Oracle in tests: exact sums.
    """
    two_gamma, underflow = engine_error(hidden_size)
    size = longest_row * input_norm.astype(np.float64) + largest_bias
    bound = np.where(size < LARGEST_SIZE, two_gamma * size + underflow, np.inf)
    return np.where(size == 0.0, 0.0, bound)


def engine_error(hidden_size: int) -> tuple[float, float]:
    """How far two float32 engines are apart: relative to the terms of a sum, and below the normals.

    A product below the normal numbers is off by 2^-150 at most, twice that with what follows.
    """
    terms = (hidden_size + 8) * UNIT_FLOAT32
    return 2.0 * terms / (1.0 - terms), 4.0 * (hidden_size + 8) * 2.0**-150


def score_resolution(
    score: str,
    largest: Float64[np.ndarray, "tokens"],
    last: Float64[np.ndarray, "tokens"],
    following: Float64[np.ndarray, "tokens"],
    unit: float = UNIT_FLOAT32,
    largest_exponent: float = LARGEST_EXPONENT,
) -> Float64[np.ndarray, "tokens"]:
    r"""How far two logits must be apart for their scores to differ in the same sense.

    Engines compare scores, not logits: :math:`8u\, s / s'` at the boundary of the chosen set, which
    is 8u for softmax (and as much again for each unit below the largest logit, which is subtracted
    first), :math:`8u (1 + e^z)` for sigmoid (saturated at z = 17), and inf where the score
    underflows: softmax probabilities 87 below the largest logit are 0 or lose their digits, so that
    an engine breaks ties among them. 0 for raw logits, and
    where no expert follows (-inf). Scores are float32, or of another format with its ``unit`` and
    the largest n for which exp(-n) is a normal number. Behind a map of logits the numbers are those
    behind it.

    ``largest``, ``last`` and ``following`` are the first, k-th and (k+1)-th logit.
    Source: docs/theory.md E1, E4. Oracle in tests: torch.softmax and torch.sigmoid in float32.
    """
    unit = 8.0 * unit
    if score == "identity":
        return np.zeros_like(last)
    lost = following < -largest_exponent
    if score == "softmax":
        spread = largest - following
        lost, resolution = spread > largest_exponent, unit * (1.0 + spread)
    elif score == "sigmoid":
        resolution = unit * (1.0 + np.exp(np.minimum(last, 700.0)))
    else:
        resolution = 2.0 * unit * np.maximum(last, 1.0)
    return np.where(following == -np.inf, 0.0, np.where(lost, np.inf, resolution))


def bf16_noise_scale(
    input_norm: Float[np.ndarray, "tokens"], hidden_size: int
) -> Float64[np.ndarray, "tokens"]:
    r"""Standard deviation, per coordinate, of the error of rounding a router input to bfloat16.

    :math:`s = 0.4247 \cdot 2^{-8} |y| / \sqrt{D}`: the mean over coordinates, taken as isotropic.
    Source: docs/theory.md E4 and the isotropic analogue of A9.
    """
    return ROUNDING_RMS * UNIT_BFLOAT16 * input_norm.astype(np.float64) / np.sqrt(hidden_size)


def flip_probability(
    distance: Float64[np.ndarray, "tokens"], noise_scale: Float64[np.ndarray, "tokens"]
) -> Float64[np.ndarray, "tokens"]:
    r"""Probability :math:`\Phi(-d/s)` that isotropic noise crosses the nearest boundary.

    A lower bound on the probability that the chosen set differs, and its first-order estimate.
    One half on a boundary; 0 beyond 9 sigmas (where it is under 2e-19), at infinite distance, and
    when the noise is 0 and the distance is not.
    Source: docs/theory.md A9 (single time), E4. Oracle in tests: Monte Carlo.
    """
    from scipy.special import ndtr  # takes longer to import than many a scan takes to run

    with np.errstate(divide="ignore", invalid="ignore"):
        sigmas = np.where(distance == 0.0, 0.0, distance / noise_scale)
    probability = np.zeros_like(sigmas)
    near = sigmas < FARTHEST_SIGMAS
    probability[near] = ndtr(-sigmas[near])
    return probability


@dataclass(frozen=True, eq=False)
class RowSpreads:
    r"""Rows, and upper bounds on how far any two are apart: made once, for any number of tokens.

    ``distance`` bounds :math:`(\sum_d |w_{id} - w_{jd}|^2)^{1/2}` and ``fourth``
    :math:`(\sum_d |w_{id} - w_{jd}|^4)^{1/4}`, both from products of powers of the rows.
    """

    weight: Float[np.ndarray, "experts hidden"]
    distance: Float64[np.ndarray, "experts experts"]
    fourth: Float64[np.ndarray, "experts experts"]


def row_spreads(weight: Float[np.ndarray, "experts hidden"]) -> RowSpreads:
    """The rows with their bounds. Products may lose what is equal up to rounding, 1e-12 of the
    squares and 1e-10 of the fourth powers: so much is added.
    """
    rows = weight.astype(np.float64)
    squares = rows**2
    first, second = squares.sum(axis=1), (squares**2).sum(axis=1)
    both, both_4 = first[:, None] + first[None, :], second[:, None] + second[None, :]
    squared = both - 2.0 * (rows @ rows.T)
    mixed = (rows * squares) @ rows.T
    fourth = both_4 + 6.0 * (squares @ squares.T) - 4.0 * (mixed + mixed.T)
    return RowSpreads(
        weight=weight,
        distance=np.sqrt(np.maximum(squared, 0.0) + 1e-12 * both),
        fourth=(np.maximum(fourth, 0.0) + 1e-10 * both_4) ** 0.25,
    )


def rounding_sigmas(
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    weight: Float[np.ndarray, "experts hidden"],
) -> Float64[np.ndarray, "tokens"]:
    r"""Nearest boundary in standard deviations of what rounding the input to bfloat16 does along
    it.

    .. math:: r = \min_{i \in S,\, j \notin S} \frac{z_i - z_j}{\sigma_{ij}}, \quad
              \sigma_{ij}^2 = (0.4247 \cdot 2^{-8})^2 \sum_d (w_{id} - w_{jd})^2 y_d^2

    Dimensionless. The rounding error of a coordinate is proportional to it, so the nearest boundary
    by this measure need not be the nearest in Euclidean distance. For affine rules. 0 on a
    boundary; inf when every expert is chosen, for equal rows of which one is ahead, and for an
    input of zeros that is on no boundary. Relative error 1e-12 of the float64 sums; the logits
    carry theirs. Source: docs/theory.md E4. Oracle in tests: Monte Carlo with rounded inputs.
    """
    rows = weight.astype(np.float64)
    sigmas = np.full(len(values), np.inf)
    for token in range(len(values)):
        outside = np.ones(len(rows), dtype=bool)
        outside[chosen[token]] = False
        if not outside.any():
            continue
        y = values[token].astype(np.float64)
        z = logits[token].astype(np.float64)
        for expert in chosen[token]:
            gap = z[expert] - z[outside]
            scale = np.sqrt((((rows[expert] - rows[outside]) * y) ** 2).sum(axis=1))
            scale *= ROUNDING_RMS * UNIT_BFLOAT16
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(gap == 0.0, 0.0, gap / scale)
            sigmas[token] = min(sigmas[token], ratio.min())
    return sigmas
