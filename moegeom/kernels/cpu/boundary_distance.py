"""Distance to the boundary of an affine cell, with pruning by expert.

An expert i of the chosen set can only give a nearer boundary if its smallest gap, to the (k+1)-th
logit, times its smallest inverse row distance is below the best quotient so far. Going from the
k-th expert upwards, most experts are passed over (docs/theory.md G3).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.geometry.boundary.linear import NEVER, RowDistances

#: The gap to the (k+1)-th logit is a rounded sum: a little less of it is a safe lower bound.
_SAFE = 1.0 - 2.0**-50


# Only multiplication and addition may be fused: adding 0 is exact, so each quotient is rounded as
# in the reference. Quotients are >= 0, so their bits order as they do; integer minima vectorise.
@njit(nogil=True, cache=True, fastmath={"contract"})
def _distance(logits, chosen, margin, inverse, smallest, distance, pair, wants_pair):
    tokens, experts = logits.shape
    k = chosen.shape[1]
    closed = np.zeros(experts)  # inf for the chosen experts of the current token
    quotients = np.empty(experts)
    bits = quotients.view(np.int64)
    never = np.array([NEVER]).view(np.int64)[0]
    for token in range(tokens):
        for rank in range(k):
            closed[chosen[token, rank]] = np.inf
        best = NEVER
        best_bits = never
        out = -1
        last = np.float64(logits[token, chosen[token, k - 1]])
        for rank in range(k - 1, -1, -1):
            expert = chosen[token, rank]
            own = np.float64(logits[token, expert])
            if ((own - last) + margin[token]) * smallest[expert] * _SAFE >= best:
                continue
            for other in range(experts):
                gap = own - np.float64(logits[token, other])
                quotients[other] = gap * inverse[expert, other] + closed[other]
            least = never
            for other in range(experts):
                least = min(least, bits[other])
            if least < best_bits:
                best_bits = least
                out = expert
                nearest = 0
                while bits[nearest] != least:
                    nearest += 1
                best = quotients[nearest]
                if wants_pair:
                    pair[token, 1] = nearest
        distance[token] = best if out >= 0 else np.inf
        if wants_pair:
            pair[token, 0] = out
            if out < 0:
                pair[token, 1] = -1
        for rank in range(k):
            closed[chosen[token, rank]] = 0.0


def boundary_distance(
    logits: np.ndarray,
    chosen: np.ndarray,
    margin: np.ndarray,
    rows: RowDistances,
    wants_pair: bool = True,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Distance and, if wanted, nearest boundary (expert out, expert in)."""
    distance = np.empty(len(logits))
    pair = np.empty((len(logits) if wants_pair else 0, 2), dtype=np.int32)
    _distance(logits, chosen, margin, rows.inverse, rows.smallest, distance, pair, wants_pair)
    return distance, pair if wants_pair else None
