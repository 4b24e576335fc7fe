"""How far apart two selection scores must be for an engine's rounding to keep their order."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64

from moegeom.core.router import LogitMap
from moegeom.geometry.arithmetic.number_format import NUMBER_FORMATS
from moegeom.geometry.arithmetic.summation import gamma


def sum_error(
    input_norm: Float[np.ndarray, "tokens"],
    width: int,
    depth: int,
    longest_row: float,
    largest_bias: float = 0.0,
) -> Float64[np.ndarray, "tokens"]:
    r"""Largest error of a logit :math:`W y + b` of ``width`` products, summed in float32.

    Each product meets ``depth`` roundings at most. That is :func:`error_of_sizes` of
    :math:`\max_i |w_i| |y| + \max_i |b_i|`, by Cauchy-Schwarz. In logits.
    Source: docs/theory.md E4. Oracle in tests: exact sums, sums in every known order.
    """
    sizes = longest_row * input_norm.astype(np.float64) + largest_bias
    return error_of_sizes(sizes, width, depth)


def error_of_sizes(
    sizes: Float64[np.ndarray, "tokens"], width: int, depth: int
) -> Float64[np.ndarray, "tokens"]:
    r"""The same from the sizes of the terms, :math:`s \ge \sum_d |w_d y_d| + |b|`.

    :math:`\gamma_{n+1} s + 2 (D + 1) \eta`: one more rounding for the bias, and for each product
    that falls below the normal numbers the error :math:`\eta = 2^{-150}` instead of a relative one
    (sums are exact there), doubled for the roundings that it meets itself. inf where partial sums
    may leave the range, so that another order could end in infinity; 0 where all terms are 0.
    """
    form = NUMBER_FORMATS["float32"]
    relative = gamma(depth + 1, form.unit)
    with np.errstate(invalid="ignore", over="ignore"):
        error = relative * sizes + 2.0 * (width + 1) * form.least
        error = np.where(sizes * (1.0 + relative) < form.largest, error, np.inf)
    return np.where(sizes > 0.0, error, np.where(sizes == 0.0, 0.0, np.nan))


def map_gap(
    one: Float64[np.ndarray, "tokens"],
    other: Float64[np.ndarray, "tokens"],
    logit_map: LogitMap,
    number_format: str,
) -> Float64[np.ndarray, "tokens"]:
    r"""Difference of two logits behind a map above which its rounding keeps the order.

    An engine takes :math:`c \tanh(m z / c)` in a few steps: two products and a quotient with
    constants that are rounded themselves, and a tanh that is right within two units; tanh passes a
    relative error on without growth. 16 units cover it, and as many times what is lost below the
    normal numbers, which c or m may enlarge. A cap that both have reached leaves no difference.
    Oracle in tests: the map in float32, by numpy and torch.
    """
    form = NUMBER_FORMATS[number_format]
    cap = logit_map.soft_cap if np.isfinite(logit_map.soft_cap) else 0.0
    lost = 2.0 * form.least * (1.0 + logit_map.multiplier + cap)
    return 16.0 * (form.unit * (np.abs(one) + np.abs(other)) + lost)


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
