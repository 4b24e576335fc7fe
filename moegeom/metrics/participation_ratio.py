"""Participation ratio: how many directions share the variance of the router inputs.

PR = (tr S)^2 / tr S^2, S the covariance of the inputs: 1 when all variance lies on a line, D when
it is the same in every direction. A sample of T tokens can show T - 1 at most, so it is corrected:
1 / ((1 / PR - 1 / n) / (1 + 1 / n)), n = T - 1. On a sample of about 2048 tokens, outlier tokens
left out. A linear measure: a curved set of low intrinsic dimension may have a large ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.space import participation_ratio_corrected
from moegeom.kernels.reductions.samples import NUM_INPUTS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    moments = reductions["input_sample"].moments
    tokens = len(moments.squared_distance)
    if tokens < 3:
        return {"layers": {"participation_ratio_raw": None, "participation_ratio": None}}
    raw = moments.participation_ratio
    return {
        "layers": {
            "participation_ratio_raw": raw,
            "participation_ratio": float(participation_ratio_corrected(raw, tokens)),
        }
    }


METRIC = Metric(
    name="participation_ratio",
    version=1,
    text="Number of directions that share the variance of the router inputs, on a sample of "
    f"about {NUM_INPUTS} tokens.",
    scope="router",
    needs=("input_sample",),
    columns={
        "layers": (
            Column(
                "participation_ratio",
                "participation ratio of the covariance, corrected for the size of the sample",
                "dimensions",
                formula="participation_ratio",
                has_se=True,
            ),
            Column(
                "participation_ratio_raw",
                "the same without correction",
                "dimensions",
                formula="participation_ratio",
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
