"""Exact ties: tokens whose last chosen expert and first one left out have equal scores.

The margin is exactly 0 and the lower expert number is chosen, as everywhere here; an engine may
break the tie otherwise. Missing where no margin is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.choices import TIES


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    return {"layers": {"num_exact_ties": int(reductions["token_counts"][TIES])}}


METRIC = Metric(
    name="exact_ties",
    version=1,
    text="Tokens on an exact tie.",
    scope="router",
    needs=("token_counts", "margin_histogram"),
    columns={
        "layers": (
            Column(
                "num_exact_ties",
                "tokens with margin exactly 0; the lower expert number was chosen",
                "tokens",
                "int",
                formula="margin",
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
