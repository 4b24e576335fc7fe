"""Distances to the boundary of an affine cell: exact, of the largest logits, in deviations."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.geometry.boundary.linear import BELOW_ALL, NEVER, RowDistances, spread
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16

# -------------------------------------------------------------------------------------------- exact
# An expert i of the chosen set can only give a nearer boundary if its smallest gap, to the (k+1)-th
# logit, times its smallest inverse row distance is below the best quotient so far. Going from the
# k-th expert upwards, most experts are passed over (docs/theory.md G3).


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


# -------------------------------------------------------------------------- from the largest logits
# The lower bound is the distance with every other logit at the least known one. Where its nearest
# boundary is one between known experts it is exact, which it is for nearly all tokens; only the
# others are looked at a second time.


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


# ------------------------------------------------------------------------ in deviations of rounding
@njit(nogil=True, cache=True)
def _variance(first, second, squares):
    total = 0.0
    for coordinate in range(squares.shape[0]):
        difference = np.float64(first[coordinate]) - np.float64(second[coordinate])
        total += difference * difference * squares[coordinate]
    return total


@njit(nogil=True, cache=True)
def _nearest(values, logits, chosen, weight, distance, distance_4, unit, out):
    tokens, experts = logits.shape
    inside = np.zeros(experts, dtype=np.bool_)
    squares = np.empty(values.shape[1])
    for token in range(tokens):
        largest, fourth = 0.0, 0.0
        for coordinate in range(values.shape[1]):
            value = np.float64(values[token, coordinate])
            square = value * value
            squares[coordinate] = square
            fourth += square * square
            largest = max(largest, abs(value))
        norm_4 = math.sqrt(math.sqrt(fourth)) * (1.0 + 1e-9)
        inside[:] = False
        for rank in range(chosen.shape[1]):
            inside[chosen[token, rank]] = True
        best = np.inf
        for rank in range(chosen.shape[1] - 1, -1, -1):
            one = chosen[token, rank]
            for other in range(experts):
                if inside[other]:
                    continue
                gap = np.float64(logits[token, one]) - np.float64(logits[token, other])
                # no coordinate moves by more than the largest one does, and by Cauchy and Schwarz
                # no sum exceeds that of the fourth powers: a pair that cannot be nearer even so
                # needs no sum
                most = min(largest * distance[one, other], norm_4 * distance_4[one, other])
                if gap > best * unit * most * (1.0 + 1e-9):
                    continue
                scale = unit * math.sqrt(_variance(weight[one], weight[other], squares))
                if gap == 0.0:
                    best = 0.0
                elif scale > 0.0:
                    best = min(best, gap / scale)
        out[token] = best


def _distances_4(rows: np.ndarray) -> np.ndarray:
    """Upper bounds on ``(sum of |r_i - r_j|^4)^(1/4)``, by products of powers of the rows."""
    squares = rows**2
    own = (squares**2).sum(axis=1)
    mixed = (rows * squares) @ rows.T
    both = own[:, None] + own[None, :]
    fourth = both + 6.0 * (squares @ squares.T) - 4.0 * (mixed + mixed.T)
    return (np.maximum(fourth, 0.0) + 1e-10 * both) ** 0.25


def rounding_sigmas(
    values: np.ndarray, logits: np.ndarray, chosen: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """As :mod:`moegeom.geometry.rounding`; skips pairs that a bound rules out."""
    rows = weight.astype(np.float64)
    squares = (rows**2).sum(axis=1)
    squared = squares[:, None] + squares[None, :] - 2.0 * (rows @ rows.T)
    # the product may lose what is equal up to rounding: it only has to be an upper bound
    distance = np.sqrt(np.maximum(squared, 0.0) + 1e-12 * (squares[:, None] + squares[None, :]))
    out = np.empty(len(values))
    unit = ROUNDING_RMS * UNIT_BFLOAT16
    _nearest(values, logits, chosen, weight, distance, _distances_4(rows), unit, out)
    return out
