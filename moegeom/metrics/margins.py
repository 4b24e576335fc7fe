"""Margins: how far the last chosen expert is ahead of the first one left out.

q_[k] - q_[k+1] in units of the selection score (``margin_unit``): logits for an affine rule, biased
scores else. Margins of different rules or layers do not compare, and a small margin is not a small
distance: it takes the rows of the two experts to say how far the input is from the boundary
(``boundary_distance``). Quantiles are those of a histogram with bins of 6 %; the shares of the
ladder (table ``margins``) are exact.
"""

from __future__ import annotations

import numpy as np

from moegeom.core.metric import Column
from moegeom.metrics._ladder import ladder_metric

METRIC = ladder_metric(
    "margins",
    "Quantiles of the margin, and the share of tokens below each step of a ladder.",
    ("margin", "the margin", "selection score"),
    ("margin_histogram",),
    2.0 ** np.arange(-16, 5),  # from the rounding of a float32 logit to more than a trained margin
    ("token_permutation", "expert_relabelling"),
    before=(Column("margin_unit", "what a margin is measured in", "", "str"),),
    more=lambda _, facts, quantiles: {"margin_unit": facts.router.rule.selection_score_unit},
)
