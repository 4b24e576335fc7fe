"""Load of the experts: over all tokens, by tile and by group, and beside what they can take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, RouterFacts, Values, count, estimate, figure, metric
from moegeom.geometry import load as loads
from moegeom.geometry.load import dropped_slot_share, rank_imbalance
from moegeom.geometry.load import expert_capacity as capacity_of_expert
from moegeom.metrics import stacked


@metric(
    needs=("expert_counts", "expert_counts_by_block"),
    layers=(
        estimate("load_cv_ddof0", "standard deviation over mean of the load (ddof 0)", "load_cv"),
        figure(
            "load_cv_floor",
            "CV that even random routing shows on as many independent tokens; missing where "
            "tokens choose different numbers of experts",
            "load_cv_floor",
        ),
        estimate(
            "load_cv_squared_debiased",
            "squared CV of the expected load, without the noise of finitely many documents",
            "load_cv_squared_debiased",
        ),
        estimate("max_vio_global", "largest load over the fair share, minus 1", "max_vio"),
        figure(
            "max_vio_floor",
            "MaxVio that even random routing shows on as many independent tokens; missing "
            "where tokens choose different numbers of experts",
            "max_vio_floor",
        ),
        estimate("gini", "Gini coefficient of the load", "gini"),
        estimate(
            "load_entropy_normalised",
            "entropy of the share of slots per expert over log E",
            "load_entropy",
        ),
        estimate("effective_experts", "exponential of the load entropy", "load_entropy", "experts"),
        estimate(
            "pair_overlap",
            "share of a token's experts that another token chooses too, mean over pairs",
            "pair_overlap",
        ),
        count("num_dead", "experts that no token chose", "experts"),
        figure("dead_share", "share of experts that no token chose", "dead_share"),
        figure(
            "underused_share",
            "share of experts below a tenth of the fair load, dead ones included",
            "underused_share",
        ),
        count("busiest_expert", "expert with the largest load", "expert"),
    ),
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
            count("num_slots", "times the expert was chosen", "slots"),
            estimate("load", "num_slots over the fair share", "load"),
        )
    },
    without_each=stacked("load"),
    invariances=("token_permutation", "expert_relabelling"),
)
def load(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Load: how evenly the experts are used over the whole set of tokens.

    c_e tokens choose expert e, m = kT / E is the fair share. All figures here are functions of c /
    m over all tokens ("global"): the same words mean other things in other tools, so the reduction
    stands in the name (``load_cv_ddof0``, ``max_vio_global``).

    Even perfectly even routing shows a CV and a MaxVio on finitely many tokens: the floors beside
    them hold for independent tokens, and tokens of one document are not, so a balanced router shows
    two to three times as much. ``load_cv_squared_debiased`` compares different blocks of documents
    instead and has no such excess: 0 within its error means that no imbalance was seen. Compare at
    equal T.
    """
    counts, blocks = reductions["expert_counts"], reductions["expert_counts_by_block"]
    entropy, share, is_used = (
        loads.load_entropy_nats(counts),
        loads.load_share(counts),
        counts.any(),
    )
    experts, top_k = facts.router.num_experts, facts.router.rule.num_chosen
    sizes = None if top_k is None else (facts.num_tokens, experts, top_k)
    debiased = [*map(loads.load_cv_squared_debiased, blocks.reshape(-1, *blocks.shape[-2:]))]
    return {
        "layers": {
            "load_cv_ddof0": loads.load_cv(counts),
            "load_cv_floor": sizes and loads.load_cv_floor(*sizes),
            "load_cv_squared_debiased": np.reshape(debiased, counts.shape[:-1])[()],
            "max_vio_global": loads.max_vio(counts),
            "max_vio_floor": sizes and loads.max_vio_floor(*sizes),
            "gini": loads.gini(counts),
            "load_entropy_normalised": entropy / np.log(experts) if experts > 1 else None,
            "effective_experts": np.exp(entropy),
            "pair_overlap": top_k and loads.pair_overlap(counts, top_k),
            "num_dead": (counts == 0).sum(axis=-1) if is_used else None,
            "dead_share": loads.dead_share(counts),
            "underused_share": loads.underused_share(counts),
            "busiest_expert": counts.argmax(axis=-1) if is_used else None,
        },
        "experts": {"expert": np.arange(experts), "num_slots": counts, "load": share},
    }


#: Factors in use for training with dropped tokens.
FACTORS = (1.0, 1.25, 1.5, 2.0)

#: Ranks of expert parallelism.
RANKS = (2, 4, 8, 16, 32, 64)


@metric(
    needs=("expert_counts",),
    tables={
        "capacity": (
            Column("capacity_factor", "capacity over the fair share"),
            count("capacity", "tokens that an expert may take", "tokens"),
            estimate(
                "dropped_slot_share",
                "share of slots beyond the capacity of their expert",
                "dropped_slot_share",
            ),
        ),
        "ranks": (
            count("num_ranks", "equal groups of consecutive experts", "ranks"),
            estimate("rank_imbalance", "largest load of a rank over the mean", "rank_imbalance"),
            figure("balancedness", "mean over largest load of a rank", "rank_imbalance"),
        ),
    },
    without_each=stacked("capacity"),
    invariances=("token_permutation",),
)
def capacity(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Capacity: how many slots would be dropped, and how uneven ranks would be, at these loads.

    Table ``capacity``: with C = ceil(f k T / E) tokens allowed per expert, the share of slots over
    the limit, sum_e max(0, n_e - C) / (kT), for some capacity factors f. Table ``ranks``: when
    consecutive experts are spread over R ranks in equal groups, the largest load of a rank over the
    mean, and its inverse, the balancedness that engines report. Both treat the whole set of tokens
    as one batch: smaller batches are less even, so these are the least that a deployment will see.
    """
    counts, experts = reductions["expert_counts"], facts.router.num_experts
    taken = counts.sum(axis=-1).ravel().tolist()
    room = [[capacity_of_expert(t, experts, 1, factor) for factor in FACTORS] for t in taken]
    slots = np.reshape(room, (*counts.shape[:-1], len(FACTORS)))
    ranks = np.array([n for n in RANKS if experts % n == 0 and n < experts], dtype=np.int64)
    imbalance = np.array([rank_imbalance(counts, number) for number in ranks.tolist()]).T
    return {
        "capacity": {
            "capacity_factor": np.array(FACTORS),
            "capacity": slots,
            "dropped_slot_share": dropped_slot_share(counts[..., None, :], slots),
        },
        "ranks": {"num_ranks": ranks, "rank_imbalance": imbalance, "balancedness": 1.0 / imbalance},
    }
