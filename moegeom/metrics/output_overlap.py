"""Overlap of expert outputs: whether experts say the same about the same token.

Mean over pairs of experts, then over tokens, of the cosine of their outputs on one token, from a
recording that holds the output of every expert. 1 when all experts agree in direction, 0 when their
outputs are orthogonal on average; duplicates show as a pair with ``max_output_cosine`` near 1.
Outputs are not centred: a part that all experts share raises every cosine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    tokens, cosines = reductions["output_cosines"]
    if not tokens or len(cosines) < 2:
        return {"layers": {}}
    pairs = cosines[np.triu_indices(len(cosines), 1)]
    return {
        "layers": {
            "overlap_output": float(pairs.mean()),
            "max_output_cosine": float(pairs.max()),
        }
    }


METRIC = Metric(
    name="output_overlap",
    version=1,
    text="Cosines between recorded outputs of experts on the same tokens.",
    scope="router",
    needs=("output_cosines",),
    columns={
        "layers": (
            Column(
                "overlap_output",
                "mean cosine of the outputs of two experts on one token",
                formula="overlap_output",
                has_se=True,
            ),
            Column(
                "max_output_cosine",
                "largest mean cosine of a pair of experts",
                formula="overlap_output",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
)
