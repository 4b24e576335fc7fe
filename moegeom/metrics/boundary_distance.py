"""Boundary distance: how far the nearest input with another chosen set is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.float_bits import quantile, share_below
from moegeom.metrics.margins import METRIC as MARGINS
from moegeom.metrics.margins import QUANTILES

#: Powers of two from far below the rounding of an input to the size of one.
LADDER = 2.0 ** np.arange(-12, 9)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    histogram = reductions["distance_histogram"]
    values = quantile(histogram, np.array(list(QUANTILES.values())))
    named = dict(zip(QUANTILES, values.tolist(), strict=True))
    return {
        "layers": {
            **{f"boundary_distance_{name}": value for name, value in named.items()},
            "boundary_distance_rms_p50": named["p50"] / np.sqrt(facts.router.hidden_size),
        },
        "margins": {
            "quantity": np.full(len(LADDER), "boundary_distance"),
            "threshold": LADDER,
            "share_below": share_below(histogram, LADDER),
        },
    }


METRIC = Metric(
    name="boundary_distance",
    version=1,
    text="Quantiles of the exact Euclidean distance to the nearest wall, and a ladder of shares.",
    scope="router",
    needs=("distance_histogram",),
    columns={
        "layers": (
            *(
                Column(
                    f"boundary_distance_{name}",
                    f"{100 * probability:g} % quantile of the distance to the boundary",
                    "router input",
                    formula="boundary_distance",
                    has_se=True,
                )
                for name, probability in QUANTILES.items()
            ),
            Column(
                "boundary_distance_rms_p50",
                "median distance over the root of the hidden size",
                "rms of the input",
                formula="boundary_distance",
                has_se=True,
            ),
        ),
        "margins": MARGINS.columns["margins"],
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling", "common_row_shift"),
)
