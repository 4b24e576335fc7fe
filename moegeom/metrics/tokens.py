"""How many tokens were measured, and how many of them sit on an exact tie.

Tokens that are not finite or were left out (``--exclude-first``) are not among them. An exact tie
has margin 0 and goes to the lower expert number, as everywhere here; an engine may break it
otherwise. ``num_blocks`` are the blocks of documents behind every standard error of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.token_counts import TIES, TOKENS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["token_counts"]
    return {
        "layers": {
            "num_tokens": int(counts[TOKENS]),
            "num_exact_ties": int(counts[TIES]),
            "num_blocks": facts.num_blocks,
        }
    }


METRIC = Metric(
    name="tokens",
    version=1,
    text="Tokens measured, and exact ties.",
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
            Column("num_blocks", "blocks of documents behind standard errors", "blocks", "int"),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
