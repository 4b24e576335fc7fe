"""Counts by pair of experts."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _count(counts, chosen, block):
    for token in range(chosen.shape[0]):
        table = counts[block[token]]
        for slot in range(chosen.shape[1]):
            one = chosen[token, slot]
            if one < 0:
                continue
            table[one, one] += 1
            for other_slot in range(slot):
                other = chosen[token, other_slot]
                if other >= 0:
                    table[min(one, other), max(one, other)] += 1


def count_pairs(counts: np.ndarray, chosen: np.ndarray, block: np.ndarray) -> None:
    """Adds 1 at (block, i, j) for each two slots of a token with i <= j; -1 is an empty slot."""
    _count(counts, chosen, block)
