"""Boundary distance: how far the nearest input with another chosen set is.

Behind linear boundaries d(y) = min over i chosen, j not, of (z_i - z_j) / |w_i - w_j|, exactly;
the pair that attains it is not that of the k-th and next logit in every seventh token or so.
Boundaries of scores with a selection bias are curved: exact within 1e-6 for scores of one logit
(sigmoid, root of softplus), a certified lower bound for groups and for softmax, on a sample of at
most 4096 tokens. Where only the largest logits are recorded and do not decide it, its lower bound
stands for it as well. ``distance_bracket`` says for how many tokens: quantiles are then lower
bounds, and shares of the ladder upper bounds.

Quantiles are those of a histogram with bins of 6 %; the shares of the ladder (table ``margins``)
are exact. For another unit see ``tropical_saturation`` (over |y|), ``noise_sigmas`` (over rounding
noise) and ``pre_norm_angle`` (in front of the norm).
"""

from __future__ import annotations

import numpy as np

from moegeom.metrics._ladder import ladder_metric

METRIC = ladder_metric(
    "boundary_distance",
    "Quantiles of the exact Euclidean distance to the nearest boundary, and a ladder of shares.",
    (
        "boundary_distance",
        "the distance to the boundary; a lower bound unless distance_exact_share is 1",
        "router input",
    ),
    ("distance_histogram",),
    2.0 ** np.arange(-12, 9),  # from far below the rounding of an input to the size of one
    ("token_permutation", "expert_relabelling", "common_row_shift"),
)
