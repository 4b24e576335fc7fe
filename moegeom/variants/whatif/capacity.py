"""Token choice with a limit: an expert serves ceil(f k T / E) tokens of a batch, others lose it.

``order`` says who is served: the first ones (``position``), which depends on earlier tokens alone,
or those that score highest with the expert (``score``). The weights of experts that serve stay as
they are; nothing makes up for a lost one. Hard limit: from a factor of E / k, inf among them,
nothing can be dropped, and it is the router itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.router import Router
from moegeom.geometry.whatif import batch_capacity, kept_within_capacity
from moegeom.kernels.batch import TokenBatch
from moegeom.variants.what_if import FitSample, FittedGate, Parameter, WhatIf, WhatIfChoice
from moegeom.variants.whatif._choices import (
    OF_SCORES,
    absent,
    as_stored,
    batches_of,
    known,
    need_top_k,
    neighbours_decide,
    routing_scores,
    rows_of,
)


def _make(router: Router, values: Mapping[str, Any], sample: FitSample) -> FittedGate:
    need_top_k(router)
    factor, by_score, k = values["factor"], values["order"] == "score", router.rule.top_k
    if factor * k >= router.num_experts:
        return FittedGate(router=router, reached={"dropped_slot_share": 0.0})

    def choose(batch: TokenBatch) -> WhatIfChoice:
        room = batch_capacity(len(batch.chosen), router.num_experts, k, factor)
        scores = routing_scores(router, batch) if by_score else None
        is_served = kept_within_capacity(batch.chosen, router.num_experts, room, scores)
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


WHATIF = WhatIf(
    name="capacity",
    text="An expert serves so many tokens of a batch, the others lose it.",
    parameters=(
        Parameter(
            "factor",
            "capacity factor: 1 is the fair load, inf drops nothing",
            1.25,
            least=1e-6,
            is_first=True,
            is_swept=True,
        ),
        Parameter(
            "order", "who is served: position or score", "position", words=("position", "score")
        ),
    ),
    make=_make,
)
