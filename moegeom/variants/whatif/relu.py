"""Every expert whose logit is above a threshold, with what it is above it as its weight.

The threshold is 0, or the one at which tokens have ``experts`` experts in the mean, over the tokens
of the fit. A token may have none. Gates are continuous: a weight is 0 where its expert starts.
Biases that only select and groups play no part. Hard limit: none is the router; weights are those
of no softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.geometry.whatif import packed, relu_gate, threshold_distance, threshold_for
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf, WhatIfChoice
from moegeom.variants.whatif._choices import absent, known, need_top_k, refuse, row_lengths


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    mean_experts, threshold = values["experts"], 0.0
    logits = known(sample.tokens.mapped)
    if mean_experts is not None:
        try:
            threshold = threshold_for(logits, mean_experts)
        except ValueError as error:
            raise refuse(router, f"no threshold gives the mean {error}") from None
    why = _no_distance(router)
    lengths = row_lengths(router)

    def choose(batch: TokenBatch) -> WhatIfChoice:
        z = known(batch.mapped)
        gate = relu_gate(z, threshold)
        chosen = packed(gate > 0.0, gate)
        slots = chosen.astype(np.int64)
        weights = np.where(slots < 0, 0.0, np.take_along_axis(gate, slots, axis=1))
        quantities = {"selection": z, "scores": gate}
        if not why:
            distance = threshold_distance(z, lengths, threshold)
            quantities |= {"distance": distance, "distance_upper": distance}
        return WhatIfChoice(chosen, weights, quantities)

    counts = (relu_gate(logits, threshold) > 0.0).sum(axis=1)
    mean = float(counts.mean())
    distances = () if why else ("distance", "distance_upper")
    return FittedGate(
        choose=choose,
        has_fixed_size=False,
        reached={
            "threshold": threshold,
            "experts_mean": mean,
            "no_expert_share": float((counts == 0).mean()),
            "flop_factor": mean / router.rule.top_k,
        },
        absent=absent(
            ("selection", "scores", *distances),
            "a gate with a threshold has no last chosen expert and no first other one",
            **dict.fromkeys(("distance", "distance_upper"), why),
            **dict.fromkeys(
                ("probability", "entropy"), "scores of a token without experts have no sum"
            ),
            log_sum_exp="nothing is the softmax of these logits",
        ),
        notes=_notes(router),
    )


def _no_distance(router: Router) -> str:
    """Why the distance to the nearest threshold is not known; empty where it is."""
    if router.has_cosine_logits or router.rule.logit_map is not None:
        return "thresholds of mapped or divided logits have no known distance"
    return ""


def _notes(router: Router) -> tuple[str, ...]:
    notes = []
    if router.rule.groups is not None:
        notes += ["Groups play no part: an expert of any group runs if its logit is high enough."]
    if router.rule.has_selection_bias:
        notes += ["The bias that only selects plays no part."]
    return tuple(notes)


WHATIF = WhatIf(
    name="relu",
    text="Every expert whose logit is above a threshold; the weight is what it is above it.",
    parameters=(
        Parameter("experts", "mean number of experts that the threshold is found for", least=0.0),
    ),
    make=_make,
)
