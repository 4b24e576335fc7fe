"""Tokens that rounding the router input to bfloat16 would flip, rounding taken as isotropic.

The mean over tokens of Phi(-d / s), d the exact boundary distance and s the standard deviation of
the rounding error of a coordinate: to first order the share of tokens whose chosen set changes when
the input is kept in bfloat16. Exposure, not loss of quality. It grows with E and k, so read it
beside the random router. ``rounding_noise`` counts the error coordinate by coordinate, on a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.flips import FIXED_POINT


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    tokens, expected = reductions["bf16_flip"]
    share = expected / FIXED_POINT / tokens if tokens else None
    return {"layers": {"bf16_flip_share_isotropic": share}}


METRIC = Metric(
    name="bf16_flip",
    version=1,
    text="Expected share of tokens whose chosen set changes when the router input is rounded to "
    "bfloat16, to first order and with rounding taken as isotropic. Exposure, not loss.",
    scope="router",
    needs=("bf16_flip",),
    columns={
        "layers": (
            Column(
                "bf16_flip_share_isotropic",
                "mean over tokens of Phi(-distance / rounding noise); assumes isotropic rounding",
                formula="bf16_flip",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling", "common_row_shift", "positive_scaling"),
)
