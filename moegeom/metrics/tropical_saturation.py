"""Tropical saturation: how far the tokens stay from every boundary, relative to their length.

For a threshold delta, the share of tokens with d > delta |y|, d the boundary distance and |y| the
length of the router input: one minus ``share_below`` in the rows ``boundary_distance_over_norm`` of
table ``margins``. The boundaries of an affine router are where the tropical polynomial "sum of the
k largest logits" bends, so a saturated set of tokens sees a linear function. The least relative
distance over all tokens (``tropical_saturation``, a lower bound within 6 %) is an extreme: it falls
with the number of tokens, so quantiles stand beside it.

A connected set of inputs that stays away from all boundaries has one chosen set only; real tokens
visit many cells, so the least distance of many tokens is near 0 for every working router. The share
of the most frequent set is ``modal_expert_set_share``.
"""

from __future__ import annotations

import numpy as np

from moegeom.core.metric import Column
from moegeom.geometry.histogram import lowest
from moegeom.metrics._ladder import ladder_metric

METRIC = ladder_metric(
    "tropical_saturation",
    "Boundary distance over the length of the router input: quantiles, least, and a ladder.",
    ("boundary_distance_over_norm", "the boundary distance over the length of the input", "1"),
    ("relative_distance_histogram",),
    2.0 ** np.arange(-20, 0),  # from the rounding of a float32 input to half its length
    ("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
    after=(
        Column(
            "tropical_saturation",
            "least relative distance of a token, at most 6 % below it",
            formula="boundary_distance_over_norm",
        ),
    ),
    more=lambda reductions, facts, quantiles: {
        "tropical_saturation": lowest(reductions["relative_distance_histogram"])
    },
)
