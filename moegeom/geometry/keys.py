"""Numbers that stand for tokens, experts and sets of experts, and look random."""

from __future__ import annotations

import numpy as np

from moegeom.core.shapes import Int64, Integer, UInt64

#: 2^64 over the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15


def mix(state: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """The splitmix64 finaliser: a fixed bijection whose outputs look independent.

    Source: Steele, Lea and Flood 2014.
    """
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def token_hash(token: Int64[np.ndarray, "tokens"]) -> UInt64[np.ndarray, "tokens"]:
    """A number for each token that looks random and differs from that of every other token."""
    return mix(token.astype(np.uint64) + np.uint64(_GOLDEN))


def expert_codes(num_experts: int) -> UInt64[np.ndarray, "experts"]:
    """One fixed pseudo-random 64-bit number per expert."""
    return mix(np.arange(1, num_experts + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


def expert_set_key(
    chosen: Integer[np.ndarray, "tokens k"], num_experts: int
) -> UInt64[np.ndarray, "tokens"]:
    """Mixed sum, modulo 2^64, of the codes of the chosen experts; -1 entries count for nothing.

    Independent of the order. Two of n distinct sets share a key with probability about n^2 / 2^65.
    """
    codes = np.asarray(np.append(expert_codes(num_experts), np.uint64(0)), like=chosen)
    return mix(codes[chosen].sum(axis=1, dtype=np.uint64))
