"""Angle before the norm to the nearest direction with another chosen set.

An RMS norm takes the length out of the residual stream, so what can switch a token is its
direction: the least angle, in radians, between the input x of the norm and one with another choice.
Its sine times |x| is the distance in front of the norm. Exact without logit biases (walls are
planes through 0); with them the epsilon of the norm is neglected. Behind curved and grouped walls
it is a certified lower bound. On a sample of at most 4096 tokens.

Compare layers by this rather than by ``boundary_distance``, whose unit is that of the normed input
with its gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Metric, RouterFacts, Values
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.metrics._ladder import (
    LADDER_COLUMNS,
    ladder_values,
    quantile_columns,
    quantile_errors,
    quantile_values,
)

#: From far below the angle of bfloat16 rounding (0.0017) to half a radian.
LADDER = 2.0 ** np.arange(-20, 0)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    histogram = reductions["angle_histogram"]
    return {
        "layers": quantile_values("pre_norm_angle", histogram),
        "margins": ladder_values("pre_norm_angle", histogram, LADDER),
    }


METRIC = Metric(
    name="pre_norm_angle",
    version=1,
    text="Angle in front of the norm to the nearest direction with another chosen set, on a sample "
    f"of at most {SMALL_SAMPLE_TOKENS} tokens.",
    scope="router",
    needs=("angle_histogram",),
    columns={
        "layers": quantile_columns(
            "pre_norm_angle", "the angle to the nearest wall", "radian", "pre_norm_angle"
        ),
        "margins": LADDER_COLUMNS,
    },
    finish=_finish,
    invariances=(
        "expert_relabelling",
        "common_row_shift",
        "positive_scaling",
        "gain_folding",
    ),
    errors=quantile_errors("pre_norm_angle", "angle_histogram"),
)
