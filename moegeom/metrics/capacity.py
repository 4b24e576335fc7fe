"""Capacity: how many slots would be dropped, and how uneven ranks would be, at these loads.

Table ``capacity``: with C = ceil(f k T / E) tokens allowed per expert, the share of slots over the
limit, sum_e max(0, n_e - C) / (kT), for some capacity factors f. Table ``ranks``: when consecutive
experts are spread over R ranks in equal groups, the largest load of a rank over the mean, and its
inverse, the balancedness that engines report. Both treat the whole set of tokens as one batch:
smaller batches are less even, so these are the least that a deployment will see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import dropped_slot_share, expert_capacity, rank_imbalance

#: Factors in use for training with dropped tokens.
FACTORS = (1.0, 1.25, 1.5, 2.0)

#: Ranks of expert parallelism.
RANKS = (2, 4, 8, 16, 32, 64)


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["expert_counts"]
    experts, taken = facts.router.num_experts, int(counts.sum())
    slots = [expert_capacity(taken, experts, 1, factor) for factor in FACTORS]
    ranks = [number for number in RANKS if experts % number == 0 and number < experts]
    imbalance = np.array([rank_imbalance(counts, number) for number in ranks])
    return {
        "capacity": {
            "capacity_factor": np.array(FACTORS),
            "capacity": np.array(slots),
            "dropped_slot_share": np.array([dropped_slot_share(counts, c) for c in slots]),
        },
        "ranks": {
            "num_ranks": np.array(ranks, dtype=np.int64),
            "rank_imbalance": imbalance,
            "balancedness": 1.0 / imbalance,
        },
    }


METRIC = Metric(
    name="capacity",
    version=1,
    text="Slots over the capacity of their expert, and loads of ranks of experts.",
    scope="router",
    needs=("expert_counts",),
    columns={
        "capacity": (
            Column("capacity_factor", "capacity over the fair share"),
            Column("capacity", "tokens that an expert may take", "tokens", "int"),
            Column(
                "dropped_slot_share",
                "share of slots beyond the capacity of their expert",
                formula="dropped_slot_share",
                has_se=True,
            ),
        ),
        "ranks": (
            Column("num_ranks", "equal groups of consecutive experts", "ranks", "int"),
            Column(
                "rank_imbalance",
                "largest load of a rank over the mean",
                formula="rank_imbalance",
                has_se=True,
            ),
            Column("balancedness", "mean over largest load of a rank", formula="rank_imbalance"),
        ),
    },
    finish=_finish,
    invariances=("token_permutation",),
)
