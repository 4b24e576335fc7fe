"""Boundary distance in standard deviations of input rounding, taken as isotropic noise.

r = d / s, d the boundary distance and s = 0.4247 x 2^-8 |y| / sqrt(D) the standard deviation of
each coordinate when the router input is rounded to bfloat16. Noise of s in every direction crosses
the nearest wall with probability Phi(-r): a token within one sigma is at risk, one beyond three is
not. Distances over sqrt(D) say nothing of the kind: nearly all tokens are within 0.0017 sqrt(D) of
a wall, in a direction that noise hardly ever takes.

Rounding errors are proportional to their coordinate, not isotropic; ``rounding_noise`` counts them
so, on a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Metric, RouterFacts, Values
from moegeom.metrics._ladder import (
    LADDER_COLUMNS,
    ladder_values,
    quantile_columns,
    quantile_errors,
    quantile_values,
)

#: From an eighth of a sigma, where half the tokens switch, to what no noise reaches.
LADDER = 2.0 ** np.arange(-3, 7)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    histogram = reductions["noise_sigmas_histogram"]
    return {
        "layers": quantile_values("noise_sigmas", histogram),
        "margins": ladder_values("noise_sigmas", histogram, LADDER),
    }


METRIC = Metric(
    name="noise_sigmas",
    version=1,
    text="Boundary distance in standard deviations of bfloat16 rounding of the input, isotropic.",
    scope="router",
    needs=("noise_sigmas_histogram",),
    columns={
        "layers": quantile_columns(
            "noise_sigmas", "the boundary distance in sigmas", "sigma", "noise_sigmas"
        ),
        "margins": LADDER_COLUMNS,
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
    errors=quantile_errors("noise_sigmas", "noise_sigmas_histogram"),
)
