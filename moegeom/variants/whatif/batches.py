"""Choices that depend on the other tokens of a batch: capacities and transport plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float64
from moegeom.geometry import whatif
from moegeom.geometry.whatif import CLIP, TransportPlan, column_error, hard_set, osr_cost
from moegeom.geometry.whatif import sinkhorn as transport_plan
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, Values, WhatIfChoice, what_if
from moegeom.variants.whatif._choices import (
    OF_SCORES,
    absent,
    admitted_scores,
    as_stored,
    batches_of,
    choice_of_sets,
    cosines,
    known,
    need_top_k,
    need_weights_of_sets,
    neighbours_decide,
    refuse,
    routing_scores,
    rows_of,
)


@what_if(
    Parameter(
        "factor",
        "capacity factor: 1 is the fair load, inf drops nothing",
        1.25,
        least=1e-6,
        is_swept=True,
    ),
    Parameter("order", "who is served: position or score", "position", words=("position", "score")),
)
def capacity(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """An expert serves so many tokens of a batch, the others lose it.

    ``order`` says who is served: the first ones (``position``), which depends on earlier tokens
    alone, or those that score highest with the expert (``score``). The weights of experts that
    serve stay as they are; nothing makes up for a lost one. Hard limit: from a factor of E / k, inf
    among them, nothing can be dropped, and it is the router itself, bit for bit.
    """
    need_top_k(router)
    factor, by_score, k = values["factor"], values["order"] == "score", router.rule.top_k
    if factor * k >= router.num_experts:
        return FittedGate(router=router, reached={"dropped_slot_share": 0.0})

    def choose(batch: TokenBatch) -> WhatIfChoice:
        room = whatif.batch_capacity(len(batch.chosen), router.num_experts, k, factor)
        scores = routing_scores(router, batch) if by_score else None
        is_served = whatif.kept_within_capacity(batch.chosen, router.num_experts, room, scores)
        left = np.argsort(~is_served, axis=1, kind="stable")  # served ones first, in their order
        is_served, chosen, weights = (
            np.take_along_axis(array, left, axis=1)
            for array in (is_served, batch.chosen, known(batch.weights))
        )
        empty = np.int32(-1)
        return WhatIfChoice(
            np.where(is_served, chosen, empty),
            np.where(is_served, weights, 0.0),
            as_stored(router, batch, sample.kernels),
        )

    def measure(sample: FitSample) -> dict[str, float]:
        chosen = [choose(rows_of(sample.tokens, rows)).chosen for rows in batches_of(sample)]
        served = np.concatenate([(part >= 0).sum(axis=1) for part in chosen])
        return {
            "dropped_slot_share": float(1.0 - served.mean() / k),
            "no_expert_share": float((served == 0).mean()),
            "fewer_experts_share": float((served < k).mean()),
            **neighbours_decide(router, choose, sample),
        }

    later = "Not causal: a later token of the batch can take the place of an earlier one."
    return FittedGate(
        choose=choose,
        has_fixed_size=False,
        is_token_local=False,
        is_causal=not by_score,
        measure=measure,
        absent=absent(OF_SCORES, "what a token loses depends on the tokens beside it"),
        notes=(later,) if by_score else (),
    )


@what_if(
    Parameter("factor", "capacity factor: 1 is the fair load", 1.25, least=1e-6, is_swept=True)
)
def expert_choice(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Each expert takes the tokens of a batch that score highest with it, so many for each.

    Loads are even by construction; a token may have no expert or all of them, by what else is in
    its batch. Weights are those of the rule over the experts that took it. Tokens are compared by
    the score of the rule (softmax where it compares raw logits); a selection bias moves all tokens
    of an expert alike. Hard limit: a token that is taken by just its own set has its own weights,
    bit for bit; from a factor of E / k every expert takes every token, as ``topk:E`` does.
    """
    need_weights_of_sets(router)
    factor, k = values["factor"], router.rule.top_k

    def choose(batch: TokenBatch) -> WhatIfChoice:
        scores = routing_scores(router, batch)
        room = whatif.batch_capacity(len(scores), router.num_experts, k, factor)
        return choice_of_sets(
            router, batch, whatif.expert_choice(scores, room), scores, sample.kernels
        )

    def measure(sample: FitSample) -> dict[str, float]:
        chosen = [choose(rows_of(sample.tokens, rows)).chosen for rows in batches_of(sample)]
        counts = np.concatenate([(part >= 0).sum(axis=1) for part in chosen])
        return {
            "experts_mean": float(counts.mean()),
            "experts_most": float(counts.max()),
            "no_expert_share": float((counts == 0).mean()),
            "fewer_experts_share": float((counts < k).mean()),
            "flop_factor": float(counts.mean()) / k,
            **neighbours_decide(router, choose, sample),
        }

    return FittedGate(
        choose=choose,
        has_fixed_size=False,
        is_token_local=False,
        is_causal=False,
        measure=measure,
        absent=absent(OF_SCORES, "which experts take a token depends on the tokens beside it"),
        notes=("Not causal: an expert takes a token or leaves it by the later ones of the batch.",),
    )


#: Cost of each token at each expert, inf where a token cannot go.
_Cost = Callable[[TokenBatch], Float64[np.ndarray, "tokens experts"]]

#: A choice with weights of the plan instead of those of the rule.
_OfPlan = Callable[[TokenBatch, WhatIfChoice, TransportPlan], WhatIfChoice]


def _eps(text: str, default: float) -> Parameter:
    return Parameter("eps", f"{text} are divided by it: small is sharp", default, 1e-9, 1e9)


#: Steps and form of the scaling.
_OF_PLANS = (
    Parameter("steps", "scalings of rows and columns", 3, least=0, most=100_000, is_whole=True),
    Parameter("log", "in logarithms, without the clip", is_flag=True),
)


def _gate_of_plans(
    router: Router,
    values: Values,
    cost: _Cost,
    kernels: Kernels,
    weights: _OfPlan = lambda batch, choice, plan: choice,
) -> FittedGate:
    """The k largest shares of each token in a plan that is made for a batch.

    ``weights`` may give a choice the weights of the plan instead of those of the rule.
    """
    eps, steps, log = values["eps"], values["steps"], bool(values["log"])

    def plan_of(batch: TokenBatch) -> TransportPlan:
        return transport_plan(cost(batch), eps, steps, np.inf if log else CLIP, log)

    def choose(batch: TokenBatch) -> WhatIfChoice:
        plan = plan_of(batch)
        is_on = hard_set(plan.log_share, router.rule.top_k) & ~np.isneginf(plan.log_share)
        return weights(batch, choice_of_sets(router, batch, is_on, plan.log_share, kernels), plan)

    def measure(sample: FitSample) -> dict[str, float]:
        plans = [plan_of(rows_of(sample.tokens, rows)) for rows in batches_of(sample)]
        return {
            "column_error": float(np.mean([column_error(plan.share) for plan in plans])),
            "clipped_share": float(np.mean([plan.clipped_share for plan in plans])),
            **neighbours_decide(router, choose, sample),
        }

    is_alone = steps == 0
    return FittedGate(
        choose=choose,
        is_token_local=is_alone,
        is_causal=is_alone,
        measure=measure,
        absent=absent(OF_SCORES, "a plan over a batch has no boundary for one of its tokens"),
        notes=() if is_alone else _notes(steps, log),
    )


def _notes(steps: int, log: bool) -> tuple[str, ...]:
    left = "the lowest numbers win" if log else "what its sums are guarded with decides"
    causal = (
        "Not causal: the choice of a token depends on the later tokens of its batch; in a batch of "
        f"its own every share is 1 / E, and {left}."
    )
    balanced = (
        f"Not doubly stochastic: after {steps} steps the sums of columns are off by column_error, "
        "and the k largest shares are not balanced by sums that are."
    )
    return causal, balanced


@what_if(_eps("scores, in standard deviations across experts,", 0.5), *_OF_PLANS)
def sinkhorn(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """The k largest shares of each token after Sinkhorn scaling of the scores of a batch.

    Shares exp(score / (eps s)) of a batch are scaled to equal sums over experts, s the standard
    deviation of the scores across experts (``spread``): logits, probabilities and cosines have
    spreads of their own. Each token takes its k largest shares, with the weights of the rule.
    Without ``log`` exponents are clipped at 50, which loses the order of scores 50 eps spreads from
    the mean of their token: counted. Experts of groups that a token does not keep stay out. Hard
    limit: ``sinkhorn:steps=0,log`` is the router itself, bit for bit.
    """
    need_weights_of_sets(router)

    def apart(batch: TokenBatch) -> Float64[np.ndarray, "tokens experts"]:
        scores = admitted_scores(router, batch)
        is_in = np.isfinite(scores)
        total = np.where(is_in, scores, 0.0).sum(axis=1, keepdims=True)
        return scores - total / is_in.sum(axis=1, keepdims=True)

    own = apart(sample.tokens)
    spread = float(np.sqrt(np.square(own[np.isfinite(own)]).mean())) or 1.0
    gate = _gate_of_plans(router, values, lambda batch: apart(batch) / -spread, sample.kernels)
    return replace(gate, reached={"spread": spread})


@what_if(
    Parameter("lambda", "weight of overlaps with other experts", 0.5, least=0.0, most=1e6),
    Parameter("beta", "weight of cosines beyond tau, squared", 0.5, least=0.0, most=1e6),
    Parameter("tau", "cosine beyond which they are penalised", 0.7, least=0.0, most=1.0),
    _eps("costs", 0.05),
    *_OF_PLANS,
    needs=("input",),
)
def osr(router: Router, values: Values, sample: FitSample) -> FittedGate:
    """Sinkhorn scaling of cosines less a penalty for overlapping experts.

    Cosines of router input and row stand for those of the vectors that the cost is defined for;
    weights are the shares of the chosen experts over their sum. Equal experts have equal costs, so
    that nothing here tells them apart. Hard limit: ``osr:lambda=0,beta=0,steps=0,log`` chooses as
    ``cosine`` does where there is no bias, and as the router itself if its rows are of one length.
    """
    need_weights_of_sets(router)
    if router.has_cosine_logits:
        raise refuse(router, "its logits are cosines already; sinkhorn scales those")
    overlap, excess, threshold = (values[name] for name in ("lambda", "beta", "tau"))

    def cost(batch: TokenBatch) -> Float64[np.ndarray, "tokens experts"]:
        similarity = cosines(router, batch)
        costs = osr_cost(similarity, router.weight, overlap, excess, threshold)
        return np.where(np.isneginf(admitted_scores(router, batch)), np.inf, costs)

    def weights(batch: TokenBatch, choice: WhatIfChoice, plan: TransportPlan) -> WhatIfChoice:
        slots = choice.chosen.astype(np.int64)
        order = np.take_along_axis(plan.log_share, np.maximum(slots, 0), axis=1)
        order[slots < 0] = -np.inf
        # tokens with their own set have it in the order of the router
        place = np.argsort(-order, axis=1, kind="stable")
        chosen, order = (np.take_along_axis(a, place, axis=1) for a in (choice.chosen, order))
        share = np.exp(order - order.max(axis=1, keepdims=True))
        share *= router.rule.weights.scale / share.sum(axis=1, keepdims=True)
        if router.expert_scale is not None:
            share = share * router.expert_scale[chosen]
        return replace(choice, chosen=chosen, weights=np.where(chosen < 0, 0.0, share))

    return _gate_of_plans(router, values, cost, sample.kernels, weights)
