"""Sequential routing consistency: how much a token's choice repeats that of the token before it.

``neighbour_overlap`` is the mean share |S_t and S_t+1| / k of experts that two neighbours of a
document have in common; two independent tokens of these loads would share sum_e (n_e / T)^2 / k.
``neighbour_repeat`` is the share of neighbours with equal first choice, by chance sum_e p_e^2 over
the shares p of first choices. The difference is what order in the text adds; caches of experts live
on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions.choices import PAIRS, SAME_SET, SHARED


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    found = reductions["neighbours"].tolist()
    counts = reductions["expert_counts"].astype(np.float64)
    pairs, top_k = found[PAIRS], facts.router.rule.num_chosen
    if not pairs:
        return {"layers": {}}
    return {
        "layers": {
            "num_neighbours": pairs,
            "neighbour_overlap": top_k and found[SHARED] / (pairs * top_k),
            "neighbour_overlap_chance": top_k and _chance(top_k, counts),
            "neighbour_same_set": found[SAME_SET] / pairs,
        }
    }


def _chance(top_k: int, counts: Float64[np.ndarray, "experts"]) -> float:
    share = counts / counts.sum()
    return float(top_k * (share**2).sum())


METRIC = Metric(
    name="neighbours",
    version=1,
    text="Experts that neighbouring tokens of a document have in common.",
    scope="router",
    needs=("neighbours", "expert_counts"),
    columns={
        "layers": (
            Column("num_neighbours", "pairs of neighbouring tokens", "pairs", "int"),
            Column(
                "neighbour_overlap",
                "mean share of the chosen experts that the next token chooses too",
                formula="neighbour_overlap",
                has_se=True,
            ),
            Column(
                "neighbour_overlap_chance",
                "the same for two independent tokens of these loads",
                formula="neighbour_overlap",
                has_se=True,
            ),
            Column(
                "neighbour_same_set",
                "share of neighbours with equal chosen sets",
                formula="neighbour_overlap",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling",),
)
