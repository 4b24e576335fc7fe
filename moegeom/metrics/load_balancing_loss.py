"""The loss that training balances with, in both conventions, as these tokens show it.

With f_e the share of slots that expert e takes and P_e the mean of its score over the sum of the
token's scores, the loss is E sum_e f_e P_e. Megatron-Core counts f over the kT slots (1 at
balance); Hugging Face counts it over the T tokens (k at balance) and, in its models, over the
concatenation of all layers, which a figure of one layer cannot be: ``load_balancing_loss_hf`` is
that of the layer alone.

At 1 (or k) the loss is balanced or blind: it is also 1 when scores are equal and loads are not.
Read it beside the load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.scores import FIXED_POINT


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["expert_counts"].astype(np.float64)
    scores = reductions["score_sums"] / FIXED_POINT
    experts = facts.router.num_experts
    if not counts.any():
        nothing = {"load_balancing_loss_megatron": None}
        unknown = np.full(experts, np.nan)
        return {"layers": nothing, "experts": _experts(unknown, experts)}
    mean_score = scores / scores.sum()
    loss = float(experts * (counts / counts.sum() * mean_score).sum())
    return {
        "layers": {"load_balancing_loss_megatron": loss},
        "experts": _experts(mean_score, experts),
    }


def _experts(mean_score: np.ndarray, experts: int) -> dict[str, np.ndarray]:
    return {"expert": np.arange(experts), "score_share": mean_score}


METRIC = Metric(
    name="load_balancing_loss",
    version=1,
    text="The auxiliary loss that training balances with, and each expert's share of the scores.",
    scope="router",
    needs=("expert_counts", "score_sums"),
    columns={
        "layers": (
            Column(
                "load_balancing_loss_megatron",
                "E sum f P with f over slots; 1 at balance",
                formula="load_balancing_loss",
                has_se=True,
            ),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column(
                "score_share",
                "mean of the expert's score over the sum of the token's scores",
                formula="score_share",
                has_se=True,
            ),
        ),
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
