"""What kinds of what-ifs share: what a stored batch tells, and choices made from scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from moegeom.core.errors import RouterRuleError
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.geometry.load import entropy_nats, log_sum_exp, normalised_scores
from moegeom.geometry.selection import (
    SCORES,
    group_margin,
    group_mask,
    mapped_logits,
    margin,
    routing_weights,
    score_sum,
    selection_scores,
    top_k,
)
from moegeom.geometry.whatif import packed, set_weights
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.variants.what_if import FitSample, WhatIfChoice

#: Quantities of ``TokenBatch`` that follow from the choice, or from the scores behind it.
OF_CHOICE = (
    "margin group_margin distance distance_upper pair float_bound noise_scale "
    "matches_recording selection scores fill_decides weight_sum probability entropy log_sum_exp "
    "angle rounding_sigmas flip noise"
).split()

#: Those of them that a gate leaves as they are if it takes the scores of the router and chooses
#: otherwise.
OF_SCORES = ("selection", "scores", "probability", "entropy", "log_sum_exp")

#: Quantities of a sample that a what-if may read.
_OF_SAMPLE = tuple("token logits mapped selection scores chosen weights input document".split())


def absent(quantities: Iterable[str], why: str, **others: str) -> dict[str, str]:
    """The reason for every quantity but these ``quantities``: ``why``, or one of its own."""
    names = set(quantities)
    return {name: others.get(name, why) for name in OF_CHOICE if name not in names}


def as_stored(router: Router, batch: TokenBatch, kernels: Kernels) -> dict[str, np.ndarray]:
    """The quantities ``OF_SCORES`` of the router as stored."""
    statistics = kernels["score_statistics"](known(batch.mapped), router.rule.score)
    stored = {"selection": known(batch.selection), "scores": known(batch.scores)}
    return stored | dict(zip(("probability", "entropy", "log_sum_exp"), statistics, strict=True))


# -------------------------------------------------------------------------------------- refusals
def refuse(router: Router, why: str) -> RouterRuleError:
    """The error of a what-if that means nothing for the rule of a router."""
    return RouterRuleError(f"router {router.name}: {why}.", "Leave this what-if out for the model.")


def need_top_k(router: Router) -> None:
    """Raises RouterRuleError unless the rule takes the k largest of its scores."""
    if router.listed:
        raise refuse(router, f"its choice does not follow from router and input: {router.listed}")
    if router.rule.pick != "top_k":
        raise refuse(router, "its rule takes no fixed number of experts")


def need_weights_of_sets(router: Router) -> None:
    """Raises RouterRuleError where routing weights are no function of the set of experts."""
    need_top_k(router)
    if router.rule.weights.source == "sparsemixer":
        raise refuse(router, "its weights follow from the order in which k experts are taken")


# ------------------------------------------------------------------------------ of a stored batch
def known(value: Any) -> Any:
    """A quantity that every batch for a what-if has."""
    assert value is not None, "FitSample and FittedGate say which quantities a batch has"
    return value


def scored_logits(router: Router, batch: TokenBatch) -> Float64[np.ndarray, "tokens experts"]:
    """Logits before the logit map, without a bias that only selects."""
    rule = router.rule
    if rule.is_affine and router.selection_bias is not None:
        logits = batch.mapped
    elif rule.is_affine:
        logits = batch.selection
    elif router.has_cosine_logits:
        raise refuse(router, "its logits before the map are known up to a factor only")
    else:
        logits = batch.logits
    return known(logits).astype(np.float64)


def admitted_scores(router: Router, batch: TokenBatch) -> Float64[np.ndarray, "tokens experts"]:
    """Selection scores, -inf for experts of groups that a token does not keep."""
    scores = known(batch.selection).astype(np.float64)
    groups = router.rule.groups
    if groups is None:
        return scores
    is_masked = scores == groups.fill
    np.put_along_axis(is_masked, batch.chosen.astype(np.int64), False, axis=1)
    return np.where(is_masked, -np.inf, scores)


def routing_scores(router: Router, batch: TokenBatch) -> Float64[np.ndarray, "tokens experts"]:
    """Scores by which tokens are compared at one expert: those of the rule, without its bias.

    Softmax of rules that compare raw logits: these say nothing from one token to another.
    """
    score = "softmax" if router.rule.score == "identity" else router.rule.score
    scores = SCORES[score](known(batch.mapped))
    return np.where(np.isneginf(admitted_scores(router, batch)), -np.inf, scores)


def shared_sum(router: Router, batch: TokenBatch) -> Float64[np.ndarray, "tokens"] | None:
    """Scores of the experts that always run, which weights are divided by too; None without."""
    if router.shared_rows is None:
        return None
    if batch.input is None:
        raise refuse(router, "weights with shared experts in their sum need recorded inputs")
    # einsum, not a matrix product: no bit of a token may depend on the batch it came in
    columns = router.shared_rows.T.astype(np.float64)
    logits = np.einsum("th,hs->ts", batch.input.astype(np.float64), columns)
    return score_sum(logits, router.rule)


def cosines(router: Router, batch: TokenBatch) -> Float64[np.ndarray, "tokens experts"]:
    """Cosine of each router input and row; 0 for a zero row or input."""
    logits = known(batch.logits).astype(np.float64)
    bias = router.affine_bias if router.rule.is_affine else router.logit_bias
    if bias is not None:
        logits = logits - bias.astype(np.float64)
    lengths = input_lengths(batch)[:, None] * row_lengths(router)[None, :]
    return np.divide(logits, lengths, out=np.zeros(logits.shape), where=lengths > 0.0)


def row_lengths(router: Router) -> Float64[np.ndarray, "experts"]:
    """Euclidean length of each row."""
    return np.linalg.norm(router.weight.astype(np.float64), axis=1)


def input_lengths(batch: TokenBatch) -> Float64[np.ndarray, "tokens"]:
    """Euclidean length of each router input."""
    return np.linalg.norm(np.ascontiguousarray(known(batch.input), dtype=np.float64), axis=1)


# ----------------------------------------------------------------------------------------- choices
def choice_of_scores(
    router: Router,
    selection: Float64[np.ndarray, "tokens experts"],
    mapped: Float64[np.ndarray, "tokens experts"],
    shared: Float64[np.ndarray, "tokens"] | None,
) -> WhatIfChoice:
    """The k best by other selection scores, before any group mask, with the weights of the rule.

    Experts at -inf are chosen by no token, whatever the fill of the groups.
    """
    rule = router.rule
    scores = SCORES[rule.score](mapped)
    compared = selection if rule.groups is None else group_mask(selection, rule.groups)
    compared = np.where(np.isneginf(selection), -np.inf, compared)
    chosen = top_k(compared, rule.top_k)
    weights = routing_weights(mapped, scores, chosen, rule.weights, shared)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[chosen]
    probability = normalised_scores(mapped, rule.score)
    quantities = {
        "margin": margin(compared, rule.top_k),
        "selection": compared,
        "scores": mapped if rule.is_affine else scores,
        "probability": probability,
        "entropy": entropy_nats(probability),
        "log_sum_exp": log_sum_exp(mapped),
    }
    if rule.groups is not None:
        quantities["group_margin"] = group_margin(selection, rule.groups)
    return WhatIfChoice(chosen, weights, quantities)


def choice_of_logits(
    router: Router,
    logits: Float64[np.ndarray, "tokens experts"],
    shared: Float64[np.ndarray, "tokens"] | None,
) -> WhatIfChoice:
    """What the rule makes of other logits, those before the map and without a bias that selects."""
    rule = router.rule
    selection = selection_scores(logits, rule, router.selection_bias)
    return choice_of_scores(router, selection, mapped_logits(logits, rule.logit_map), shared)


#: What :func:`choice_of_scores` tells beside the choice.
OF_OTHER_SCORES = ("margin", "group_margin", *OF_SCORES)


def choice_of_sets(
    router: Router,
    batch: TokenBatch,
    is_on: Bool[np.ndarray, "tokens experts"],
    order: Float[np.ndarray, "tokens experts"],
    kernels: Kernels,
    faded: Float64[np.ndarray, "tokens experts"] | None = None,
) -> WhatIfChoice:
    """Sets of any size, in descending ``order``, with the weights of the rule over each set.

    A token with its own set has the weights of the router bit for bit.
    """
    top = batch.chosen.shape[1]
    chosen = packed(is_on, order, top)
    weights = np.zeros(chosen.shape)
    same = is_on.sum(axis=1) == top
    same &= np.take_along_axis(is_on, batch.chosen.astype(np.int64), axis=1).all(axis=1)
    weights[same, :top], chosen[same, :top] = known(batch.weights)[same], batch.chosen[same]
    others = np.flatnonzero(~same)
    if len(others):
        mapped = known(batch.mapped)[others]
        shared = shared_sum(router, batch)
        all_weights = set_weights(
            mapped,
            SCORES[router.rule.score](mapped),
            (is_on if faded is None else faded)[others].astype(np.float64),
            router.rule.weights,
            None if shared is None else shared[others],
        )
        if router.expert_scale is not None:
            all_weights = all_weights * router.expert_scale
        slots = chosen[others].astype(np.int64)
        weights[others] = np.where(slots < 0, 0.0, np.take_along_axis(all_weights, slots, axis=1))
    return WhatIfChoice(chosen, weights, as_stored(router, batch, kernels))


# ------------------------------------------------------------------------------ batches of a sample
def rows_of(batch: TokenBatch, row: Int64[np.ndarray, "rows"]) -> TokenBatch:
    """Some tokens of a batch, with what a what-if may read of them."""
    columns = {name: getattr(batch, name) for name in _OF_SAMPLE}
    return TokenBatch(**{name: None if v is None else v[row] for name, v in columns.items()})


def batches_of(sample: FitSample) -> Iterator[Int64[np.ndarray, "rows"]]:
    """Rows of one batch after another; a last one that is not whole only if it is the only one."""
    tokens = len(sample.tokens.chosen)
    for start in range(0, max(tokens - sample.batch, 0) + 1, sample.batch):
        yield np.arange(start, min(start + sample.batch, tokens))


def members(choice: WhatIfChoice, num_experts: int) -> Bool[np.ndarray, "tokens experts"]:
    """The chosen experts of each token as a mask."""
    mask = np.zeros((len(choice.chosen), num_experts), dtype=bool)
    token, slot = np.nonzero(choice.chosen >= 0)
    mask[token, choice.chosen[token, slot]] = True
    return mask


#: Tokens that are also chosen for by themselves, spread over the sample.
_ALONE = 256


def neighbours_decide(
    router: Router, choose: Callable[[TokenBatch], WhatIfChoice], sample: FitSample
) -> dict[str, float]:
    """How far the choice of a token is one of its neighbours.

    ``other_set_alone_share`` is the share of tokens with another set in a batch of their own (of
    at most 256), ``other_set_elsewhere_share`` in batches of the same size dealt out at random:
    not known of a single batch, which holds the same tokens however they are dealt.
    """
    all_rows = np.concatenate([*batches_of(sample)])

    def sets(rows: Int64[np.ndarray, "rows"]) -> Bool[np.ndarray, "rows experts"]:
        return members(choose(rows_of(sample.tokens, rows)), router.num_experts)

    usual = np.concatenate([sets(rows) for rows in batches_of(sample)])
    some = np.unique(np.linspace(0, len(all_rows) - 1, min(_ALONE, len(all_rows))).astype(np.int64))
    alone = np.concatenate([sets(np.array([row])) for row in some.tolist()])
    shares = {"other_set_alone_share": float((alone != usual[some]).any(axis=1).mean())}
    if len(all_rows) <= sample.batch:
        return shares
    dealt = np.random.Generator(np.random.PCG64(sample.seed)).permutation(all_rows)
    other = np.empty_like(usual)
    for rows in batches_of(sample):
        there = np.sort(dealt[rows])  # in the order of tokens, as a batch has them
        other[there] = sets(there)
    elsewhere = float((other != usual).any(axis=1).mean())
    return shares | {"other_set_elsewhere_share": elsewhere}
