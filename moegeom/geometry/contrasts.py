r"""Code length of the numbers of a token, given predictions up to a common offset."""

from __future__ import annotations

import math

import numpy as np

from moegeom.core.shapes import Float, Float64

#: The finest scale of noise: numbers that are nearer are equal. Bfloat16 rounds by a tenth of it
#: where logits are compared, and routing weights by 16 times as much.
FINEST = 2.0**-12


def contrasts(
    observed: Float[np.ndarray, "tokens values"], predicted: Float[np.ndarray, "tokens values"]
) -> Float64[np.ndarray, "tokens values"]:
    r"""Differences :math:`d_{ti} = u_{ti} - v_{ti}` less their mean in each token.

    A common number of a token says nothing: logits are known up to one, and routing weights up to a
    factor. nan in all of a token where one number is not finite.
    """
    with np.errstate(invalid="ignore"):
        apart = observed.astype(np.float64) - predicted
        return apart - apart.mean(axis=1, keepdims=True)


def contrast_bits(
    apart: Float64[np.ndarray, "tokens values"], scale: float
) -> Float64[np.ndarray, "tokens"]:
    r"""Bits of the contrasts of each token under Cauchy noise of scale s, less those of zeros.

    .. math:: \frac{m - 1}{m} \sum_i \left(\log_2 \frac{s}{s_0} + \log_2(1 + (d_{ti}/s)^2)\right)

    for m numbers, of which one is given by the others; :math:`s_0 = 2^{-12}`. Never below 0, since
    no scale is finer. 0 where a number is not known.
    """
    number = apart.shape[1]
    with np.errstate(over="ignore"):
        own = np.log1p((apart / scale) ** 2) / math.log(2.0)
    bits = (own.sum(axis=1) / number + math.log2(scale / FINEST)) * (number - 1)
    return np.where(np.isnan(bits), 0.0, bits)
