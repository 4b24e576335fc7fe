"""Sums of probabilities by expert."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int32, Int64


def add_scores(
    sums: Int64[np.ndarray, "populations blocks experts"],
    probability: Float[np.ndarray, "tokens experts"],
    population: Int32[np.ndarray, "tokens"],
    block: Int32[np.ndarray, "tokens"],
) -> None:
    """Adds each probability, rounded to a whole number of 2^-36, at (population, block, expert)."""
    fixed = np.rint(probability.astype(np.float64) * 2.0**36).astype(np.int64)
    np.add.at(sums, (population, block), fixed)
