"""How many tokens were measured.

Tokens that are not finite or were left out (``--exclude-first``) are not among them. ``num_blocks``
are the blocks of documents behind every standard error of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.choices import TOKENS


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["token_counts"]
    return {
        "layers": {
            "num_tokens": int(counts[TOKENS]),
            "num_blocks": facts.num_blocks,
        }
    }


METRIC = Metric(
    name="tokens",
    version=1,
    text="Tokens measured.",
    scope="router",
    needs=("token_counts",),
    columns={
        "layers": (
            Column("num_tokens", "finite tokens that were routed", "tokens", "int"),
            Column("num_blocks", "blocks of documents behind standard errors", "blocks", "int"),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
