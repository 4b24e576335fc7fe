"""Input stability: tokens whose set no rounding of the router input to bfloat16 can change.

Two certificates, each with its assumption in the column's name. ``worst``: every coordinate is
rounded in the worst direction at once, so a token is safe when its boundary distance exceeds
2^-8 |y|; few are, which says more about the assumption than about the router. ``1e6``: roundings
are independent and even, and a token is safe when Hoeffding's bound over all k (E - k) pairs leaves
a probability of 1e-6; on a sample of at most 4096 tokens. Both take the recorded input as what is
rounded, also where it is stored in bfloat16 already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.histogram import bin_edges, share_below
from moegeom.geometry.rounding import ROUNDING_RMS, UNIT_BFLOAT16

#: Probability that is left of a flip.
_LEFT = 1e-6


def sigmas_needed(num_experts: int, top_k: int) -> float:
    r"""Nearest boundary, in ``rounding_sigmas``, from which a flip has probability 1e-6 at most.

    Independent errors of mean 0, each at most :math:`u |y_d|`, cross a boundary with probability at
    most :math:`\exp(-s^2 / 2 u^2 \lVert (w_i - w_j) \odot y \rVert^2)` (Hoeffding); summed over
    k (E - k) pairs that is 1e-6 at :math:`\sqrt{2 \log(k (E - k) / 10^{-6})} / 0.4247` sigmas.
    """
    pairs = max(top_k * (num_experts - top_k), 1)
    return math.sqrt(2.0 * math.log(pairs / _LEFT)) / ROUNDING_RMS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    rule = facts.router.rule
    edges = bin_edges()
    # the next edge of a bin: a share must not be an interpolation
    needed = edges[np.searchsorted(edges, sigmas_needed(facts.router.num_experts, rule.top_k))]
    (likely,) = share_below(reductions["rounding_sigmas_histogram"], np.array([needed]))
    (worst,) = share_below(reductions["relative_distance_histogram"], np.array([UNIT_BFLOAT16]))
    return {
        "layers": {
            "stable_share_input_rounding_1e6": 1.0 - float(likely),
            "stable_share_input_rounding_worst": 1.0 - float(worst),
        }
    }


METRIC = Metric(
    name="input_stability",
    version=1,
    text="Tokens that rounding the input to bfloat16 cannot flip: but for one in a million, and "
    "in the worst case.",
    scope="router",
    needs=("rounding_sigmas_histogram", "relative_distance_histogram"),
    columns={
        "layers": (
            Column(
                "stable_share_input_rounding_1e6",
                "share of tokens that independent roundings of the input to bfloat16 flip with "
                "probability 1e-6 at most",
                formula="input_stability",
                has_se=True,
            ),
            Column(
                "stable_share_input_rounding_worst",
                "share of tokens that no rounding of the input to bfloat16 flips",
                formula="input_stability",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling", "common_row_shift", "positive_scaling"),
)
