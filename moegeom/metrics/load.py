"""Load: how evenly the experts are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry import load


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["expert_counts"]
    entropy = float(load.load_entropy_nats(counts))
    experts = facts.router.num_experts
    return {
        "layers": {
            "load_cv_ddof0": float(load.load_cv(counts)),
            "load_cv_ddof1": float(load.load_cv(counts, ddof=1)) if experts > 1 else None,
            "load_cv_floor": load.load_cv_floor(facts.num_tokens, experts, facts.router.rule.top_k),
            "max_vio_global": float(load.max_vio(counts)),
            "min_vio_global": float(load.min_vio(counts)),
            "gini": float(load.gini(counts)),
            "load_entropy_nats": entropy,
            "load_entropy_normalised": entropy / np.log(experts) if experts > 1 else None,
            "effective_experts": float(np.exp(entropy)),
            "num_dead": int((counts == 0).sum()) if counts.any() else None,
            "dead_share": float(load.dead_share(counts)),
            "starved_share": float(load.starved_share(counts)),
            "busiest_expert": int(counts.argmax()) if counts.any() else None,
        },
        "experts": {
            "expert": np.arange(experts),
            "num_slots": counts,
            "load": load.load_share(counts),
        },
    }


METRIC = Metric(
    name="load",
    version=1,
    text="Load of each expert, and how uneven it is over the whole set of tokens.",
    scope="router",
    needs=("expert_counts",),
    columns={
        "layers": (
            Column(
                "load_cv_ddof0",
                "standard deviation over mean of the load (ddof 0)",
                formula="load_cv",
                has_se=True,
            ),
            Column(
                "load_cv_ddof1",
                "standard deviation over mean of the load (ddof 1)",
                formula="load_cv",
                has_se=True,
            ),
            Column(
                "load_cv_floor",
                "CV that even random routing shows on as many independent tokens",
                formula="load_cv_floor",
            ),
            Column(
                "max_vio_global",
                "largest load over the fair share, minus 1",
                formula="max_vio",
                has_se=True,
            ),
            Column(
                "min_vio_global",
                "smallest load over the fair share, minus 1",
                formula="min_vio",
                has_se=True,
            ),
            Column("gini", "Gini coefficient of the load", formula="gini", has_se=True),
            Column(
                "load_entropy_nats",
                "entropy of the share of slots per expert",
                "nats",
                formula="load_entropy",
                has_se=True,
            ),
            Column(
                "load_entropy_normalised",
                "the same divided by log E",
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
                "starved_share",
                "share of experts below a tenth of the fair load, dead ones included",
                formula="starved_share",
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
    invariances=("token_permutation", "expert_relabelling"),
)
