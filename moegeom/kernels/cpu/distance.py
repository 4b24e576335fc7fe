"""Distances to the boundary of an affine cell: exact, of the largest logits, in deviations, as
angles; and near-ties.
"""

from __future__ import annotations

import math

import numpy as np

from moegeom.geometry.boundary import linear
from moegeom.geometry.boundary.linear import BELOW_ALL, NEVER, Cones, RowDistances, spread
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16, RowSpreads
from moegeom.kernels.cpu import kernel

# -------------------------------------------------------------------------------------------- exact
# An expert i of the chosen set can only give a nearer boundary if its smallest gap, to the (k+1)-th
# logit, times its smallest inverse row distance is below the best quotient so far. Going from the
# k-th expert upwards, most experts are passed over (docs/theory.md G3).


#: The gap to the (k+1)-th logit is a rounded sum: a little less of it is a safe lower bound.
_SAFE = 1.0 - 2.0**-50


# Only multiplication and addition may be fused: adding 0 is exact, so each quotient is rounded as
# in the reference. Quotients are >= 0, so their bits order as they do; integer minima vectorise.
@kernel(fastmath={"contract"})
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


@kernel()
def _raised(logits, expert, out):
    for token in range(logits.shape[0]):
        least = logits[token, 0]
        for rank in range(1, logits.shape[1]):
            least = min(least, logits[token, rank])
        for other in range(out.shape[1]):
            out[token, other] = least
        for rank in range(logits.shape[1]):
            out[token, expert[token, rank]] = logits[token, rank]


@kernel()
def _holds(expert, target, out):
    for token in range(expert.shape[0]):
        for rank in range(expert.shape[1]):
            out[token] |= expert[token, rank] == target[token]


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
        filled = spread(logits[again], expert[again], far, num_experts)
        upper[again], pair[again] = boundary_distance(filled, chosen[again], margin[again], rows)
        pair[upper != lower] = -1
    return lower, upper, pair


# ------------------------------------------------------------------------ in deviations of rounding
@kernel()
def _variance(first, second, squares):
    total = 0.0
    for coordinate in range(squares.shape[0]):
        difference = np.float64(first[coordinate]) - np.float64(second[coordinate])
        total += difference * difference * squares[coordinate]
    return total


@kernel()
def _sigmas(token, rank, other, logits, chosen, weight, squares, unit):
    one = chosen[token, rank]
    gap = np.float64(logits[token, one]) - np.float64(logits[token, other])
    scale = unit * math.sqrt(_variance(weight[one], weight[other], squares))
    return gap / scale if scale > 0.0 else np.inf


# All terms are at least 0, so that no order of summation errs by more than 1e-10 of the sum: enough
# for a bound, and a tenth of the time.
@kernel(fastmath={"reassoc", "contract"})
def _about_variance(first, second, squares):
    total = 0.0
    for coordinate in range(squares.shape[0]):
        difference = np.float64(first[coordinate]) - np.float64(second[coordinate])
        total += difference * difference * squares[coordinate]
    return total


@kernel(fastmath={"reassoc", "contract"})
def _squares(values, squares):
    """The squares of a token's coordinates, the sum of theirs, and the largest square."""
    fourth, largest = 0.0, 0.0
    for coordinate in range(values.shape[0]):
        value = np.float64(values[coordinate])
        square = value * value
        squares[coordinate] = square
        fourth += square * square
        largest = square if square > largest else largest
    return fourth, largest


#: What bounds are stretched by: more than they are rounded.
_SLACK = 1.0 + 1e-9


@kernel()
def _nearest(values, logits, chosen, weight, distance, distance_4, unit, out):
    tokens, experts = logits.shape
    k = chosen.shape[1]
    inside = np.zeros(experts, dtype=np.bool_)
    squares = np.empty(values.shape[1])
    least = np.empty((k, experts))
    for token in range(tokens):
        fourth, largest = _squares(values[token], squares)
        largest = math.sqrt(largest) * _SLACK
        norm_4 = math.sqrt(math.sqrt(fourth)) * _SLACK
        inside[:] = False
        for rank in range(k):
            inside[chosen[token, rank]] = True
        # no coordinate moves by more than the largest one does, and by Cauchy and Schwarz no sum
        # exceeds that of the fourth powers: what is no nearer even so needs no sum
        first, nearest, first_rank, first_other = np.inf, np.inf, -1, -1
        for rank in range(k):
            one = chosen[token, rank]
            for other in range(experts):
                least[rank, other] = np.inf
                if inside[other]:
                    continue
                gap = np.float64(logits[token, one]) - np.float64(logits[token, other])
                if gap == 0.0:
                    nearest = 0.0
                most = unit * min(largest * distance[one, other], norm_4 * distance_4[one, other])
                if most > 0.0:
                    least[rank, other] = gap / most
                    if least[rank, other] < first:
                        first, first_rank, first_other = least[rank, other], rank, other
        if first_rank >= 0 and nearest > 0.0:
            nearest = _sigmas(token, first_rank, first_other, logits, chosen, weight, squares, unit)
            for rank in range(k):
                one = chosen[token, rank]
                for other in range(experts):
                    if not least[rank, other] <= nearest * _SLACK:
                        continue
                    gap = np.float64(logits[token, one]) - np.float64(logits[token, other])
                    about = unit * math.sqrt(_about_variance(weight[one], weight[other], squares))
                    if gap <= nearest * about * _SLACK:
                        sigmas = _sigmas(token, rank, other, logits, chosen, weight, squares, unit)
                        nearest = min(nearest, sigmas)
        out[token] = nearest


def rounding_sigmas(
    values: np.ndarray, logits: np.ndarray, chosen: np.ndarray, rows: RowSpreads
) -> np.ndarray:
    """As :mod:`moegeom.geometry.rounding`; skips pairs that a bound rules out."""
    out = np.empty(len(values))
    unit = ROUNDING_RMS * UNIT_BFLOAT16
    _nearest(values, logits, chosen, rows.weight, rows.distance, rows.fourth, unit, out)
    return out


# -------------------------------------------------------------------------- angles before the norm
# Without biases all cones are planes through 0, and the arc sine rises: that of the least sine is
# the least angle, so that one is taken for each token and not one for each pair.


@kernel(error_model="numpy")
def _least_sine(logits, chosen, length, unit_length, out):
    tokens, experts = logits.shape
    closed = np.zeros(experts)  # inf for the chosen experts of the current token
    for token in range(tokens):
        for rank in range(chosen.shape[1]):
            closed[chosen[token, rank]] = np.inf
        best = np.inf
        for rank in range(chosen.shape[1]):
            one = chosen[token, rank]
            own = np.float64(logits[token, one])
            for other in range(experts):
                gap = own - np.float64(logits[token, other])
                apart = length[one, other]
                sine = min(abs(gap / (apart * unit_length[token])), 1.0)
                # rows that are equal tie at a gap of 0, and never else
                sine = sine if apart > 0.0 else np.inf
                sine = sine if gap != 0.0 else 0.0
                best = min(best, sine + closed[other])
        out[token] = best
        for rank in range(chosen.shape[1]):
            closed[chosen[token, rank]] = 0.0


def boundary_angle(
    logits: np.ndarray, chosen: np.ndarray, cones: Cones, unit_length: np.ndarray
) -> np.ndarray:
    """As :mod:`moegeom.geometry.boundary.linear`."""
    if cones.bias.any():
        return linear.boundary_angle(logits, chosen, cones, unit_length)
    out = np.empty(len(logits))
    _least_sine(logits, chosen, cones.length, unit_length, out)
    return np.where(out <= 1.0, np.arcsin(np.minimum(out, 1.0)), np.inf)
