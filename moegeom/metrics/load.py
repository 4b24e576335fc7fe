"""Load: how evenly the experts are used over the whole set of tokens.

c_e tokens choose expert e, m = kT / E is the fair share. All figures here are functions of c / m
over all tokens ("global"): the same words mean other things in other tools, so the reduction stands
in the name (``load_cv_ddof0``, ``max_vio_global``; per batch see ``load_tiles``).

Even perfectly even routing shows a CV and a MaxVio on finitely many tokens: the floors beside them
hold for independent tokens, and tokens of one document are not, so a balanced router shows two to
three times as much. ``load_cv_squared_debiased`` compares different blocks of documents instead and
has no such excess: 0 within its error means that no imbalance was seen. Compare at equal T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry import load


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["expert_counts"]
    blocks = reductions["expert_counts_by_block"]
    entropy = float(load.load_entropy_nats(counts))
    experts, top_k = facts.router.num_experts, facts.router.rule.num_chosen
    sizes = None if top_k is None else (facts.num_tokens, experts, top_k)
    return {
        "layers": {
            "load_cv_ddof0": float(load.load_cv(counts)),
            "load_cv_floor": sizes and load.load_cv_floor(*sizes),
            "load_cv_squared_debiased": load.load_cv_squared_debiased(blocks),
            "max_vio_global": float(load.max_vio(counts)),
            "max_vio_floor": sizes and load.max_vio_floor(*sizes),
            "min_vio_global": float(load.min_vio(counts)),
            "avg_vio_global": float(load.avg_vio(counts)),
            "jain": float(load.jain(counts)),
            "gini": float(load.gini(counts)),
            "load_entropy_normalised": entropy / np.log(experts) if experts > 1 else None,
            "effective_experts": float(np.exp(entropy)),
            "num_dead": int((counts == 0).sum()) if counts.any() else None,
            "dead_share": float(load.dead_share(counts)),
            "underused_share": float(load.underused_share(counts)),
            "busiest_expert": int(counts.argmax()) if counts.any() else None,
        },
        "experts": {
            "expert": np.arange(experts),
            "num_slots": counts,
            "load": load.load_share(counts),
        },
    }


def _without_each(parts: Sequence[Mapping[str, Any]], facts: RouterFacts) -> Values:
    counts = np.stack([part["expert_counts"] for part in parts])
    entropy, experts = load.load_entropy_nats(counts), facts.router.num_experts
    debiased = [load.load_cv_squared_debiased(part["expert_counts_by_block"]) for part in parts]
    return {
        "layers": {
            "load_cv_ddof0": load.load_cv(counts),
            "load_cv_squared_debiased": debiased,
            "max_vio_global": load.max_vio(counts),
            "min_vio_global": load.min_vio(counts),
            "avg_vio_global": load.avg_vio(counts),
            "jain": load.jain(counts),
            "gini": load.gini(counts),
            "load_entropy_normalised": entropy / np.log(experts) if experts > 1 else (),
            "effective_experts": np.exp(entropy),
        },
        "experts": {"load": load.load_share(counts)},
    }


METRIC = Metric(
    name="load",
    version=1,
    text="Load of each expert, and how uneven it is over the whole set of tokens.",
    scope="router",
    needs=("expert_counts", "expert_counts_by_block"),
    columns={
        "layers": (
            Column(
                "load_cv_ddof0",
                "standard deviation over mean of the load (ddof 0)",
                formula="load_cv",
                has_se=True,
            ),
            Column(
                "load_cv_floor",
                "CV that even random routing shows on as many independent tokens; missing where "
                "tokens choose different numbers of experts",
                formula="load_cv_floor",
            ),
            Column(
                "load_cv_squared_debiased",
                "squared CV of the expected load, without the noise of finitely many documents",
                formula="load_cv_squared_debiased",
                has_se=True,
            ),
            Column(
                "max_vio_global",
                "largest load over the fair share, minus 1",
                formula="max_vio",
                has_se=True,
            ),
            Column(
                "max_vio_floor",
                "MaxVio that even random routing shows on as many independent tokens; missing "
                "where tokens choose different numbers of experts",
                formula="max_vio_floor",
            ),
            Column(
                "avg_vio_global",
                "mean distance of a load from the fair share, in fair shares",
                formula="avg_vio",
                has_se=True,
            ),
            Column("jain", "Jain's fairness index of the load", formula="jain", has_se=True),
            Column(
                "min_vio_global",
                "smallest load over the fair share, minus 1",
                formula="min_vio",
                has_se=True,
            ),
            Column("gini", "Gini coefficient of the load", formula="gini", has_se=True),
            Column(
                "load_entropy_normalised",
                "entropy of the share of slots per expert over log E",
                formula="load_entropy",
                has_se=True,
            ),
            Column(
                "effective_experts",
                "exponential of the load entropy",
                "experts",
                formula="load_entropy",
                has_se=True,
            ),
            Column("num_dead", "experts that no token chose", "experts", "int"),
            Column("dead_share", "share of experts that no token chose", formula="dead_share"),
            Column(
                "underused_share",
                "share of experts below a tenth of the fair load, dead ones included",
                formula="underused_share",
            ),
            Column("busiest_expert", "expert with the largest load", "expert", "int"),
        ),
        "experts": (
            Column("expert", "expert number", "expert", "int"),
            Column("num_slots", "times the expert was chosen", "slots", "int"),
            Column("load", "num_slots over the fair share", formula="load", has_se=True),
        ),
    },
    finish=_finish,
    without_each=_without_each,
    invariances=("token_permutation", "expert_relabelling"),
)
