"""How many experts two choices have in common."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _count(first, second, out):
    for token in range(first.shape[0]):
        shared = 0
        for slot in range(first.shape[1]):
            for other in range(second.shape[1]):
                if first[token, slot] == second[token, other] and first[token, slot] >= 0:
                    shared += 1
        out[token] = shared


def num_shared(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Size of the intersection of each two rows, whatever their order; -1 is an empty slot."""
    out = np.empty(len(first), dtype=np.int64)
    _count(first, second, out)
    return out
