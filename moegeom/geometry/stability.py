"""How far apart two selection scores must be for an engine's rounding to keep their order."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64

from moegeom.geometry.number_format import NUMBER_FORMATS
from moegeom.geometry.rounding import UNIT_FLOAT32
from moegeom.geometry.summation import gamma


def sum_error(
    input_norm: Float[np.ndarray, "tokens"],
    depth: int,
    longest_row: float,
    largest_bias: float = 0.0,
    unit: float = UNIT_FLOAT32,
) -> Float64[np.ndarray, "tokens"]:
    r"""Largest error of a logit :math:`W y + b` whose products meet at most ``depth`` roundings.

    :math:`\gamma_{n+1} (\max_i |w_i| |y| + \max_i |b_i|)`, u the unit of the accumulator, one more
    rounding for the bias: Cauchy-Schwarz on :math:`\gamma_n \sum_d |w_d y_d|`. In logits.
    Source: THEORY.md E4. Oracle in tests: exact sums, sums in every known order.
    """
    return gamma(depth + 1, unit) * (longest_row * input_norm.astype(np.float64) + largest_bias)


def format_gap(
    one: Float64[np.ndarray, "tokens"], other: Float64[np.ndarray, "tokens"], number_format: str
) -> Float64[np.ndarray, "tokens"]:
    r"""Difference above which rounding two numbers to a format keeps the larger one larger.

    :math:`u (|a| + |b|) + 2 \eta`: then :math:`a - u |a| - \eta > b + u |b| + \eta`, which are
    bounds of the rounded numbers. If it holds for the least chosen and the largest other number it
    holds for all pairs, because :math:`x \mp u |x|` increases with x.
    Oracle in tests: torch and ml_dtypes.
    """
    form = NUMBER_FORMATS[number_format]
    return form.unit * (np.abs(one) + np.abs(other)) + 2.0 * form.least
