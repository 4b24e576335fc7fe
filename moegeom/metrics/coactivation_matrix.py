"""Co-activation over chance for every pair of experts: what its heat map shows.

1 where two experts are chosen together as often as even chance has it, 0 where never. Uneven loads
alone raise the values of busy experts. The metric ``coactivation`` lists the most frequent pairs
with their counts; here all of them stand, with three digits. Routers of more than 512 experts, and
those that choose one expert, have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Metric, RouterFacts, Values
from moegeom.geometry.load import coactivation_over_chance
from moegeom.metrics.matrices import COLUMNS, MOST_EXPERTS, upper_triangle


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts, top_k = reductions["expert_pairs"], facts.router.rule.num_chosen
    is_kept = facts.is_whole and not facts.is_random and len(counts) <= MOST_EXPERTS
    if not is_kept or top_k is None or top_k < 2 or not counts.any():
        return {}
    over = coactivation_over_chance(counts, int(np.trace(counts)) // top_k, top_k)
    return {"matrices": upper_triangle("coactivation", over)}


METRIC = Metric(
    name="coactivation_matrix",
    version=1,
    text="Frequency of every pair of experts over that of even chance.",
    scope="router",
    needs=("expert_pairs",),
    columns={"matrices": COLUMNS},
    finish=_finish,
    invariances=("token_permutation",),
    is_for_figures=True,
)
