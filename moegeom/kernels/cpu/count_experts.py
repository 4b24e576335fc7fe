"""Counts by expert."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _count(counts, chosen, population, block):
    for token in range(chosen.shape[0]):
        for slot in range(chosen.shape[1]):
            expert = chosen[token, slot]
            if expert >= 0:
                counts[population[token], block[token], expert] += 1


def count_experts(
    counts: np.ndarray, chosen: np.ndarray, population: np.ndarray, block: np.ndarray
) -> None:
    """Adds 1 at (population, block, expert) for each chosen slot; -1 is an empty slot."""
    _count(counts, chosen, population, block)
