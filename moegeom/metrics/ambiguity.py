"""Ambiguous tokens: those whose choice two correct float32 engines may make differently.

A token is ambiguous when its margin is at most a bound on what the order of summation can do to two
selection scores (``float_bound`` of the formulas). It is a worst case: of the ambiguous tokens few
really differ. All figures here hold for the others on any machine; exact ties go to the lower
expert number and are counted by ``num_exact_ties``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.choices import AMBIGUOUS, BOUNDED


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["ambiguity"]
    bounded = counts[BOUNDED]
    return {"layers": {"ambiguous_share": counts[AMBIGUOUS] / bounded if bounded else None}}


METRIC = Metric(
    name="ambiguity",
    version=1,
    text="Tokens whose margin is within the bound on float32 rounding for any order of summation: "
    "a worst case, not an estimate.",
    scope="router",
    needs=("ambiguity",),
    columns={
        "layers": (
            Column(
                "ambiguous_share",
                "share of tokens whose margin is within the bound on float32 rounding, so that "
                "two correct engines may choose differently",
                formula="float_bound",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling", "positive_scaling"),
)
