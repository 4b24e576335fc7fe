"""Chosen experts, their scores and weights."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from moegeom.core.router import GroupMask, Rule
from moegeom.kernels.cpu import UNCOUNTED, kernel
from moegeom.kernels.cpu.exponential import LEAST, power_of_e
from moegeom.kernels.reference import routing_weights as reference


# ------------------------------------------------------------------------------------------- inputs
# Only the order of the sum is free ("reassoc", "contract"), so that it runs in vector registers.
@kernel(fastmath={"reassoc", "contract"})
def _squares(values, squares):
    for token in range(values.shape[0]):
        total = np.float32(0.0)
        for coordinate in range(values.shape[1]):
            total += values[token, coordinate] * values[token, coordinate]
        squares[token] = total


def input_norm(values: np.ndarray) -> np.ndarray:
    """|y| of each token; float32 sums, done again in float64 where they leave its range."""
    squares = np.empty(len(values))
    _squares(values, squares)
    # A sum outside [2^-100, inf) has overflowed, lost small squares, or met a non-finite value.
    for token in np.flatnonzero(~((squares >= 2.0**-100) & np.isfinite(squares))):
        row = values[token].astype(np.float64)
        squares[token] = np.dot(row, row)
    return np.sqrt(squares)


# ------------------------------------------------------------------------------------------- powers
#: The order of sums is free, so that they run in vector registers.
_ANY_ORDER = {"reassoc", "contract"}


# Without nan rules the comparisons run in vector registers.
@njit(**UNCOUNTED, fastmath={"nnan", "nsz"})
def _largest(row):
    """Largest number of a row without nan, as float64."""
    largest = row[0]
    for column in range(row.shape[0]):
        largest = row[column] if row[column] > largest else largest
    return np.float64(largest)


# ------------------------------------------------------------------------------------------- scores
@kernel()
def _softmax_scores(logits, bias, out):
    experts = logits.shape[1]
    for token in range(logits.shape[0]):
        largest = np.float64(logits[token, 0])
        for expert in range(experts):
            largest = max(largest, np.float64(logits[token, expert]))
        total = 0.0
        for expert in range(experts):
            power = math.exp(logits[token, expert] - largest)
            out[token, expert] = power
            total += power
        for expert in range(experts):
            out[token, expert] = out[token, expert] / total + bias[expert]


@kernel()
def _sigmoid_scores(logits, bias, out):
    for token in range(logits.shape[0]):
        for expert in range(logits.shape[1]):
            z = np.float64(logits[token, expert])
            decay = math.exp(-abs(z))
            out[token, expert] = (1.0 if z >= 0 else decay) / (1.0 + decay) + bias[expert]


@kernel()
def _sqrt_softplus_scores(logits, bias, out):
    for token in range(logits.shape[0]):
        for expert in range(logits.shape[1]):
            z = np.float64(logits[token, expert])
            out[token, expert] = (
                math.sqrt(max(z, 0.0) + math.log1p(math.exp(-abs(z)))) + bias[expert]
            )


@kernel()
def _identity_scores(logits, bias, out):
    for token in range(logits.shape[0]):
        for expert in range(logits.shape[1]):
            out[token, expert] = np.float64(logits[token, expert]) + bias[expert]


_SCORE_LOOPS = {
    "identity": _identity_scores,
    "softmax": _softmax_scores,
    "sigmoid": _sigmoid_scores,
    "sqrt_softplus": _sqrt_softplus_scores,
}


def selection_scores(logits: np.ndarray, score: str, bias: np.ndarray) -> np.ndarray:
    """``score(logit) + bias`` in float64."""
    out = np.empty(logits.shape)
    _SCORE_LOOPS[score](logits, bias, out)
    return out


# ------------------------------------------------------------------------------------------- groups
@kernel()
def _mask(selection, num_groups, num_kept, is_sum_of_two, fill, masked, margin):
    tokens, experts = selection.shape
    size = experts // num_groups
    scores = np.empty(num_groups)
    is_kept = np.empty(num_groups, dtype=np.bool_)
    for token in range(tokens):
        for group in range(num_groups):
            first = -np.inf
            second = -np.inf
            for expert in range(group * size, (group + 1) * size):
                # no branches: which of the numbers is larger cannot be foretold
                value = selection[token, expert]
                lower = first if value > first else value
                first = value if value > first else first
                second = lower if lower > second else second
            scores[group] = first + second if is_sum_of_two and size > 1 else first
            is_kept[group] = False
        last = np.inf
        for _ in range(num_kept):
            best = -1
            for group in range(num_groups):
                # strictly greater: of equal groups the lower index is kept
                if not is_kept[group] and (best < 0 or scores[group] > scores[best]):
                    best = group
            is_kept[best] = True
            last = scores[best]
        following = -np.inf
        for group in range(num_groups):
            if not is_kept[group]:
                following = max(following, scores[group])
            for expert in range(group * size, (group + 1) * size):
                masked[token, expert] = selection[token, expert] if is_kept[group] else fill
        margin[token] = last - following


def group_mask(selection: np.ndarray, groups: GroupMask) -> tuple[np.ndarray, np.ndarray]:
    """Masked selection scores and the group margin."""
    masked = np.empty_like(selection)
    margin = np.empty(len(selection))
    is_sum = groups.score == "top2_sum"
    _mask(selection, groups.num_groups, groups.num_kept, is_sum, groups.fill, masked, margin)
    return masked, margin


# -------------------------------------------------------------------------------------- the largest
# A key orders as the score does, then by falling index, so one integer maximum finds the winner and
# its number, ties included; integers vectorise where float comparisons with nan rules do not.
_LOWEST = np.iinfo(np.int64).min


@kernel()
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


@kernel()
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


# ---------------------------------------------------------------------------------- routing weights
@kernel()
def _scale_weights(renormalise, epsilon, scale, out):
    for token in range(out.shape[0]):
        total = 0.0
        for rank in range(out.shape[1]):
            total += out[token, rank]
        divisor = total + epsilon if renormalise else 1.0
        factor = scale / divisor if divisor != 0.0 else np.inf  # of scores of 0: nan
        for rank in range(out.shape[1]):
            out[token, rank] *= factor


@kernel(fastmath=_ANY_ORDER)
def _softmax_of_chosen(logits, chosen, out):
    for token in range(logits.shape[0]):
        top = _largest(logits[token])
        total = 0.0
        for expert in range(logits.shape[1]):
            total += power_of_e(np.float64(logits[token, expert]) - top)
        for rank in range(chosen.shape[1]):
            # powers that are no normal numbers are powers here, too
            out[token, rank] = math.exp(np.float64(logits[token, chosen[token, rank]]) - top)
            out[token, rank] /= total


@kernel()
def _softmax_of_selected(logits, chosen, scale, out):
    for token in range(chosen.shape[0]):
        # the largest chosen logit is not the first one when a bias decided the order
        largest = -np.inf
        for rank in range(chosen.shape[1]):
            largest = max(largest, np.float64(logits[token, chosen[token, rank]]))
        total = 0.0
        for rank in range(chosen.shape[1]):
            power = math.exp(logits[token, chosen[token, rank]] - largest)
            out[token, rank] = power
            total += power
        for rank in range(chosen.shape[1]):
            out[token, rank] *= scale / total


def routing_weights(
    logits: np.ndarray, chosen: np.ndarray, rule: Rule, shared_sum: np.ndarray | None = None
) -> np.ndarray:
    """Weights in the order of ``chosen``."""
    facts = rule.weights
    has_loop = facts.source in _WEIGHT_LOOPS and (facts.floor, facts.power) == (0, 1)
    if not has_loop or shared_sum is not None:
        return reference(logits, chosen, rule, shared_sum)  # rare rules: no loop of their own
    out = np.empty(chosen.shape)
    _WEIGHT_LOOPS[facts.source](logits, chosen, rule, out)
    return out


def _of_scores(logits: np.ndarray, chosen: np.ndarray, rule: Rule, out: np.ndarray) -> None:
    facts = rule.weights
    if rule.score == "softmax":
        _softmax_of_chosen(logits, chosen, out)
    else:
        scores = selection_scores(logits, rule.score, np.zeros(logits.shape[1]))
        out[:] = np.take_along_axis(scores, chosen, axis=1)
    _scale_weights(facts.renormalise, facts.epsilon, facts.scale, out)


def _of_selected(logits: np.ndarray, chosen: np.ndarray, rule: Rule, out: np.ndarray) -> None:
    facts = rule.weights
    scale = facts.scale / (1.0 + facts.epsilon) if facts.renormalise else facts.scale
    _softmax_of_selected(logits, chosen, scale, out)


_WEIGHT_LOOPS = {"scores": _of_scores, "softmax_of_selected_logits": _of_selected}


# ------------------------------------------------------------------------------------ probabilities
#: Tokens at a time, so that the arrays stay in the cache.
_CHUNK = 512


def _log_scores(z: np.ndarray, score: str) -> np.ndarray:
    """Logarithm of the score, so that its softmax is the score over its sum."""
    if score == "sigmoid":
        return np.minimum(z, 0) - np.log1p(np.exp(-np.abs(z)))
    if score == "sqrt_softplus":
        # log(1 + e^z) ~ e^z far below 0, where the sum would lose it
        softplus = np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))
        with np.errstate(divide="ignore"):
            return np.where(z < -15, z, np.log(softplus)) / 2
    return z


def score_statistics(logits: np.ndarray, score: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities (of the dtype of the logits), entropy and log-sum-exp."""
    logits = np.ascontiguousarray(logits)
    probability = np.empty(logits.shape, logits.dtype)
    entropy, log_sum_exp = np.empty((2, len(logits)))
    for start in range(0, len(logits), _CHUNK):
        part = slice(start, start + _CHUNK)
        z = logits[part]
        u = _log_scores(z, score)
        _softmax(u, probability[part], entropy[part], log_sum_exp[part])
        if u is not z:
            _log_sum_exp(z, log_sum_exp[part])
    return probability, entropy, log_sum_exp


@kernel(fastmath=_ANY_ORDER)
def _softmax(u, probability, entropy, log_sum_exp):
    powers = np.empty(u.shape[1])
    for token in range(u.shape[0]):
        top = _largest(u[token])
        total = 0.0
        moment = 0.0
        for expert in range(u.shape[1]):
            # as far below as powers go is enough
            shifted = np.float64(u[token, expert]) - top
            shifted = shifted if shifted > LEAST else LEAST
            power = power_of_e(shifted)
            powers[expert] = power
            total += power
            moment += shifted * power
        share = 1.0 / total
        for expert in range(u.shape[1]):
            probability[token, expert] = powers[expert] * share
        log_total = math.log(total)
        # rounding may leave -1e-16 where one expert has all
        entropy[token] = max(log_total - moment * share, 0.0)
        log_sum_exp[token] = top + log_total


@kernel(fastmath=_ANY_ORDER)
def _log_sum_exp(logits, out):
    for token in range(logits.shape[0]):
        top = _largest(logits[token])
        total = 0.0
        for expert in range(logits.shape[1]):
            total += power_of_e(np.float64(logits[token, expert]) - top)
        out[token] = top + math.log(total)
