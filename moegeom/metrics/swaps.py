"""Trades: which pairs of experts exchange tokens under a variant.

``load_shift_max`` is what they add up to for the expert whose load changes most. Table ``swaps``
lists the 64 most frequent pairs (expert out, expert in), with their share of all
exchanges. Where several experts of a token change, the first that leaves is paired with the first
that comes, by rank. Pairs with a large share trade tokens under any disturbance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import most_frequent

#: Pairs listed per router and variant, the most frequent ones.
NUM_LISTED = 64


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["swapped_pairs"]
    gained = counts.sum(axis=0) - counts.sum(axis=1)
    most = int(np.argmax(np.abs(gained)))
    fair = facts.num_tokens * facts.router.rule.top_k / facts.router.num_experts
    return {
        "layers": {
            "load_shift_max": float(gained[most] / fair) if fair else None,
            "load_shift_expert": most if fair else None,
        },
        "swaps": most_frequent(counts, NUM_LISTED),
    }


METRIC = Metric(
    name="swaps",
    version=1,
    text="Pairs of experts by the number of tokens that they exchange under a variant.",
    scope="flip",
    needs=("swapped_pairs",),
    columns={
        "layers": (
            Column(
                "load_shift_max",
                "tokens that the expert of the largest change gains, over a fair share; negative "
                "where it loses them",
                formula="load_shift",
            ),
            Column("load_shift_expert", "that expert", "expert", "int"),
        ),
        "swaps": (
            Column("expert_out", "expert that is chosen before and not after", "expert", "int"),
            Column("expert_in", "expert that is chosen instead", "expert", "int"),
            Column("num_tokens", "exchanges of these two", "tokens", "int"),
            Column("share", "num_tokens over all exchanges", formula="swapped_pairs"),
        ),
    },
    finish=_finish,
    invariances=("token_permutation",),
)
