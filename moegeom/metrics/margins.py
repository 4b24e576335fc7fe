"""Margins: how far the last chosen expert is ahead of the first one left out.

q_[k] - q_[k+1] in units of the selection score (``margin_unit``): logits for an affine rule, biased
scores else. Margins of different rules or layers do not compare, and a small margin is not a small
distance: it takes the rows of the two experts to say how far the input is from the wall
(``boundary_distance``). Quantiles are those of a histogram with bins of 6 %; the shares of the
ladder (table ``margins``) are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.metrics._ladder import (
    LADDER_COLUMNS,
    ladder_values,
    quantile_columns,
    quantile_errors,
    quantile_values,
)

#: Powers of two from the rounding of a float32 logit to more than a trained margin.
LADDER = 2.0 ** np.arange(-16, 5)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    histogram = reductions["margin_histogram"]
    unit = {"margin_unit": facts.router.rule.selection_score_unit}
    return {
        "layers": unit | quantile_values("margin", histogram),
        "margins": ladder_values("margin", histogram, LADDER),
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
            *quantile_columns("margin", "the margin", "selection score", "margin"),
        ),
        "margins": LADDER_COLUMNS,
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
    errors=quantile_errors("margin", "margin_histogram"),
)
