"""Chosen experts and margin, by repeated maxima over integer keys.

A key orders as the score does, then by falling index, so one integer maximum finds the winner and
its number, ties included; integers vectorise where float comparisons with nan rules do not.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_LOWEST = np.iinfo(np.int64).min


@njit(nogil=True, cache=True)
def _top_k_float32(logits, bits, k, chosen, margin):
    tokens, experts = bits.shape
    keys = np.empty(experts, dtype=np.int64)
    for token in range(tokens):
        for expert in range(experts):
            code = np.int64(bits[token, expert])
            # Negative floats order backwards by their bits; -0.0 becomes 0.0.
            order = code if code >= 0 else -(code & 0x7FFFFFFF)
            keys[expert] = (order << 32) + (0x7FFFFFFF - expert)
        for rank in range(k):
            best = _LOWEST
            for expert in range(experts):
                best = max(best, keys[expert])
            winner = 0x7FFFFFFF - (best & 0xFFFFFFFF)
            chosen[token, rank] = winner
            keys[winner] = _LOWEST
        if k == experts:
            margin[token] = np.inf
            continue
        best = _LOWEST
        for expert in range(experts):
            best = max(best, keys[expert])
        following = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        next_logit = np.float64(logits[token, following])
        last_logit = np.float64(logits[token, chosen[token, k - 1]])
        margin[token] = last_logit - next_logit if next_logit != -np.inf else np.inf


@njit(nogil=True, cache=True)
def _top_k_float64(selection, bits, k, chosen, margin):
    tokens, experts = bits.shape
    keys = np.empty(experts, dtype=np.int64)
    for token in range(tokens):
        for expert in range(experts):
            code = bits[token, expert]
            keys[expert] = code if code >= 0 else -(code & 0x7FFFFFFFFFFFFFFF)
        last = 0.0
        for rank in range(min(k + 1, experts)):
            best = _LOWEST
            for expert in range(experts):
                best = max(best, keys[expert])
            winner = 0
            while keys[winner] != best:
                winner += 1
            keys[winner] = _LOWEST
            if rank < k:
                chosen[token, rank] = winner
                last = selection[token, winner]
                margin[token] = np.inf
            elif selection[token, winner] != -np.inf:
                margin[token] = last - selection[token, winner]


def top_k(selection: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest in descending order, ties to the lowest index, and the margin."""
    chosen = np.empty((len(selection), k), dtype=np.int32)
    margin = np.empty(len(selection))
    if selection.dtype == np.float32:
        _top_k_float32(selection, selection.view(np.int32), k, chosen, margin)
    else:
        _top_k_float64(selection, selection.view(np.int64), k, chosen, margin)
    return chosen, margin
