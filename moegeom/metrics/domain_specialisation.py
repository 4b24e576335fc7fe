"""Domain specialisation: how much the domain of a token tells about the experts it chooses.

``domain_information_nats`` is the mutual information of the domain and the expert of a slot,
I = sum p(d, e) log(p(d, e) / (p(d) p(e))), plug-in; ``domain_information_floor_nats`` is what slots
without any relation show on as many independent tokens, (D - 1)(E - 1) / (2 k T) to first order.
``domain_information_share`` divides by the entropy of the expert of a slot: 0 for experts that
serve all domains alike, 1 when the domain decides. Dependent tokens show more than the floor; the
standard error, by documents, is the better judge.

How much more an expert is used in one domain is the column ``load`` of table ``experts`` in the
rows of that domain: N_(e, domain) / N_domain over k / E.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    counts = reductions["expert_counts_by_domain"].astype(np.float64)
    counts = counts[counts.sum(axis=1) > 0]
    if len(counts) < 2:
        return {"layers": {}}
    joint = counts / counts.sum()
    domain, expert = joint.sum(axis=1, keepdims=True), joint.sum(axis=0, keepdims=True)
    seen = joint > 0
    information = float((joint[seen] * np.log(joint[seen] / (domain * expert)[seen])).sum())
    of_expert = expert[expert > 0]
    entropy = float(-(of_expert * np.log(of_expert)).sum())
    experts = int((expert > 0).sum())
    return {
        "layers": {
            "domain_information_nats": information,
            "domain_information_floor_nats": (len(counts) - 1)
            * (experts - 1)
            / (2.0 * counts.sum()),
            "domain_information_share": information / entropy if entropy > 0 else None,
        }
    }


METRIC = Metric(
    name="domain_specialisation",
    version=1,
    text="Mutual information of the domain of a token and the experts it chooses.",
    scope="router",
    needs=("expert_counts_by_domain",),
    columns={
        "layers": (
            Column(
                "domain_information_nats",
                "mutual information of domain and chosen expert; missing below two domains",
                "nats",
                formula="domain_information",
                has_se=True,
            ),
            Column(
                "domain_information_floor_nats",
                "what unrelated domains show on as many independent tokens",
                "nats",
                formula="domain_information",
            ),
            Column(
                "domain_information_share",
                "the information over the entropy of the chosen expert",
                formula="domain_information",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
