"""Entropy of each token's scores: how undecided the router is, token by token.

The scores of a token over their sum are a distribution p over the experts: for softmax the scores
themselves, for sigmoid and other scores that do not add up to one the scores divided by their sum,
which ``entropy_of`` states. The metric is the mean over tokens of -sum p log p; over all experts,
and over the chosen ones alone with their scores divided by their sum.

Near 0 the router is sure of one expert; near log E it tells nothing apart. A selection bias is not
part of the scores. It is not the entropy of the load (``load_entropy_nats``): a router may be sure
of every token and use all experts alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.kernels.reductions._counters import means

#: What the entropy is of, by score.
ENTROPY_OF = {
    "softmax": "softmax scores",
    "identity": "softmax of the logits",
    "sigmoid": "sigmoid scores over their sum",
    "sqrt_softplus": "sqrt-softplus scores over their sum",
}


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    entropy, inside, mass = means(reductions["routing_entropy"])
    return {
        "layers": {
            "entropy_of": ENTROPY_OF[facts.router.rule.score],
            "routing_entropy_normalised": _over(entropy, facts.router.num_experts),
            "chosen_entropy_nats": inside,
            "chosen_score_share": mass,
        }
    }


def _over(entropy: float | None, number: int) -> float | None:
    return None if entropy is None or number < 2 else entropy / math.log(number)


METRIC = Metric(
    name="routing_entropy",
    version=1,
    text="Mean entropy of the scores of a token, over all experts and over the chosen ones.",
    scope="router",
    needs=("routing_entropy",),
    columns={
        "layers": (
            Column("entropy_of", "which distribution the entropy is of", "", "str"),
            Column(
                "routing_entropy_normalised",
                "mean entropy of a token's scores over all experts, over log E",
                formula="routing_entropy",
                has_se=True,
            ),
            Column(
                "chosen_entropy_nats",
                "mean entropy of the scores of the chosen experts over their sum",
                "nats",
                formula="routing_entropy",
                has_se=True,
            ),
            Column(
                "chosen_score_share",
                "mean share of the scores that the chosen experts hold",
                formula="chosen_score_share",
                has_se=True,
            ),
        )
    },
    finish=_finish,
    invariances=("token_permutation", "expert_relabelling"),
)
