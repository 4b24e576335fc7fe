"""Choices of k experts by a transport plan over a batch: what its kinds share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float64
from moegeom.geometry.whatif import CLIP, TransportPlan, column_error, hard_set, sinkhorn
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIfChoice
from moegeom.variants.whatif._choices import (
    OF_SCORES,
    absent,
    batches_of,
    choice_of_sets,
    neighbours_decide,
    rows_of,
)

#: Cost of each token at each expert, inf where a token cannot go.
Cost = Callable[[TokenBatch], Float64[np.ndarray, "tokens experts"]]

#: A choice with weights of the plan instead of those of the rule.
OfPlan = Callable[[TokenBatch, WhatIfChoice, TransportPlan], WhatIfChoice]

#: Width and steps of the scaling.
PARAMETERS = (
    Parameter("eps", "costs are divided by it: small is sharp", 0.05, least=1e-9, most=1e9),
    Parameter("steps", "scalings of rows and columns", 3, least=0, most=100_000, is_whole=True),
    Parameter("log", "in logarithms, without the clip", is_flag=True),
)


def gate_of_plans(
    router: Router,
    values: Mapping[str, Any],
    cost: Cost,
    kernels: Kernels,
    weights: OfPlan = lambda batch, choice, plan: choice,
) -> FittedGate:
    """The k largest shares of each token in a plan that is made for a batch.

    ``weights`` may give a choice the weights of the plan instead of those of the rule.
    """
    eps, steps, log = values["eps"], values["steps"], bool(values["log"])

    def plan_of(batch: TokenBatch) -> TransportPlan:
        return sinkhorn(cost(batch), eps, steps, np.inf if log else CLIP, log)

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
