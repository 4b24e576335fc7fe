"""How far router inputs point the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    total, tokens = reductions["directions"]
    length = float(np.linalg.norm(total)) / tokens if tokens else None
    return {"layers": {"mean_resultant_length": length}}


METRIC = Metric(
    name="directions",
    version=1,
    text="Spread of the directions of the router inputs, on a sample of at most 4096 tokens.",
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
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
)
