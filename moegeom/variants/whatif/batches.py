"""Choices that depend on the other tokens of a batch: capacities, and experts that choose."""

from __future__ import annotations

import numpy as np

from moegeom.core.router import Router
from moegeom.geometry import whatif
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, Values, WhatIfChoice, what_if
from moegeom.variants.whatif._choices import (
    OF_SCORES,
    absent,
    as_stored,
    batches_of,
    choice_of_sets,
    known,
    need_top_k,
    need_weights_of_sets,
    neighbours_decide,
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
