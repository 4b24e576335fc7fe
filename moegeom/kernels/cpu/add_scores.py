"""Sums of probabilities by expert."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _add(sums, probability, population, block):
    for token in range(probability.shape[0]):
        row = sums[population[token], block[token]]
        for expert in range(probability.shape[1]):
            row[expert] += np.int64(np.rint(np.float64(probability[token, expert]) * 2.0**36))


def add_scores(
    sums: np.ndarray, probability: np.ndarray, population: np.ndarray, block: np.ndarray
) -> None:
    """Adds each probability, rounded to a whole number of 2^-36, at (population, block, expert)."""
    _add(sums, probability, population, block)
