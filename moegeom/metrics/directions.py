"""How far router inputs point the same way.

The length of the mean of the unit vectors y / |y| (``mean_resultant_length``), and the mean cosine
between the inputs of two different tokens, which follows from it but does not depend on how many
tokens there are. Near 1 all inputs point one way and routing sees little of the space; near 0 they
are spread. On a sample of at most 4096 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.geometry.gram import mean_pairwise_cosine


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    total, tokens = reductions["directions"]
    if not tokens:
        return {"layers": {"mean_resultant_length": None, "mean_pairwise_cosine": None}}
    squared = float(total @ total)
    length = math.sqrt(squared)
    cosine = mean_pairwise_cosine(length, tokens) if tokens > 1 else None
    return {"layers": {"mean_resultant_length": length / tokens, "mean_pairwise_cosine": cosine}}


METRIC = Metric(
    name="directions",
    version=1,
    text="Spread of the directions of the router inputs, on a sample of at most "
    f"{SMALL_SAMPLE_TOKENS} tokens.",
    scope="router",
    needs=("directions",),
    columns={
        "layers": (
            Column(
                "mean_resultant_length",
                "length of the mean unit vector of the router inputs: 1 when all point one way",
                formula="mean_resultant_length",
                has_se=True,
            ),
            Column(
                "mean_pairwise_cosine",
                "mean cosine between the router inputs of two different tokens",
                formula="mean_pairwise_cosine",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
