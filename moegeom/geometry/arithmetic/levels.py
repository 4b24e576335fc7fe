"""How many different values rows hold: too few betray an earlier quantisation."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int64

#: Columns that are looked at, from the first; sorting all of a wide row would cost more than
#: reading it.
PREFIX = 512

#: Width of a window: the smallest group in common use, so that no window mixes more than two.
WINDOW = 32

#: Formats with more explicit mantissa bits than this hardly repeat a value in 32 draws.
_COUNTED_BITS = 12


def distinct_values(values: Float[np.ndarray, "rows columns"]) -> Int64[np.ndarray, "rows"]:
    """Number of different values in each row, 0 without columns. Oracle in tests: len(set(...))."""
    if not values.shape[1]:
        return np.zeros(len(values), np.int64)
    ordered = np.sort(values, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)


def window_levels(
    values: Float[np.ndarray, "rows columns"],
) -> Float64[np.ndarray, "rows"]:
    """Mean number of different values in windows of 32 columns, over the first 512.

    About 31.6 for Gaussian rows in bfloat16, 28 to 30 for 8-bit integers and 26 for 8-bit floats
    (e4m3); at most 16 for 4-bit integers in groups of a multiple of 32, 4 for 2-bit. Windows of
    zeros are left out: a part that was never written is no sign of quantisation. nan for rows
    without any other window.
    """
    usable = min(values.shape[1], PREFIX) // WINDOW * WINDOW
    if not usable:
        return np.full(len(values), np.nan)
    windows = values[:, :usable].reshape(-1, WINDOW)
    written = (windows != 0.0).any(axis=1).reshape(len(values), usable // WINDOW)
    levels = distinct_values(windows).reshape(written.shape)
    counted = written.sum(axis=1)
    total = np.where(written, levels, 0).sum(axis=1)
    return np.where(counted > 0, total / np.maximum(counted, 1), np.nan)


def expected_window_levels(scale: float, mantissa_bits: int) -> float:
    r"""Different values among 32 Gaussian draws of standard deviation ``scale``, as stored.

    :math:`\sum_v 1 - (1 - p_v)^{32}` over the numbers v of a binary format with ``mantissa_bits``
    explicit bits, p_v = density times the width that rounds to v: the spacing, but 3/4 of it for
    powers of two. 32 beyond 12 bits. Subnormal numbers and overflow are not modelled. nan for
    scale 0. Oracle in tests: Monte Carlo with ml_dtypes.
    """
    if not np.isfinite(scale) or scale <= 0.0:
        return float("nan")
    if mantissa_bits > _COUNTED_BITS:
        return float(WINDOW)
    exponents = np.floor(np.log2(scale)) + np.arange(-20.0, 4.0)
    numbers = np.exp2(exponents)[:, None] * (1.0 + np.arange(2**mantissa_bits) / 2**mantissa_bits)
    width = np.repeat(np.exp2(exponents - mantissa_bits)[:, None], 2**mantissa_bits, axis=1)
    width[:, 0] *= 0.75  # the numbers below a power of two are twice as dense
    density = np.exp(-0.5 * (numbers / scale) ** 2) / (scale * np.sqrt(2.0 * np.pi))
    missed = (1.0 - np.minimum(density * width, 1.0)) ** WINDOW
    return float(2.0 * (1.0 - missed).sum())
