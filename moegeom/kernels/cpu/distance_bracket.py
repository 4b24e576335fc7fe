"""Bounds of the distance to the boundary from the largest logits.

The lower bound is the distance with every other logit at the least known one. Where its nearest
boundary is one between known experts it is exact, which it is for nearly all tokens; only the
others are looked at a second time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.geometry.boundary.linear import RowDistances
from moegeom.geometry.boundary.top_logits import BELOW_ALL, spread
from moegeom.kernels.cpu.boundary_distance import boundary_distance


@njit(nogil=True, cache=True)
def _raised(logits, expert, out):
    for token in range(logits.shape[0]):
        least = logits[token, 0]
        for rank in range(1, logits.shape[1]):
            least = min(least, logits[token, rank])
        for other in range(out.shape[1]):
            out[token, other] = least
        for rank in range(logits.shape[1]):
            out[token, expert[token, rank]] = logits[token, rank]


@njit(nogil=True, cache=True)
def _holds(expert, wanted, out):
    for token in range(expert.shape[0]):
        for rank in range(expert.shape[1]):
            out[token] |= expert[token, rank] == wanted[token]


def distance_bracket(
    logits: np.ndarray,
    expert: np.ndarray,
    chosen: np.ndarray,
    margin: np.ndarray,
    rows: RowDistances,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least and largest distance, nearest boundary (expert out, expert in)."""
    num_experts = len(rows.inverse)
    raised = np.empty((len(logits), num_experts), dtype=logits.dtype)
    _raised(logits, expert, raised)
    lower, pair = boundary_distance(raised, chosen, margin, rows)
    assert pair is not None, "pairs are wanted"
    upper = lower.copy()
    is_known = pair[:, 1] < 0
    _holds(expert, pair[:, 1], is_known)
    again = np.flatnonzero(~is_known)
    if again.size:
        far = np.full(again.size, BELOW_ALL)
        known = spread(logits[again], expert[again], far, num_experts)
        upper[again], pair[again] = boundary_distance(known, chosen[again], margin[again], rows)
        pair[upper != lower] = -1
    return lower, upper, pair
