"""Weight moved: how much of a token's routing weight leaves its experts under a variant.

0 for a token that keeps its set, else the weight of the experts that leave over that of all that
were chosen. The 99th percentile is over all tokens: with few flips it is 0. Quantiles are those
of a histogram with bins of 6 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.histogram import quantile


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    (value,) = quantile(reductions["weight_moved_histogram"], np.array([0.99]))
    return {"layers": {"weight_moved_p99": float(value)}}


METRIC = Metric(
    name="weight_moved",
    version=1,
    text="The 99th percentile of the routing weight that moves under a variant.",
    scope="flip",
    needs=("weight_moved_histogram",),
    columns={
        "layers": (
            Column(
                "weight_moved_p99",
                "99 % quantile over all tokens of the weight that leaves their experts",
                formula="weight_moved",
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation",),
)
