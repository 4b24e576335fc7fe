"""Nearest boundary in standard deviations of what rounding each coordinate to bfloat16 does.

r = min over i chosen, j not, of (z_i - z_j) / sigma_ij, sigma_ij^2 = (0.4247 x 2^-8)^2
sum_d (w_id - w_jd)^2 y_d^2: the error of a coordinate is proportional to it. Phi(-r) bounds the
probability of a flip from below and estimates it to first order; ``bf16_flip_share`` is its
mean over the sample. On a sample of at most 4096 tokens, since it looks at every coordinate of
every near pair.
"""

from __future__ import annotations

from moegeom.core.metric import Column
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.kernels.reductions._counters import means
from moegeom.metrics._ladder import ladder_metric
from moegeom.metrics.noise_sigmas import LADDER

METRIC = ladder_metric(
    "rounding_noise",
    "Nearest boundary in standard deviations of rounding the input to bfloat16, coordinate by "
    f"coordinate, on a sample of at most {SMALL_SAMPLE_TOKENS} tokens.",
    ("rounding_sigmas", "the nearest boundary in sigmas", "sigma"),
    ("rounding_sigmas_histogram", "rounding_flip"),
    LADDER,
    ("expert_relabelling", "common_row_shift", "positive_scaling"),
    after=(
        Column(
            "bf16_flip_share",
            "expected share of tokens that rounding the input to bfloat16 flips",
            formula="rounding_sigmas",
            has_se=True,
        ),
    ),
    more=lambda reductions, facts, quantiles: {
        "bf16_flip_share": means(reductions["rounding_flip"])[0]
    },
)
