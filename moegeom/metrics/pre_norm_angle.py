"""Angle before the norm to the nearest direction with another chosen set.

An RMS norm takes the length out of the residual stream, so what can flip a token is its
direction: the least angle, in radians, between the input x of the norm and one with another choice.
Its sine times |x| is the distance in front of the norm. Exact without logit biases (boundaries are
planes through 0); with them the epsilon of the norm is neglected. Behind curved and grouped
boundaries it is a certified lower bound. On a sample of at most 4096 tokens.

Compare layers by this rather than by ``boundary_distance``, whose unit is that of the normed input
with its gain.
"""

from __future__ import annotations

import numpy as np

from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.metrics._ladder import ladder_metric

METRIC = ladder_metric(
    "pre_norm_angle",
    "Angle in front of the norm to the nearest direction with another chosen set, on a sample "
    f"of at most {SMALL_SAMPLE_TOKENS} tokens.",
    ("pre_norm_angle", "the angle to the nearest boundary", "radian"),
    ("angle_histogram",),
    2.0 ** np.arange(-20, 0),  # from far below bfloat16 rounding (0.0017) to half a radian
    ("expert_relabelling", "common_row_shift", "positive_scaling", "gain_folding"),
)
