"""Comparison of two choices."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _same(chosen, recorded, out):
    for token in range(chosen.shape[0]):
        same = True
        for slot in range(recorded.shape[1]):
            found = False
            for rank in range(chosen.shape[1]):
                if chosen[token, rank] == recorded[token, slot]:
                    found = True
            repeated = False
            for earlier in range(slot):
                if recorded[token, earlier] == recorded[token, slot]:
                    repeated = True
            same = same and found and not repeated
        out[token] = same


def same_set(chosen: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """True where both rows hold the same set of experts, in whatever order."""
    out = np.zeros(len(chosen), dtype=np.bool_)
    if chosen.shape[1] == recorded.shape[1]:
        _same(chosen, recorded, out)
    return out
