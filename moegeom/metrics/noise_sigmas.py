"""Boundary distance in standard deviations of input rounding, taken as isotropic noise.

r = d / s, d the boundary distance and s = 0.4247 x 2^-8 |y| / sqrt(D) the standard deviation of
each coordinate when the router input is rounded to bfloat16. Noise of s in every direction crosses
the nearest boundary with probability Phi(-r): a token within one sigma is at risk, one beyond three
is not. Distances over sqrt(D) say nothing of the kind: nearly all tokens are within 0.0017 sqrt(D)
of a boundary, in a direction that noise hardly ever takes.

Rounding errors are proportional to their coordinate, not isotropic; ``rounding_noise`` counts them
so, on a sample.
"""

from __future__ import annotations

import numpy as np

from moegeom.metrics._ladder import ladder_metric

#: From an eighth of a sigma, where half the tokens flip, to what no noise reaches.
LADDER = 2.0 ** np.arange(-3, 7)

METRIC = ladder_metric(
    "noise_sigmas",
    "Boundary distance in standard deviations of bfloat16 rounding of the input, isotropic.",
    ("noise_sigmas", "the boundary distance in sigmas", "sigma"),
    ("noise_sigmas_histogram",),
    LADDER,
    ("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
)
