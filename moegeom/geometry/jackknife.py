"""Standard error of a figure from its values with one block of documents left out at a time."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64


def jackknife_error(
    leave_one_out: Float[np.ndarray, "blocks *figures"],
) -> Float64[np.ndarray, "*figures"]:
    """Delete-one jackknife: sqrt((g - 1) / g * sum over blocks (v_b - mean v)^2).

    Unit of the figures, float64. nan with fewer than two blocks, and where a value is not finite
    (inf - inf: a quantile beyond the last bin has no error). For a mean of equal blocks it is the
    standard error of the mean exactly. Source: Quenouille 1956, Tukey 1958.
    Oracle in tests: scipy.stats.sem.
    """
    values = np.asarray(leave_one_out, dtype=np.float64)
    blocks = len(values)
    if blocks < 2:
        return np.full(values.shape[1:], np.nan)
    with np.errstate(invalid="ignore"):
        spread = ((values - values.mean(axis=0)) ** 2).sum(axis=0)
    return np.asarray(np.sqrt((blocks - 1) / blocks * spread))
