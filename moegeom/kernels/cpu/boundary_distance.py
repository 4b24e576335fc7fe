"""Distance to the boundary of an affine cell, with pruning by expert.

The pair (k-th, (k+1)-th) gives a first upper bound; an expert i of the chosen set can only beat it
if its smallest gap times its smallest inverse row distance does, which is rare (CELLS.md section 5).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.geometry.boundary import NEVER, RowDistances


# No nan arises: gaps and inverses are finite, and only +inf is ever added (the closed experts).
@njit(nogil=True, cache=True, fastmath={"nnan", "nsz", "reassoc", "contract"})
def _least_quotient(row_logits, inverse_row, closed, expert_logit):
    least = np.inf
    for other in range(row_logits.shape[0]):
        quotient = (expert_logit - row_logits[other]) * inverse_row[other] + closed[other]
        least = min(least, quotient)
    return least


@njit(nogil=True, cache=True)
def _distance(logits, chosen, inverse, smallest, distance, pair):
    tokens, experts = logits.shape
    k = chosen.shape[1]
    closed = np.zeros(experts)
    row = np.empty(experts)
    for token in range(tokens):
        runner_up = -np.inf
        for rank in range(k):
            closed[chosen[token, rank]] = np.inf
        for expert in range(experts):
            row[expert] = logits[token, expert]
            runner_up = max(runner_up, row[expert] if closed[expert] == 0.0 else -np.inf)
        best = NEVER
        pair[token, 0] = -1
        pair[token, 1] = -1
        if k < experts:
            for rank in range(k - 1, -1, -1):
                expert = chosen[token, rank]
                gap = row[expert] - runner_up
                if gap * smallest[expert] >= best:
                    continue
                least = _least_quotient(row, inverse[expert], closed, row[expert])
                if least < best:
                    best = least
                    pair[token, 0] = expert
        distance[token] = best if best < NEVER else np.inf
        if pair[token, 0] >= 0:
            # The vectorised minimum may round otherwise than this loop: take the nearest, exactly.
            expert = pair[token, 0]
            nearest = np.inf
            for other in range(experts):
                if closed[other] == 0.0:
                    quotient = (row[expert] - row[other]) * inverse[expert, other]
                    if quotient < nearest:
                        nearest = quotient
                        pair[token, 1] = other
            distance[token] = nearest
        for rank in range(k):
            closed[chosen[token, rank]] = 0.0


def boundary_distance(
    logits: np.ndarray, chosen: np.ndarray, rows: RowDistances
) -> tuple[np.ndarray, np.ndarray]:
    """Distance and nearest wall (expert out, expert in)."""
    distance = np.empty(len(logits))
    pair = np.empty((len(logits), 2), dtype=np.int32)
    _distance(logits, chosen, rows.inverse, rows.smallest, distance, pair)
    return distance, pair
