"""Sizes of the chosen sets, where tokens choose different numbers of experts.

A token may choose none at all: what only shared experts or the residual stream carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["set_sizes"]
    tokens = int(counts.sum())
    if not tokens:
        return {"layers": {}}
    below = np.cumsum(counts) >= 0.99 * tokens
    return {
        "layers": {
            "num_chosen_mean": float(counts @ np.arange(len(counts))) / tokens,
            "num_chosen_p99": int(below.argmax()),
            "no_expert_share": int(counts[0]) / tokens,
        }
    }


METRIC = Metric(
    name="set_sizes",
    version=1,
    text="How many experts tokens choose, where their numbers differ.",
    scope="router",
    needs=("set_sizes",),
    columns={
        "layers": (
            Column(
                "num_chosen_mean",
                "mean number of experts that a token chooses",
                "experts",
                formula="num_chosen",
                has_se=True,
            ),
            Column(
                "num_chosen_p99",
                "the least number that 99 % of the tokens do not exceed",
                "experts",
                "int",
                formula="num_chosen",
            ),
            Column(
                "no_expert_share",
                "share of tokens that choose no expert",
                formula="num_chosen",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
