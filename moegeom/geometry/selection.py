"""The selection rule as pure functions, in the order in which a router applies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.core.shapes import Bool, Float, Float64, Int32

# ------------------------------------------------------------------------------------------- scores
Score = Callable[[Float[np.ndarray, "tokens experts"]], Float64[np.ndarray, "tokens experts"]]


def identity(logits: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    """The logits themselves, s_i = z_i, as float64."""
    return logits.astype(np.float64)


def softmax(logits: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    r"""Softmax, :math:`s_i = e^{z_i} / \sum_j e^{z_j}`, over all experts.

    The maximum is subtracted first, so that nothing overflows. Rows sum to 1 within 1e-15 E.
    Oracle in tests: scipy.special.softmax.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    powers = np.exp(shifted)
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(logits: Float[np.ndarray, "tokens experts"]) -> Float64[np.ndarray, "tokens experts"]:
    r"""Logistic function, :math:`s_i = 1 / (1 + e^{-z_i})`, each expert by itself.

    Float64 keeps scores apart up to z = 36, where float32 saturates at 17 (docs/theory.md E1).
    The exponential of -|z| never overflows. Oracle in tests: scipy.special.expit.
    """
    z = logits.astype(np.float64)
    decay = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, decay) / (1.0 + decay)


def sqrt_softplus(
    logits: Float[np.ndarray, "tokens experts"],
) -> Float64[np.ndarray, "tokens experts"]:
    r"""Root of softplus, :math:`s_i = \sqrt{\log(1 + e^{z_i})}`; slope at most 0.3191.

    Source: docs/theory.md E1b. Oracle in tests: numpy.logaddexp.
    """
    z = logits.astype(np.float64)
    return np.sqrt(np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z))))


#: Score functions by the name that a family file uses.
SCORES: dict[str, Score] = {
    "identity": identity,
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrt_softplus": sqrt_softplus,
}

#: Largest change of a score per unit of the largest change of a logit: turns an error bound of
#: logits into one of scores. Softmax: dp_i = p_i sum_a (delta_ia - p_a) dz_a, so
#: |dp_i| <= 2 p_i (1 - p_i) max |dz| <= max |dz| / 2, reached by two equal experts pushed apart.
LARGEST_SLOPE: dict[str, float] = {
    "identity": 1.0,
    "softmax": 0.5,
    "sigmoid": 0.25,
    "sqrt_softplus": 0.3191,
}


# --------------------------------------------------------------------------------------- logit maps
def mapped_logits(
    logits: Float[np.ndarray, "*shape"], logit_map: LogitMap | None
) -> Float[np.ndarray, "*shape"]:
    r"""Logits behind the map, :math:`c \tanh(m z / c)`, or :math:`m z` without a cap.

    The logits themselves when there is no map, else float64. Increasing in z, with slope at most m.
    Source: transformers 5.23.0 modeling_laguna.py (cap), modeling_muse_spark.py (multiplier).
    """
    if logit_map is None:
        return logits
    scaled = logits.astype(np.float64) * logit_map.multiplier
    if np.isinf(logit_map.soft_cap):
        return scaled
    return logit_map.soft_cap * np.tanh(scaled / logit_map.soft_cap)


def score_slopes(
    logits: Float64[np.ndarray, "points experts"], rule: Rule
) -> Float64[np.ndarray, "points experts"]:
    r"""Slope of each score in its own logit: :math:`s'(z)`, of softmax :math:`p_i` of
    :math:`\nabla p_i = p_i (e_i - p)`; 1 for an affine rule.

    Oracle in tests: differences of scores.
    """
    if rule.is_affine:
        return np.ones_like(logits)
    inner, logit_map = np.ones_like(logits), rule.logit_map
    if logit_map is not None:
        inner = (
            logit_map.multiplier / np.cosh(logits * logit_map.multiplier / logit_map.soft_cap) ** 2
        )
    mapped = mapped_logits(logits, logit_map)
    scores, slopes = SCORES[rule.score](mapped), sigmoid(mapped)
    if rule.score == "identity":
        slopes = np.ones_like(logits)
    elif rule.score == "sigmoid":
        slopes = slopes * sigmoid(-mapped)
    elif rule.score == "softmax":
        slopes = scores
    else:
        slopes = slopes / (2.0 * np.maximum(scores, 1e-150))
    return slopes * inner


# ------------------------------------------------------------------------------------------- groups
def group_scores(
    selection: Float[np.ndarray, "tokens experts"], groups: GroupMask
) -> Float64[np.ndarray, "tokens groups"]:
    r"""Score of each group: :math:`T_g = \max_{i \in g} q_i`, or the sum of the two largest.

    Experts are split into ``num_groups`` runs of equal length. A group of one expert has its own
    score in both variants. Source: docs/theory.md E2 (DeepSeek-V2: max; V3: top2_sum).
    """
    tokens, experts = selection.shape
    grouped = selection.astype(np.float64).reshape(
        tokens, groups.num_groups, experts // groups.num_groups
    )
    if groups.score == "max" or grouped.shape[2] == 1:
        return grouped.max(axis=2)
    return np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)


def kept_groups(
    scores: Float64[np.ndarray, "tokens groups"], num_kept: int
) -> Bool[np.ndarray, "tokens groups"]:
    """True for the ``num_kept`` best groups of each token; equal groups: the lower index wins."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :num_kept]
    is_best = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(is_best, order, True, axis=1)
    return is_best


def group_mask(
    selection: Float[np.ndarray, "tokens experts"], groups: GroupMask
) -> Float64[np.ndarray, "tokens experts"]:
    """Selection scores with every expert outside the kept groups set to ``groups.fill``.

    The fill is a fact of the code that a family runs on: 0.0 and -inf choose differently as soon
    as a kept score is negative (docs/theory.md E2).
    """
    is_best = kept_groups(group_scores(selection, groups), groups.num_kept)
    allowed = np.repeat(is_best, selection.shape[1] // groups.num_groups, axis=1)
    return np.where(allowed, selection.astype(np.float64), groups.fill)


def fill_decides(last: Float[np.ndarray, "tokens"], fill: float) -> Bool[np.ndarray, "tokens"]:
    """True where masking with 0.0 and with -inf choose different sets.

    ``last`` is the masked selection score of the last chosen expert, ``fill`` what masks. A masked
    expert at 0.0 beats every kept one below zero: with -inf the sets differ where the last chosen
    score is negative, with 0.0 where it is 0, which is a masked expert's (or negative, when fewer
    are masked than wanted). A kept score of exactly 0 counts as a masked one. nan: nothing is
    masked, so False everywhere.
    Source: docs/theory.md E2. Oracle in tests: the rule with the other fill.
    """
    if np.isnan(fill):
        return np.zeros_like(last, dtype=bool)
    return last < 0.0 if np.isneginf(fill) else last <= 0.0


def group_margin(
    selection: Float[np.ndarray, "tokens experts"], groups: GroupMask
) -> Float64[np.ndarray, "tokens"]:
    """Score of the last kept group minus that of the first dropped one; inf when none is dropped.

    Source: docs/theory.md E2 (`gap_group`), fixture `group_gap`.
    """
    if groups.num_kept == groups.num_groups:
        return np.full(selection.shape[0], np.inf)
    descending = -np.sort(-group_scores(selection, groups), axis=1)
    return descending[:, groups.num_kept - 1] - descending[:, groups.num_kept]


# -------------------------------------------------------------------------------------------- picks
def top_k(selection: Float[np.ndarray, "tokens experts"], k: int) -> Int32[np.ndarray, "tokens k"]:
    """The k largest selection scores of each token, descending; equal scores: the lower index.

    Source: S0 Definition A.4. Oracle in tests: torch.topk wherever no two scores are equal.
    """
    order = np.argsort(-selection, axis=1, kind="stable")[:, :k]
    return order.astype(np.int32)


def margin(selection: Float[np.ndarray, "tokens experts"], k: int) -> Float64[np.ndarray, "tokens"]:
    """The k-th largest selection score minus the (k+1)-th; inf when k is the number of experts.

    Zero exactly on a tie across the border of the chosen set; ties inside it do not count.
    Masked experts at -inf give inf when fewer than k+1 experts are allowed.
    Source: docs/theory.md A2, A5.
    """
    if k == selection.shape[1]:
        return np.full(selection.shape[0], np.inf)
    descending = -np.sort(-selection.astype(np.float64), axis=1)
    # inf - inf would be nan: two masked scores do not compete for a place.
    kth, following = descending[:, k - 1], descending[:, k]
    return np.where(np.isneginf(following), np.inf, kth - np.maximum(following, -1e308))


# ---------------------------------------------------------------------------------- routing weights
def routing_weights(
    logits: Float[np.ndarray, "tokens experts"],
    scores: Float64[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    weights: Weights,
    shared_sum: Float64[np.ndarray, "tokens"] | None = None,
) -> Float64[np.ndarray, "tokens k"]:
    r"""Weight of each chosen expert, in the order of ``chosen``.

    :math:`g_i = c\, s_i`, renormalised
    :math:`c\, s_i / \max(f, (\sum_{j \in S} s_j^p)^{1/p} + \epsilon)`, where s are the scores
    *without* selection bias, the softmax over the chosen logits alone, their sigmoids, or what
    :func:`sparsemixer` gives. ``shared_sum`` (scores of experts that always run) adds to the sum.
    Logits are those behind the logit map. nan where the sum is zero.
    Source: docs/theory.md A1, E1. Oracle in tests: the routers of transformers.
    """
    if weights.source == "sparsemixer":
        selected = sparsemixer(logits, chosen, weights.jitter)
    elif weights.source == "softmax_of_selected_logits":
        selected = softmax(np.take_along_axis(logits, chosen, axis=1))
    elif weights.source == "sigmoid_of_selected_logits":
        selected = sigmoid(np.take_along_axis(logits, chosen, axis=1))
    else:
        selected = np.take_along_axis(scores, chosen, axis=1)
    if weights.renormalise:
        total = (selected**weights.power).sum(axis=1)
        if shared_sum is not None:
            total = total + shared_sum
        total = np.maximum(total ** (1.0 / weights.power) + weights.epsilon, weights.floor)
        with np.errstate(invalid="ignore", divide="ignore"):
            selected = selected / total[:, None]
    return selected * weights.scale


def score_sum(
    logits: Float[np.ndarray, "tokens experts"], rule: Rule
) -> Float64[np.ndarray, "tokens"]:
    """Sum of the scores of some logits before the map: of experts that always run, say."""
    return SCORES[rule.score](mapped_logits(logits, rule.logit_map)).sum(axis=1)


def sparsemixer(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    jitter: float,
) -> Float64[np.ndarray, "tokens k"]:
    r"""Weights of experts taken one after the other, largest logit first.

    The r-th, of logit m: :math:`1 / \sum_j e^{z_j - m}` over the experts not taken yet that are
    near, :math:`(m - z_j) / \max(|z_j|, m) \le 2 \epsilon`. Float64, 0 to 1; a single near expert
    has weight 1. Source: transformers 5.23.0 modeling_phimoe.py, in evaluation mode.
    """
    z = logits.astype(np.float64)
    left = z.copy()
    out = np.empty(chosen.shape)
    for rank in range(chosen.shape[1]):
        expert = chosen[:, [rank]].astype(np.int64)
        largest = np.take_along_axis(z, expert, axis=1)
        # the distance is that of all experts: one taken before is far from none, but out of the sum
        with np.errstate(invalid="ignore", divide="ignore"):
            is_far = (largest - z) / np.maximum(np.abs(z), largest) > 2.0 * jitter
        out[:, rank] = 1.0 / np.where(is_far, 0.0, np.exp(left - largest)).sum(axis=1)
        np.put_along_axis(left, expert, -np.inf, axis=1)
    return out


# ----------------------------------------------------------------------------------- the whole rule
@dataclass(frozen=True, eq=False)
class Routing:
    """What a rule makes of the logits of some tokens.

    ``margin`` is in units of the selection score, which is the logit for an affine rule;
    ``group_margin`` is inf without group mask.
    """

    chosen: Int32[np.ndarray, "tokens k"]
    weights: Float64[np.ndarray, "tokens k"]
    margin: Float64[np.ndarray, "tokens"]
    group_margin: Float64[np.ndarray, "tokens"]


def selection_scores(
    logits: Float[np.ndarray, "tokens experts"],
    rule: Rule,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
) -> Float64[np.ndarray, "tokens experts"]:
    """What the experts are compared by, before any group mask.

    An affine rule compares logits (plus a bias on raw logits): the score is increasing, so it
    changes no comparison, and rounding inside it could. Every other rule compares
    ``score(logit) + selection_bias``.
    """
    if rule.is_affine:
        compared = logits.astype(np.float64)
    else:
        compared = SCORES[rule.score](mapped_logits(logits, rule.logit_map))
    return compared if selection_bias is None else compared + selection_bias.astype(np.float64)


def route(
    logits: Float[np.ndarray, "tokens experts"],
    rule: Rule,
    selection_bias: Float[np.ndarray, "experts"] | None = None,
    shared_sum: Float64[np.ndarray, "tokens"] | None = None,
) -> Routing:
    """Chosen experts, routing weights and margins from logits (logit bias already added).

    ``shared_sum`` is that of :func:`~moegeom.geometry.selection.routing_weights`.
    Float64 throughout; docs/theory.md A1, E1, E2. Oracle in tests: the routers of transformers.
    """
    selection = selection_scores(logits, rule, selection_bias)
    groups = rule.groups
    masked = selection if groups is None else group_mask(selection, groups)
    chosen = top_k(masked, rule.top_k)
    unlimited = np.full(logits.shape[0], np.inf)
    mapped = mapped_logits(logits, rule.logit_map)
    scores = SCORES[rule.score](mapped)
    return Routing(
        chosen=chosen,
        weights=routing_weights(mapped, scores, chosen, rule.weights, shared_sum),
        margin=margin(masked, rule.top_k),
        group_margin=unlimited if groups is None else group_margin(selection, groups),
    )
