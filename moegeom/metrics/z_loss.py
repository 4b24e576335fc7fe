"""Router z-loss: the mean square of the log-sum-exp of the logits.

Training adds this to the loss to keep logits small, where they are kept in few digits. Beside it
stands the mean of log-sum-exp itself, which says which way they drifted. Adding one number to every
logit changes no softmax choice but changes both: this is a figure of the size of the logits, not of
the routing. Both are missing where a log-sum-exp is beyond 2^20, which no fixed-point sum holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.scores import (
    LARGE_UNIT,
    LSE_BEYOND,
    LSE_FIXED_POINT,
    LSE_LARGE,
    LSE_PLAIN,
    LSE_REST,
    LSE_TOKENS,
)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    sums = reductions["log_sum_exp"].tolist()
    tokens = sums[LSE_TOKENS]
    if not tokens or sums[LSE_BEYOND]:  # a sum without the largest ones would be no mean
        return {"layers": {"z_loss": None, "log_sum_exp_mean": None}}
    total = sums[LSE_LARGE] * LARGE_UNIT + sums[LSE_REST] / LSE_FIXED_POINT
    return {
        "layers": {
            "z_loss": total / tokens,
            "log_sum_exp_mean": sums[LSE_PLAIN] / LSE_FIXED_POINT / tokens,
        }
    }


METRIC = Metric(
    name="z_loss",
    version=1,
    text="Size of the logits: the z-loss of training, and the mean of log-sum-exp.",
    scope="router",
    needs=("log_sum_exp",),
    columns={
        "layers": (
            Column(
                "z_loss", "mean square of log-sum-exp of the logits", formula="z_loss", has_se=True
            ),
            Column("log_sum_exp_mean", "mean of log-sum-exp", formula="z_loss", has_se=True),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
