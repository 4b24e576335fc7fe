"""A number for a chosen set."""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.kernels.reference.expert_set_key import expert_codes, mix


@njit(nogil=True, cache=True)
def _sums(chosen, codes, out):
    for token in range(chosen.shape[0]):
        total = np.uint64(0)
        for slot in range(chosen.shape[1]):
            if chosen[token, slot] >= 0:
                total += codes[chosen[token, slot]]
        out[token] = total


def expert_set_key(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """Mixed sum, modulo 2^64, of the codes of the chosen experts."""
    out = np.empty(len(chosen), dtype=np.uint64)
    _sums(chosen, expert_codes(num_experts), out)
    return mix(out)
