"""Sinkhorn scaling of costs that grow with the overlap of experts.

Cosines of router input and row stand for those of the vectors that the cost is defined for; weights
are the shares of the chosen experts over their sum. Equal experts have equal costs, so that nothing
here tells them apart. Hard limit: ``osr:lambda=0,beta=0,steps=0,log`` chooses as ``cosine`` does
where there is no bias, and as the router itself if its rows are of one length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.core.shapes import Float64
from moegeom.geometry.whatif import TransportPlan, osr_cost
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf, WhatIfChoice
from moegeom.variants.whatif._choices import admitted_scores, cosines, need_weights_of_sets, refuse
from moegeom.variants.whatif._plans import PARAMETERS, gate_of_plans


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
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

    return gate_of_plans(router, values, cost, sample.kernels, weights)


WHATIF = WhatIf(
    name="osr",
    text="Sinkhorn scaling of cosines less a penalty for overlapping experts.",
    parameters=(
        Parameter("lambda", "weight of overlaps with other experts", 0.5, least=0.0, most=1e6),
        Parameter("beta", "weight of cosines beyond tau, squared", 0.5, least=0.0, most=1e6),
        Parameter("tau", "cosine beyond which they are penalised", 0.7, least=0.0, most=1.0),
        *PARAMETERS,
    ),
    make=_make,
    needs=("input",),
)
