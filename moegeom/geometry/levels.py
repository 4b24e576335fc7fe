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
    """Number of different values in each row. Oracle in tests: len(set(...))."""
    ordered = np.sort(values, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)


def window_levels(
    values: Float[np.ndarray, "rows columns"],
) -> Float64[np.ndarray, "rows"]:
    """Mean number of different values in windows of 32 columns, over the first 512.

    About 31 for Gaussian rows in bfloat16, 27 for 8-bit integers and 26 for 8-bit floats, at most
    16 for 4-bit integers in groups of 32 or more, 4 for 2-bit. nan for rows shorter than a window.
    """
    usable = min(values.shape[1], PREFIX) // WINDOW * WINDOW
    if not usable:
        return np.full(len(values), np.nan)
    windows = values[:, :usable].reshape(-1, WINDOW)
    return distinct_values(windows).reshape(len(values), -1).mean(axis=1)


def expected_window_levels(scale: float, mantissa_bits: int) -> float:
    r"""Different values among 32 Gaussian draws of standard deviation ``scale``, as stored.

    :math:`\sum_v 1 - (1 - p_v)^{32}` over the numbers v of a binary format with ``mantissa_bits``
    explicit bits, p_v = density times spacing; 32 beyond 12 bits. Subnormal numbers and overflow
    are not modelled. nan for scale 0. Oracle in tests: Monte Carlo with ml_dtypes.
    """
    if not np.isfinite(scale) or scale <= 0.0:
        return float("nan")
    if mantissa_bits > _COUNTED_BITS:
        return float(WINDOW)
    exponents = np.floor(np.log2(scale)) + np.arange(-20.0, 4.0)
    numbers = np.exp2(exponents)[:, None] * (1.0 + np.arange(2**mantissa_bits) / 2**mantissa_bits)
    spacing = np.exp2(exponents - mantissa_bits)[:, None]
    density = np.exp(-0.5 * (numbers / scale) ** 2) / (scale * np.sqrt(2.0 * np.pi))
    missed = (1.0 - np.minimum(density * spacing, 1.0)) ** WINDOW
    return float(2.0 * (1.0 - missed).sum())
