"""Tropical saturation: how far the tokens stay from every wall, relative to their length.

For a threshold delta, the share of tokens with d > delta |y|, d the boundary distance and |y| the
length of the router input: one minus ``share_below`` in the rows ``boundary_distance_over_norm`` of
table ``margins``. The walls of an affine router are where the tropical polynomial "sum of the k
largest logits" bends, so a saturated set of tokens sees a linear function. The least relative
distance over all tokens (``tropical_saturation``, a lower bound within 6 %) is an extreme: it falls
with the number of tokens, so quantiles stand beside it.

A connected set of inputs that stays away from all walls has one chosen set only; real tokens visit
many cells, so the least distance of many tokens is near 0 for every working router. The share of
the most frequent set is ``modal_coalition_share``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.arithmetic.float_bits import lowest
from moegeom.metrics._ladder import (
    LADDER_COLUMNS,
    ladder_values,
    quantile_columns,
    quantile_errors,
    quantile_values,
)

#: From the rounding of a float32 input to half its length.
LADDER = 2.0 ** np.arange(-20, 0)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    histogram = reductions["relative_distance_histogram"]
    return {
        "layers": quantile_values("boundary_distance_over_norm", histogram)
        | {"tropical_saturation": lowest(histogram)},
        "margins": ladder_values("boundary_distance_over_norm", histogram, LADDER),
    }


METRIC = Metric(
    name="tropical_saturation",
    version=1,
    text="Boundary distance over the length of the router input: quantiles, least, and a ladder.",
    scope="router",
    needs=("relative_distance_histogram",),
    columns={
        "layers": (
            *quantile_columns(
                "boundary_distance_over_norm",
                "the boundary distance over the length of the input",
                "1",
                "boundary_distance_over_norm",
            ),
            Column(
                "tropical_saturation",
                "least relative distance of a token, at most 6 % below it",
                formula="boundary_distance_over_norm",
            ),
        ),
        "margins": LADDER_COLUMNS,
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
    errors=quantile_errors("boundary_distance_over_norm", "relative_distance_histogram"),
)
