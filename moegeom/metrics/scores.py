"""Scores and logits: their entropy, their size, and the losses made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, RouterFacts, Values, count, estimate, metric
from moegeom.kernels.reduction import means
from moegeom.kernels.reductions import scores as reduced

#: What the entropy is of, by score.
ENTROPY_OF = {
    "softmax": "softmax scores",
    "identity": "softmax of the logits",
    "sigmoid": "sigmoid scores over their sum",
    "sqrt_softplus": "sqrt-softplus scores over their sum",
}


@metric(
    needs=("routing_entropy",),
    columns={
        "layers": (
            Column("entropy_of", "which distribution the entropy is of", "", "str"),
            estimate(
                "routing_entropy_normalised",
                "mean entropy of a token's scores over all experts, over log E",
                "routing_entropy",
            ),
            estimate(
                "chosen_entropy_nats",
                "mean entropy of the scores of the chosen experts over their sum",
                "routing_entropy",
                "nats",
            ),
            estimate(
                "chosen_score_share",
                "mean share of the scores that the chosen experts hold",
                "chosen_score_share",
            ),
        )
    },
    invariances=("token_permutation", "expert_relabelling"),
)
def routing_entropy(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Entropy of each token's scores: how undecided the router is, token by token.

    The scores of a token over their sum are a distribution p over the experts: for softmax the
    scores themselves, for sigmoid and other scores that do not add up to one the scores divided by
    their sum, which ``entropy_of`` states. The metric is the mean over tokens of -sum p log p; over
    all experts, and over the chosen ones alone with their scores divided by their sum.

    Near 0 the router is sure of one expert; near log E it tells nothing apart. A selection bias is
    not part of the scores. It is not the entropy of the load (``load_entropy_nats``): a router may
    be sure of every token and use all experts alike.
    """
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


@metric(
    needs=("log_sum_exp",),
    columns={
        "layers": (
            estimate("z_loss", "mean square of log-sum-exp of the logits", "z_loss"),
            estimate("log_sum_exp_mean", "mean of log-sum-exp", "z_loss"),
        )
    },
    invariances=("token_permutation", "expert_relabelling"),
)
def z_loss(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Router z-loss: the mean square of the log-sum-exp of the logits.

    Training adds this to the loss to keep logits small, where they are kept in few digits. Beside
    it stands the mean of log-sum-exp itself, which says which way they drifted. Adding one number
    to every logit changes no softmax choice but changes both: this is a figure of the size of the
    logits, not of the routing. Both are missing where a log-sum-exp is beyond 2^20, which no
    fixed-point sum holds.
    """
    sums = reductions["log_sum_exp"].tolist()
    tokens = sums[reduced.LSE_TOKENS]
    if not tokens or sums[reduced.LSE_BEYOND]:  # a sum without the largest ones would be no mean
        return {"layers": {"z_loss": None, "log_sum_exp_mean": None}}
    total = (
        sums[reduced.LSE_LARGE] * reduced.LARGE_UNIT
        + sums[reduced.LSE_REST] / reduced.LSE_FIXED_POINT
    )
    return {
        "layers": {
            "z_loss": total / tokens,
            "log_sum_exp_mean": sums[reduced.LSE_PLAIN] / reduced.LSE_FIXED_POINT / tokens,
        }
    }


@metric(
    needs=("expert_counts", "score_sums"),
    columns={
        "layers": (
            estimate(
                "load_balancing_loss_megatron",
                "E sum f P with f over slots; 1 at balance",
                "load_balancing_loss",
            ),
        ),
        "experts": (
            count("expert", "expert number", "expert"),
            estimate(
                "score_share",
                "mean of the expert's score over the sum of the token's scores",
                "score_share",
            ),
        ),
    },
    invariances=("token_permutation", "expert_relabelling"),
)
def load_balancing_loss(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """The loss that training balances with, in both conventions, as these tokens show it.

    With f_e the share of slots that expert e takes and P_e the mean of its score over the sum of
    the token's scores, the loss is E sum_e f_e P_e. Megatron-Core counts f over the kT slots (1 at
    balance); Hugging Face counts it over the T tokens (k at balance) and, in its models, over the
    concatenation of all layers, which a figure of one layer cannot be: ``load_balancing_loss_hf``
    is that of the layer alone.

    At 1 (or k) the loss is balanced or blind: it is also 1 when scores are equal and loads are not.
    Read it beside the load.
    """
    counts = reductions["expert_counts"].astype(np.float64)
    scores = reductions["score_sums"] / reduced.FIXED_POINT
    experts = facts.router.num_experts
    if not counts.any():
        nothing = {"load_balancing_loss_megatron": None}
        unknown = np.full(experts, np.nan)
        return {"layers": nothing, "experts": _experts(unknown, experts)}
    mean_score = scores / scores.sum()
    loss = float(experts * (counts / counts.sum() * mean_score).sum())
    return {
        "layers": {"load_balancing_loss_megatron": loss},
        "experts": _experts(mean_score, experts),
    }


def _experts(mean_score: np.ndarray, experts: int) -> dict[str, np.ndarray]:
    return {"expert": np.arange(experts), "score_share": mean_score}


@metric(
    needs=("mask_fill",),
    columns={
        "layers": (
            estimate(
                "fill_decides_share",
                "share of tokens whose chosen set depends on the fill of the group mask",
                "mask_fill",
            ),
        )
    },
    invariances=("token_permutation", "expert_relabelling"),
)
def mask_fill(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Tokens at which it matters what a group-limited rule writes over masked experts.

    Engines fill the scores of dropped groups with 0.0 or with -inf. A kept expert whose biased
    score is negative loses against every masked one at 0.0, so an expert of a dropped group is
    chosen; with -inf it never is. The share of tokens at which the two fills choose different sets:
    above 0, two engines that differ in this alone route differently.
    """
    if facts.router.rule.groups is None:
        return {"layers": {}}
    (share,) = means(reductions["mask_fill"])
    return {"layers": {"fill_decides_share": share}}
