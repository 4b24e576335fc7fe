"""Experts choose tokens: each takes the ceil(f k T / E) of a batch that score highest with it.

Loads are even by construction; a token may have no expert or all of them, by what else is in its
batch. Weights are those of the rule over the experts that took it. Tokens are compared by the score
of the rule (softmax where it compares raw logits); a selection bias moves all tokens of an expert
alike. Hard limit: a token that is taken by just its own set has its own weights, bit for bit; from
a factor of E / k every expert takes every token, as ``topk:E`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.geometry.whatif import batch_capacity, expert_choice
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf, WhatIfChoice
from moegeom.variants.whatif._choices import (
    OF_SCORES,
    absent,
    batches_of,
    choice_of_sets,
    need_weights_of_sets,
    neighbours_decide,
    routing_scores,
    rows_of,
)


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_weights_of_sets(router)
    factor, k = values["factor"], router.rule.top_k

    def choose(batch: TokenBatch) -> WhatIfChoice:
        scores = routing_scores(router, batch)
        room = batch_capacity(len(scores), router.num_experts, k, factor)
        return choice_of_sets(router, batch, expert_choice(scores, room), scores, sample.kernels)

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


WHATIF = WhatIf(
    name="expert_choice",
    text="Each expert takes the tokens of a batch that score highest with it, so many for each.",
    parameters=(
        Parameter(
            "factor",
            "capacity factor: 1 is the fair load",
            1.25,
            least=1e-6,
            is_first=True,
            is_swept=True,
        ),
    ),
    make=_make,
)
