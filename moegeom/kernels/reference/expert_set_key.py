"""A number for a chosen set."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, UInt64

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def mix(state: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """The splitmix64 finaliser: a fixed bijection whose outputs look independent."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    return state ^ (state >> np.uint64(31))


def expert_codes(num_experts: int) -> UInt64[np.ndarray, "experts"]:
    """One fixed pseudo-random 64-bit number per expert."""
    return mix(np.arange(1, num_experts + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


def expert_set_key(
    chosen: Int32[np.ndarray, "tokens k"], num_experts: int
) -> UInt64[np.ndarray, "tokens"]:
    """Mixed sum, modulo 2^64, of the codes of the chosen experts; -1 entries count for nothing.

    Independent of the order. Two of n distinct sets share a key with probability about n^2 / 2^65.
    """
    codes = np.append(expert_codes(num_experts), np.uint64(0))
    return mix(codes[chosen].sum(axis=1, dtype=np.uint64))
