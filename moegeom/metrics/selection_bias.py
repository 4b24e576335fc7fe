"""The selection bias: its range, and what a cast to bfloat16 leaves of it.

A bias that balances loads spreads over a few tenths around a mean that drifts; bfloat16 steps by
2^-7 of its size, so that a mean of 7 leaves a dozen values out of 256, and an update of 0.001 moves
nothing above 1/2. A constant added to all biases changes no choice (where dropped groups are -inf),
so subtracting the middle of the range fixes what a cast would destroy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.number_formats import bias_precision, to_bfloat16

_FORMULA = "bias_precision"


def _finish(quantities: Mapping[str, Any], facts: RouterFacts) -> Values:
    bias, added = facts.router.selection_bias, facts.router.logit_bias
    experts: dict[str, np.ndarray] = {"expert": np.arange(facts.router.num_experts)}
    if added is not None:
        experts["logit_bias"] = added.astype(np.float64)
    if bias is None:
        return {"layers": {}, "experts": experts}
    values = bias.astype(np.float64)
    experts["selection_bias"] = values
    if not np.isfinite(values).all():
        return {"layers": {}, "experts": experts}
    figures = {f"bias_{name}": v for name, v in dataclasses.asdict(bias_precision(bias)).items()}
    return {
        "layers": {
            **figures,
            "bias_mean": float(values.mean()),
            "bias_range": float(values.max() - values.min()),
            "is_bias_bf16": bool((to_bfloat16(bias) == values).all()),
        },
        "experts": {**experts, "bias_cast_shift": to_bfloat16(bias) - values},
    }


METRIC = Metric(
    name="selection_bias",
    version=1,
    text="The bias that is added to scores for the selection only; missing without one.",
    scope="weights",
    needs=(),
    columns={
        "layers": (
            Column("bias_num_distinct", "different values among the experts", "", "int", _FORMULA),
            Column(
                "bias_num_distinct_bf16",
                "different values after a cast to bfloat16",
                "",
                "int",
                _FORMULA,
            ),
            Column(
                "bias_num_distinct_bf16_recentred",
                "the same when the middle of the range is subtracted first",
                "",
                "int",
                _FORMULA,
            ),
            Column(
                "bias_ulp_bf16", "step of bfloat16 at the largest bias", "score", formula=_FORMULA
            ),
            Column("bias_spread", "standard deviation over experts, ddof 0", "score"),
            Column("bias_middle", "middle between least and largest bias", "score"),
            Column(
                "bias_lost_update_share",
                "experts whose bias an update of 0.001 does not move in bfloat16",
                formula=_FORMULA,
            ),
            Column("bias_largest_shift", "largest change of a bias by the cast", "score"),
            Column("bias_mean", "mean over experts", "score"),
            Column("bias_range", "largest less least bias", "score"),
            Column("is_bias_bf16", "every bias is a bfloat16 number already", "", "bool"),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column("logit_bias", "bias that is added to the expert's logit", "logit"),
            Column("selection_bias", "bias of the expert as stored", "score"),
            Column("bias_cast_shift", "what a cast to bfloat16 would add to it", "score"),
        ),
    },
    finish=_finish,
    invariances=("expert_relabelling",),
)
