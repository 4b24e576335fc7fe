"""Co-activation: which experts are chosen together, over all pairs, beside what chance would show.

N_ij tokens chose both i and j. ``overlap_routing`` is the mean over pairs of the Jaccard index
N_ij / (N_i + N_j - N_ij) of their sets of tokens: 0 when no two experts share a token. Its chance
level for sets drawn evenly is (k - 1) / (2E - k - 1). The most frequent pairs stand in the table
``coactivation`` with N_ij / N_i and with their frequency over what even chance gives.

All pairs of chosen experts count, not only neighbours in rank. Uneven loads alone raise the overlap
of busy experts: read it beside the load and the random router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import (
    coactivation_over_chance,
    jaccard_chance,
    jaccard_mean,
    num_pairs_seen,
)

#: Pairs listed per router, the most frequent ones.
NUM_LISTED = 256


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["expert_pairs"]
    experts, top_k = facts.router.num_experts, facts.router.rule.num_chosen
    first, second = np.triu_indices(experts, 1)
    together = counts[first, second]
    if not counts.any() or experts < 2:
        return {"layers": {}}
    layers: dict[str, float | int | None] = {
        "overlap_routing": float(jaccard_mean(counts)),
        "overlap_routing_chance": None if top_k is None else jaccard_chance(experts, top_k),
        "num_pairs_seen": int(num_pairs_seen(counts)),
        "pairs_seen_share": num_pairs_seen(counts) / len(first),
    }
    if top_k is None or top_k < 2:
        return {"layers": layers}
    tokens = int(np.trace(counts)) // top_k
    over_chance = coactivation_over_chance(counts, tokens, top_k)[first, second]
    layers["coactivation_max_over_chance"] = float(over_chance.max())
    top = np.argsort(-together, kind="stable")[:NUM_LISTED]
    top = top[together[top] > 0]
    i, j = first[top], second[top]
    return {
        "layers": layers,
        "coactivation": {
            "expert": i,
            "other_expert": j,
            "num_tokens_together": together[top],
            "share_of_expert": together[top] / counts[i, i],
            "share_of_other": together[top] / counts[j, j],
            "over_chance": over_chance[top],
        },
    }


METRIC = Metric(
    name="coactivation",
    version=1,
    text="Experts chosen together, over all pairs of chosen experts.",
    scope="router",
    needs=("expert_pairs",),
    columns={
        "layers": (
            Column(
                "overlap_routing",
                "mean Jaccard index of the token sets of two experts",
                formula="overlap_routing",
                has_se=True,
            ),
            Column(
                "overlap_routing_chance",
                "the same for sets of one size drawn evenly",
                formula="overlap_routing",
            ),
            Column("num_pairs_seen", "pairs of experts that some token chose", "pairs", "int"),
            Column("pairs_seen_share", "the same over all pairs", formula="pairs_seen"),
            Column(
                "coactivation_max_over_chance",
                "largest frequency of a pair over that of even chance; missing for k = 1",
                formula="coactivation",
                has_se=True,
            ),
        ),
        "coactivation": (
            Column("expert", "lower expert number", "expert", "int"),
            Column("other_expert", "higher expert number", "expert", "int"),
            Column("num_tokens_together", "tokens that chose both", "tokens", "int"),
            Column(
                "share_of_expert",
                "of the expert's tokens, the share with the other",
                "1",
                "float",
                "coactivation",
            ),
            Column(
                "share_of_other",
                "of the other's tokens, the share with the expert",
                "1",
                "float",
                "coactivation",
            ),
            Column("over_chance", "frequency over even chance", formula="coactivation"),
        ),
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
