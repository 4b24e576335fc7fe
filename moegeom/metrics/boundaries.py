"""Boundaries: which pairs of experts the tokens are nearest to exchanging.

For each token the pair (expert out, expert in) whose boundary is nearest, by the boundary distance;
table ``pairs`` lists the 256 most frequent. Tokens whose distance is not exact
(``distance_bracket``) mostly have no known boundary and are left out. Pairs that take a large share
trade tokens under any disturbance: duplicate rows, or experts that learned the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import most_frequent

#: Pairs listed per router, the most frequent ones.
NUM_LISTED = 256


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    return {"pairs": most_frequent(reductions["boundary_pairs"], NUM_LISTED)}


METRIC = Metric(
    name="boundaries",
    version=1,
    text="Pairs of experts by the number of tokens whose nearest boundary is between them.",
    scope="router",
    needs=("boundary_pairs",),
    columns={
        "pairs": (
            Column("expert_out", "chosen expert that would be left", "expert", "int"),
            Column("expert_in", "expert that would be chosen instead", "expert", "int"),
            Column("num_tokens", "tokens whose nearest boundary is this one", "tokens", "int"),
            Column(
                "share",
                "num_tokens over all tokens with a known boundary",
                formula="boundary_pairs",
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation",),
)
