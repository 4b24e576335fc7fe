"""Margins: how far the last chosen expert is ahead of the first one left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.float_bits import quantile, share_below

QUANTILES = {"p001": 0.001, "p01": 0.01, "p50": 0.5}

#: Powers of two are edges of the histogram, so these shares are exact.
LADDER = 2.0 ** np.arange(-16, 5)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    histogram = reductions["margin_histogram"]
    values = quantile(histogram, np.array(list(QUANTILES.values())))
    return {
        "layers": {
            "margin_unit": facts.router.rule.selection_score_unit,
            **{f"margin_{name}": float(v) for name, v in zip(QUANTILES, values, strict=True)},
        },
        "margins": {
            "quantity": np.full(len(LADDER), "margin"),
            "threshold": LADDER,
            "share_below": share_below(histogram, LADDER),
        },
    }


METRIC = Metric(
    name="margins",
    version=1,
    text="Quantiles of the margin, and the share of tokens below each step of a ladder.",
    scope="router",
    needs=("margin_histogram",),
    columns={
        "layers": (
            Column("margin_unit", "what a margin is measured in", "", "str"),
            Column("margin_p001", "0.1 % quantile of the margin", "selection score", has_se=True),
            Column("margin_p01", "1 % quantile of the margin", "selection score", has_se=True),
            Column("margin_p50", "median margin", "selection score", has_se=True),
        ),
        "margins": (
            Column("quantity", "margin or boundary_distance", "", "str"),
            Column("threshold", "step of the ladder, in units of the quantity", "quantity"),
            Column(
                "share_below", "share of tokens strictly below it", formula="ladder", has_se=True
            ),
        ),
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
