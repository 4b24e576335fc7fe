"""Agreement of the recomputed choice with the recorded one.

For each token with a recorded choice: does the rule, applied to the recorded input with these
weights, choose the same set? ``num_near_tie`` counts differences within the float bound of a tie,
which two correct engines may show; ``num_not_reproduced`` those beyond it: another layer, another
rule, another checkpoint, or an engine of lower precision. Sets are compared, not their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.choices import BEYOND, EQUAL, NEAR_TIE


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["agreement"]
    if not counts.any():
        return {"layers": {}}
    return {
        "layers": {
            "num_reproduced": int(counts[EQUAL]),
            "num_near_tie": int(counts[NEAR_TIE]),
            "num_not_reproduced": int(counts[BEYOND]),
        }
    }


METRIC = Metric(
    name="agreement",
    version=1,
    text="Recorded choices that the rule reproduces from the recorded inputs.",
    scope="router",
    needs=("agreement",),
    columns={
        "layers": (
            Column("num_reproduced", "recorded chosen sets that are reproduced", "tokens", "int"),
            Column(
                "num_near_tie",
                "not reproduced, but within the float bound of a tie",
                "tokens",
                "int",
                formula="float_bound",
            ),
            Column("num_not_reproduced", "not reproduced beyond that bound", "tokens", "int"),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
