"""How many tokens were measured, and how many of them sit on a tie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.token_counts import AMBIGUOUS, BOUNDED, TIES, TOKENS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["token_counts"]
    bounded = counts[BOUNDED]
    return {
        "layers": {
            "num_tokens": int(counts[TOKENS]),
            "num_exact_ties": int(counts[TIES]),
            "ambiguous_share": counts[AMBIGUOUS] / bounded if bounded else None,
        }
    }


METRIC = Metric(
    name="tokens",
    version=1,
    text="Tokens measured, exact ties, and choices within the float32 error bound of a tie.",
    scope="router",
    needs=("token_counts",),
    columns={
        "layers": (
            Column("num_tokens", "finite tokens that were routed", "tokens", "int"),
            Column(
                "num_exact_ties",
                "tokens with margin exactly 0; the lower expert number was chosen",
                "tokens",
                "int",
                formula="margin",
            ),
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
    invariances=("token_permutation", "expert_relabelling"),
)
