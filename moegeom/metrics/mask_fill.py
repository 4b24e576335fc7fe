"""Tokens at which it matters what a group-limited rule writes over masked experts.

Engines fill the scores of dropped groups with 0.0 or with -inf. A kept expert whose biased score is
negative loses against every masked one at 0.0, so an expert of a dropped group is chosen; with -inf
it never is. The share of tokens at which the two fills choose different sets: above 0, two engines
that differ in this alone route differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions._counters import means


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    if facts.router.rule.groups is None:
        return {"layers": {}}
    (share,) = means(reductions["mask_fill"])
    return {"layers": {"fill_decides_share": share}}


METRIC = Metric(
    name="mask_fill",
    version=1,
    text="Share of tokens at which masking dropped groups with 0.0 and with -inf choose different "
    "sets.",
    scope="router",
    needs=("mask_fill",),
    columns={
        "layers": (
            Column(
                "fill_decides_share",
                "share of tokens whose chosen set depends on the fill of the group mask",
                formula="mask_fill",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
