"""Other ways to choose experts: what a what-if computes, and what trainable modules are held to.

Sets of unequal size are masks [tokens, experts], and weights stand beside them in the same shape:
so no sum depends on how many experts another token has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moegeom.core.router import Weights
from moegeom.core.shapes import Bool, Float, Float64, Int32
from moegeom.geometry.load import expert_capacity
from moegeom.geometry.selection import routing_weights, sigmoid, top_k
from moegeom.geometry.set_code import chosen_mask

# ----------------------------------------------------------------------------------- smoothed top-k
#: Exponents of the activation of S0 section 6.
A, B = 1.0, 50.0


# --------------------------------------------------------------------------------------- activation
def activation(
    u: Float[np.ndarray, "*shape"], a: float = A, b: float = B
) -> Float64[np.ndarray, "*shape"]:
    r"""How far an expert is switched on, :math:`s(u) = u^a / (u^a + (1 - u)^b)`; 0 to 1.

    0 for u <= 0 and 1 for u >= 1, nan for nan. Computed as the logistic function of
    :math:`a \ln u - b \ln(1 - u)`, so that no power underflows. Increasing; half at u = 0.0560134
    with the exponents of the paper, which leaves nine tenths of the strip at nearly full weight.
    Source: docs/theory.md A11 (S0 section 6). Oracle in tests: fractions and torch.
    """
    inside = np.clip(u.astype(np.float64), 0.0, 1.0)
    with np.errstate(divide="ignore"):  # logarithms of 0, which the logistic function takes
        exponent = a * np.log(inside) - b * np.log1p(-inside)
    return sigmoid(exponent.reshape(1, -1)).reshape(u.shape)


#: Points of a search for the steepest one, and how often it closes in on it.
_POINTS, _ROUNDS = 1001, 4


def largest_slope(a: float = A, b: float = B) -> float:
    r"""The largest :math:`s'(u) = s (1 - s) (a / u + b / (1 - u))`; inf for a < 1 or b < 1.

    17.756 at u = 0.0545 for a = 1 and b = 50. Weights change by at most this over eps for a change
    of one between a score and the k-th, relative to the weight of an expert that is full on.
    By a grid that closes in on its steepest point: relative error below 1e-6.
    Source: docs/theory.md A11. Oracle in tests: scipy.optimize.
    """
    if a < 1.0 or b < 1.0:
        return float("inf")
    low, high, steepest = 1e-9, 1.0 - 1e-9, 0.0
    for _ in range(_ROUNDS):
        u = np.linspace(low, high, _POINTS)
        s = activation(u, a, b)
        slopes = s * (1.0 - s) * (a / u + b / (1.0 - u))
        at = int(slopes.argmax())
        steepest = max(steepest, float(slopes[at]))
        low, high = float(u[max(at - 1, 0)]), float(u[min(at + 1, _POINTS - 1)])
    return steepest


# --------------------------------------------------------------------------------------------- sets
def _below_last(
    selection: Float[np.ndarray, "tokens experts"], k: int
) -> Float64[np.ndarray, "tokens experts"]:
    """k-th largest score of the token less each score; inf for an expert masked at -inf."""
    exact = selection.astype(np.float64)
    last = np.partition(exact, exact.shape[1] - k, axis=1)[:, [exact.shape[1] - k]]
    with np.errstate(invalid="ignore"):  # two masked scores
        return np.where(np.isneginf(exact), np.inf, last - exact)


def hard_set(
    selection: Float[np.ndarray, "tokens experts"], k: int
) -> Bool[np.ndarray, "tokens experts"]:
    """The chosen experts as a mask; equal scores: the lower index."""
    last = np.partition(selection, selection.shape[1] - k, axis=1)[:, [selection.shape[1] - k]]
    is_on = np.asarray(selection >= last)
    tied = np.flatnonzero(is_on.sum(axis=1) != k)
    is_on[tied] = chosen_mask(top_k(selection[tied], k), selection.shape[1])
    return is_on


def gaps(
    selection: Float[np.ndarray, "tokens experts"], k: int
) -> Float64[np.ndarray, "tokens others"]:
    r""":math:`q_{[k]} - q_i` of the experts that are not chosen, ascending; inf for masked ones.

    In units of the selection score, at least 0; no column for k = E. Source: docs/theory.md A12.
    """
    return np.sort(_below_last(selection, k), axis=1)[:, k:]


def smooth_activations(
    selection: Float[np.ndarray, "tokens experts"], k: int, eps: float, a: float = A, b: float = B
) -> Float64[np.ndarray, "tokens experts"]:
    r"""How far each expert is switched on, s of :math:`u_i = (q_i - q_{[k]} + \epsilon)/\epsilon`.

    1 for the chosen ones, above 0 for those less than eps below the k-th, else 0. For eps = 0 the
    hard choice: of equal scores across the border one side has 1 and the other 0.
    ``selection`` holds -inf where an expert may not run. Source: docs/theory.md A11.
    """
    is_on = hard_set(selection, k)
    if eps == 0.0:
        return is_on.astype(np.float64)
    below = _below_last(selection, k)
    switched = is_on.astype(np.float64)
    is_near = ~is_on & (below < eps)
    # one that fades to less than any number still runs
    faded = activation((eps - below[is_near]) / eps, a, b)
    switched[is_near] = np.maximum(faded, np.finfo(np.float64).tiny)
    return switched


def packed(
    mask: Bool[np.ndarray, "tokens experts"],
    scores: Float[np.ndarray, "tokens experts"],
    least_slots: int = 1,
) -> Int32[np.ndarray, "tokens slots"]:
    """Experts of each mask in descending score, filled from the left; -1 in empty slots.

    As many slots as the largest set has, and ``least_slots``. Equal scores: the lower index.
    """
    counts = mask.sum(axis=1)
    slots = max(int(counts.max(initial=0)), least_slots)
    token, expert = np.nonzero(mask)
    order = np.lexsort((-scores[token, expert], token))
    experts = np.full((len(mask), slots), -1, np.int32)
    experts[np.arange(slots) < counts[:, None]] = expert[order]
    return experts


# ------------------------------------------------------------------------------------------ weights
def set_weights(
    mapped: Float[np.ndarray, "tokens experts"],
    scores: Float64[np.ndarray, "tokens experts"],
    faded: Float64[np.ndarray, "tokens experts"],
    weights: Weights,
    shared_sum: Float64[np.ndarray, "tokens"] | None = None,
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Routing weights of sets of any size whose experts are switched on by ``faded``.

    The weights of the rule (:func:`~moegeom.geometry.selection.routing_weights`) with
    :math:`s_i f_i` in the place of every score and :math:`e^{z_i} f_i` in the place of every power:
    sums run over the experts with f > 0. 0 elsewhere, and for a token without any.
    ``mapped`` are the logits behind the logit map, ``scores`` the scores without selection bias.
    Of a set of k experts that are full on it is the weight of the rule, up to the order of sums.

    Raises
    ------
    ValueError
        For weights that depend on the order in which experts are taken (``sparsemixer``).
    Source: docs/theory.md A1, A11. Oracle in tests: torch.
    """
    if weights.source == "sparsemixer":
        raise ValueError("sparsemixer weights are defined for k experts in a row")
    is_on = faded > 0.0
    rule, logits = weights, mapped.astype(np.float64)
    if weights.source == "softmax_of_selected_logits":
        with np.errstate(divide="ignore"):
            logits = np.where(is_on, logits + np.log(faded), -np.inf)
    else:
        if weights.source == "sigmoid_of_selected_logits":
            scores, rule = sigmoid(logits), replace(weights, source="scores")
        scores = np.where(is_on, scores * faded, 0.0)
    everyone = np.broadcast_to(np.arange(mapped.shape[1], dtype=np.int32), mapped.shape)
    with np.errstate(invalid="ignore"):  # tokens without experts
        by_expert = routing_weights(logits, scores, everyone, rule, shared_sum)
    return np.where(is_on, by_expert, 0.0)


def smooth_gate(
    mapped: Float[np.ndarray, "tokens experts"],
    scores: Float64[np.ndarray, "tokens experts"],
    selection: Float[np.ndarray, "tokens experts"],
    k: int,
    weights: Weights,
    eps: float,
    a: float = A,
    b: float = B,
    shared_sum: Float64[np.ndarray, "tokens"] | None = None,
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Weights of the smoothed gate, of all experts; 0 for those that do not run.

    The weights of the rule over the k chosen experts and those less than eps below them, whose part
    is faded by :func:`smooth_activations`: :math:`e^{z_i} s_i / \sum_j e^{z_j} s_j` where weights
    are renormalised, :math:`softmax(z)_i s_i` where they are not, :math:`\sigma(z_i) s_i / \sum` of
    sigmoid rules, whose strip is one of biased *selection* scores. Tokens without extra experts
    (all for eps = 0) have the weights of the hard rule bit for bit. Continuous in the logits, but
    with kinks; not where a group mask changes, before rank k is looked at.
    Source: docs/theory.md A11 (S0 section 6, Proposition A.7). Oracle in tests: torch.
    """
    faded = smooth_activations(selection, k, eps, a, b)
    gate = np.zeros(faded.shape)
    chosen = top_k(selection, k)
    hard = routing_weights(mapped, scores, chosen, weights, shared_sum)
    np.put_along_axis(gate, chosen.astype(np.int64), hard, axis=1)
    more = np.flatnonzero((faded > 0.0).sum(axis=1) > k)
    shared = None if shared_sum is None else shared_sum[more]
    if len(more):
        gate[more] = set_weights(mapped[more], scores[more], faded[more], weights, shared)
    return gate


# ------------------------------------------------------------------------------------------- budget
@dataclass(frozen=True)
class SmoothingBudget:
    """A width of the strip and the mean number of extra experts that it brings."""

    eps: float
    extra: float


def smoothing_budget(gaps: Float64[np.ndarray, "tokens others"], extra: float) -> SmoothingBudget:
    r"""The eps at which tokens run ``extra`` more experts in the mean.

    :math:`\epsilon^* = (g_{(m)} + g_{(m+1)}) / 2` of the pooled gaps (:func:`gaps`) in ascending
    order, m = round(T * extra); 0 for m = 0, and just above the largest for all of them. Exactly
    m / T extra experts if the two differ, else those strictly below. Masked experts never run.

    Raises
    ------
    ValueError
        For more extra experts than there are.
    Source: docs/theory.md A12. Oracle in tests: counting.
    """
    pool = gaps[np.isfinite(gaps)]
    count = round(len(gaps) * extra)
    if not 0 <= count <= pool.size:
        raise ValueError(f"{extra:g} extra experts of {pool.size / max(len(gaps), 1):g}")
    if count == 0:
        return SmoothingBudget(0.0, 0.0)
    if count == pool.size:
        return SmoothingBudget(float(np.nextafter(pool.max(), np.inf)), count / len(gaps))
    pair = np.partition(pool, (count - 1, count))[count - 1 : count + 1]
    eps = float(pair.mean())
    return SmoothingBudget(eps, int((pool < eps).sum()) / len(gaps))


# -------------------------------------------------------------------------------- limits of experts
def batch_capacity(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Tokens that an expert takes of a batch, ceil(f k T / E), never more than there are.

    Source: docs/theory.md D3, :func:`~moegeom.geometry.load.expert_capacity`.
    """
    if factor * k >= num_experts:
        return num_tokens
    return min(expert_capacity(num_tokens, num_experts, k, factor), num_tokens)


def _ranks(scores: Float64[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    """Place of each token among those of an expert, 0 for the best; equal: the earlier token.

    inf for a score of -inf, which has no place.
    """
    order = np.argsort(-scores, axis=0, kind="stable")
    rank = np.empty(scores.shape)
    places = np.broadcast_to(np.arange(len(scores), dtype=np.float64)[:, None], scores.shape)
    np.put_along_axis(rank, order, places, axis=0)
    return np.where(np.isneginf(scores), np.inf, rank)


def expert_choice(
    scores: Float[np.ndarray, "tokens experts"], capacity: int
) -> Bool[np.ndarray, "tokens experts"]:
    """Each expert takes the ``capacity`` tokens that score highest with it, as a mask.

    Equal scores: the earlier token. -inf is never taken. A token may have none or all experts, and
    what it has depends on every other token. Source: docs/theory.md D3. Oracle in tests: torch.
    """
    return _ranks(scores.astype(np.float64)) < capacity


def kept_within_capacity(
    chosen: Int32[np.ndarray, "tokens k"],
    num_experts: int,
    capacity: int,
    scores: Float[np.ndarray, "tokens experts"] | None = None,
) -> Bool[np.ndarray, "tokens k"]:
    """Which choices an expert with room for ``capacity`` tokens serves.

    The first ones in the order of tokens; with ``scores`` those that score highest with it, the
    earlier token among equals. By order what happens to a token depends on earlier ones alone.
    Slots of -1 are not kept. The others are dropped, sum of max(0, c_e - C) in all.
    Source: docs/theory.md D3. Oracle in tests: tokens served one at a time.
    """
    token, slot = np.nonzero(chosen >= 0)
    expert = chosen[token, slot]
    wish = np.full((len(chosen), num_experts), -np.inf)
    wish[token, expert] = 0.0 if scores is None else scores[token, expert]
    is_served = np.zeros(chosen.shape, dtype=bool)
    is_served[token, slot] = (_ranks(wish) < capacity)[token, expert]
    return is_served


# --------------------------------------------------------------------------------------- thresholds
def threshold_for(logits: Float[np.ndarray, "tokens experts"], experts: float) -> float:
    r"""The threshold above which a token has ``experts`` logits in the mean.

    :math:`\theta = (z_{(m)} + z_{(m+1)}) / 2` of all logits in descending order, m = round(T * K),
    so that m / T experts run if the two differ, else those strictly above. The largest logit for
    m = 0, and just below the least for all. In units of the logit.

    Raises
    ------
    ValueError
        For a mean that is not between 0 and the number of experts.
    Oracle in tests: counting.
    """
    pool = logits.astype(np.float64).ravel()
    count = round(len(logits) * experts)
    if not pool.size or not 0 <= count <= pool.size:
        raise ValueError(f"{experts:g} of {logits.shape[1]} experts")
    if count == 0:
        return float(pool.max())
    if count == pool.size:
        return float(np.nextafter(pool.min(), -np.inf))
    last = pool.size - count  # place of the least logit above, ascending
    return float(np.partition(pool, (last - 1, last))[last - 1 : last + 1].mean())


def relu_gate(
    logits: Float[np.ndarray, "tokens experts"], threshold: float
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Weights :math:`\max(z_i - \theta, 0)`; an expert runs where its weight is above 0.

    Continuous: a weight is 0 where its expert starts. A token may have none.
    Oracle in tests: torch.relu.
    """
    return np.maximum(logits.astype(np.float64) - threshold, 0.0)


def threshold_distance(
    logits: Float[np.ndarray, "tokens experts"],
    row_norms: Float64[np.ndarray, "experts"],
    threshold: float,
) -> Float64[np.ndarray, "tokens"]:
    r"""Distance to the nearest router input with another set, :math:`\min_e |z_e - \theta|/|w_e|`.

    The set changes where a logit crosses the threshold, on one of E hyperplanes. In units of the
    router input. Rows of zeros, whose logit never moves, have no boundary; inf when all are such.
    Oracle in tests: the nearest point of each hyperplane.
    """
    gap = np.abs(logits.astype(np.float64) - threshold)
    quotient = np.divide(gap, row_norms, out=np.full(gap.shape, np.inf), where=row_norms > 0.0)
    return quotient.min(axis=1, initial=np.inf)


# -------------------------------------------------------------------------------------- two choices
def dense_weights(
    chosen: Int32[np.ndarray, "tokens slots"],
    weights: Float64[np.ndarray, "tokens slots"],
    num_experts: int,
) -> Float64[np.ndarray, "tokens experts"]:
    """Routing weights by expert, 0 for those that are not chosen; -1 is an empty slot."""
    dense = np.zeros((len(chosen), num_experts + 1))
    np.put_along_axis(dense, chosen.astype(np.int64), weights, axis=1)  # -1 is the last column
    return dense[:, :-1]


def weight_distance(
    first: Float64[np.ndarray, "tokens experts"], second: Float64[np.ndarray, "tokens experts"]
) -> Float64[np.ndarray, "tokens"]:
    r"""Share of a token's routing weight that two choices put on different experts.

    :math:`\frac12 \sum_e |w_e / \sum w - w'_e / \sum w'|`, 0 to 1: the total variation distance of
    the two mixtures, whatever their scales. At least the share on experts that leave
    (:func:`~moegeom.geometry.noise.weight_moved`); equal to it where the others keep their weights.
    1 where exactly one of the two has no weight at all, 0 where neither has any.
    Weights are at least 0; in size, where a rule lets them be less.
    Oracle in tests: scipy.spatial.distance.cityblock.
    """
    first, second = np.abs(first), np.abs(second)
    totals = first.sum(axis=1), second.sum(axis=1)
    shares = [
        np.divide(dense, total[:, None], out=np.zeros_like(dense), where=total[:, None] > 0.0)
        for dense, total in zip((first, second), totals, strict=True)
    ]
    distance = 0.5 * np.abs(shares[0] - shares[1]).sum(axis=1)
    is_empty = np.stack([total <= 0.0 for total in totals])
    return np.where(is_empty[0] != is_empty[1], 1.0, np.minimum(distance, 1.0))


def same_sets(
    first: Int32[np.ndarray, "tokens slots"], second: Int32[np.ndarray, "tokens others"]
) -> Bool[np.ndarray, "tokens"]:
    """True where both rows hold the same experts, in whatever order; -1 is an empty slot."""
    width = max(first.shape[1], second.shape[1])
    ordered = [
        np.sort(np.pad(chosen, ((0, 0), (0, width - chosen.shape[1])), constant_values=-1), axis=1)
        for chosen in (first, second)
    ]
    return (ordered[0] == ordered[1]).all(axis=1)
