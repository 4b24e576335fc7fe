"""Tokens: how many, what they and their neighbours choose, the scores, and the domains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, RouterFacts, Values, count, estimate, figure, metric
from moegeom.geometry.load import load_entropy_nats
from moegeom.kernels.reduction import means
from moegeom.kernels.reductions import choices as reduced
from moegeom.kernels.reductions import histograms as of_scores
from moegeom.metrics import stacked


@metric(
    needs=("token_counts",),
    layers=(
        count("num_tokens", "finite tokens that were routed", "tokens"),
        count("num_blocks", "blocks of documents behind standard errors", "blocks"),
    ),
    invariances=("token_permutation", "expert_relabelling"),
)
def tokens(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """How many tokens were measured.

    Tokens that are not finite or were left out (``--exclude-first``) are not among them.
    ``num_blocks`` are the blocks of documents behind every standard error of the row.
    """
    counts = reductions["token_counts"]
    return {"layers": {"num_tokens": int(counts[reduced.TOKENS]), "num_blocks": facts.num_blocks}}


@metric(
    needs=("agreement",),
    layers=(
        count("num_reproduced", "recorded chosen sets that are reproduced", "tokens"),
        count(
            "num_near_tie",
            "not reproduced, but within the float bound of a tie",
            "tokens",
            formula="float_bound",
        ),
        count("num_not_reproduced", "not reproduced beyond that bound", "tokens"),
    ),
    invariances=("token_permutation", "expert_relabelling"),
)
def agreement(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Agreement of the recomputed choice with the recorded one.

    For each token with a recorded choice: does the rule, applied to the recorded input with these
    weights, choose the same set? ``num_near_tie`` counts differences within the float bound of a
    tie, which two correct engines may show; ``num_not_reproduced`` those beyond it: another layer,
    another rule, another checkpoint, or an engine of lower precision. Sets are compared, not their
    order.
    """
    counts = reductions["agreement"]
    if not counts.any():
        return {"layers": {}}
    return {
        "layers": {
            "num_reproduced": int(counts[reduced.EQUAL]),
            "num_near_tie": int(counts[reduced.NEAR_TIE]),
            "num_not_reproduced": int(counts[reduced.BEYOND]),
        }
    }


#: Documents that are kept.
MOST_DOCUMENTS = 4


@metric(
    needs=("beginnings",),
    tables={
        "positions": (
            count("document_number", "document, in their order in the stream", ""),
            count("position", "position of the token in its document", "tokens"),
            count("expert", "an expert that the token chose", "expert"),
            Column("weight", "its routing weight"),
        )
    },
    is_for_figures=True,
)
def positions(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """What the first tokens of some documents choose, position by position.

    The first documents of the stream, at most four, numbered in their order, and of each the first
    256 tokens: which experts, with which routing weights. No token ids, no text.
    """
    beginnings = reductions["beginnings"]
    if facts.is_random or not facts.is_whole or not len(beginnings["document"]):
        return {}
    numbers = np.unique(beginnings["document"])[:MOST_DOCUMENTS]
    row = np.flatnonzero(np.isin(beginnings["document"], numbers))
    row = row[np.lexsort((beginnings["position"][row], beginnings["document"][row]))]
    slots = beginnings["chosen"].shape[1]
    return {
        "positions": {
            "document_number": np.repeat(
                np.searchsorted(numbers, beginnings["document"][row]), slots
            ),
            "position": np.repeat(beginnings["position"][row], slots),
            "expert": beginnings["chosen"][row].ravel(),
            "weight": beginnings["weights"][row].ravel(),
        }
    }


@metric(
    needs=("top1",),
    layers=(
        estimate(
            "first_choice_repeat",
            "share of neighbouring tokens with equal first choice",
            "first_choice_repeat",
        ),
        estimate(
            "first_choice_repeat_chance",
            "the same for two independent tokens",
            "first_choice_repeat",
        ),
        estimate(
            "first_choice_entropy_normalised",
            "entropy of the shares of first choices over log E",
            "load_entropy",
        ),
    ),
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
            count("num_first", "tokens whose first choice it is", "tokens"),
        )
    },
    without_each=stacked("top1"),
    invariances=("expert_relabelling",),
)
def top1(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """First choices: the expert with the highest selection score of each token.

    ``first_choice_repeat`` is the share of neighbours of a document with equal first choice,
    P(top-1 of t = top-1 of t + 1); two independent tokens agree with probability sum_e p_e^2, p the
    shares of first choices. ``first_choice_entropy_normalised`` is the entropy of those shares over
    log E.

    A router can be balanced over its k slots and lean on few experts first, who then get most of
    the routing weight.
    """
    pairs, repeated = np.moveaxis(reductions["top1"][..., :2], -1, 0)
    top1, experts = reductions["top1"][..., 2:], facts.router.num_experts
    table = {"expert": np.arange(experts), "num_first": top1}
    if not top1.any():
        return {"layers": {}, "experts": table}
    total, entropy = top1.sum(axis=-1, keepdims=True), load_entropy_nats(top1)
    chance = ((top1 / np.where(total, total, np.nan)) ** 2).sum(axis=-1)
    return {
        "layers": {
            "first_choice_repeat": repeated / np.where(pairs, pairs, np.nan),
            "first_choice_repeat_chance": chance,
            "first_choice_entropy_normalised": entropy / math.log(experts) if experts > 1 else None,
        },
        "experts": table,
    }


@metric(
    needs=("neighbours", "expert_counts"),
    layers=(
        count("num_neighbours", "pairs of neighbouring tokens", "pairs"),
        estimate(
            "neighbour_overlap",
            "mean share of the chosen experts that the next token chooses too",
            "neighbour_overlap",
        ),
        estimate(
            "neighbour_overlap_chance",
            "the same for two independent tokens of these loads",
            "neighbour_overlap",
        ),
        estimate(
            "neighbour_same_set", "share of neighbours with equal chosen sets", "neighbour_overlap"
        ),
    ),
    invariances=("expert_relabelling",),
)
def neighbours(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """
    Sequential routing consistency: how much a token's choice repeats that of the token before it.

    ``neighbour_overlap`` is the mean share |S_t and S_t+1| / k of experts that two neighbours of a
    document have in common; two independent tokens of these loads would share sum_e (n_e / T)^2 /
    k. ``neighbour_repeat`` is the share of neighbours with equal first choice, by chance sum_e
    p_e^2 over the shares p of first choices. The difference is what order in the text adds; caches
    of experts live on it.
    """
    of_pairs = reductions["neighbours"].tolist()
    counts = reductions["expert_counts"].astype(np.float64)
    pairs, top_k = of_pairs[reduced.PAIRS], facts.router.rule.num_chosen
    if not pairs:
        return {"layers": {}}
    chance = float(((counts / max(counts.sum(), 1.0)) ** 2).sum())
    return {
        "layers": {
            "num_neighbours": pairs,
            "neighbour_overlap": top_k and of_pairs[reduced.SHARED] / (pairs * top_k),
            "neighbour_overlap_chance": top_k and top_k * chance,
            "neighbour_same_set": of_pairs[reduced.SAME_SET] / pairs,
        }
    }


# ------------------------------------------------------------------------------------------- scores

#: What the entropy is of, by score.
ENTROPY_OF = {
    "softmax": "softmax scores",
    "identity": "softmax of the logits",
    "sigmoid": "sigmoid scores over their sum",
    "sqrt_softplus": "sqrt-softplus scores over their sum",
}


@metric(
    needs=("routing_entropy",),
    layers=(
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
    ),
    invariances=("token_permutation", "expert_relabelling"),
)
def routing_entropy(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Entropy of each token's scores: how undecided the router is, token by token.

    The scores of a token over their sum are a distribution p over the experts: for softmax the
    scores themselves, for sigmoid and other scores that do not add up to one the scores divided by
    their sum, which ``entropy_of`` states. The metric is the mean over tokens of -sum p log p; over
    all experts, and over the chosen ones alone with their scores divided by their sum.

    Near 0 the router is sure of one expert; near log E it tells nothing apart. A selection bias is
    not part of the scores. It is not the entropy of the load (``load_entropy_normalised``): a
    router may be sure of every token and use all experts alike.
    """
    entropy, inside, mass = means(reductions["routing_entropy"])
    log = math.log(facts.router.num_experts)
    return {
        "layers": {
            "entropy_of": ENTROPY_OF[facts.router.rule.score],
            "routing_entropy_normalised": entropy / log if log and entropy is not None else None,
            "chosen_entropy_nats": inside,
            "chosen_score_share": mass,
        }
    }


@metric(
    needs=("log_sum_exp",),
    layers=(
        estimate("z_loss", "mean square of log-sum-exp of the logits", "z_loss"),
        estimate("log_sum_exp_mean", "mean of log-sum-exp", "z_loss"),
    ),
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
    tokens = sums[of_scores.LSE_TOKENS]
    if not tokens or sums[of_scores.LSE_BEYOND]:  # a sum without the largest ones would be no mean
        return {"layers": {"z_loss": None, "log_sum_exp_mean": None}}
    total = sums[of_scores.LSE_LARGE] * of_scores.LARGE_UNIT
    total += sums[of_scores.LSE_REST] / of_scores.LSE_FIXED_POINT
    return {
        "layers": {
            "z_loss": total / tokens,
            "log_sum_exp_mean": sums[of_scores.LSE_PLAIN] / of_scores.LSE_FIXED_POINT / tokens,
        }
    }


@metric(
    needs=("expert_counts", "score_sums"),
    layers=(
        estimate(
            "load_balancing_loss_megatron",
            "E sum f P with f over slots; 1 at balance",
            "load_balancing_loss",
        ),
    ),
    tables={
        "experts": (
            count("expert", "expert number", "expert"),
            estimate(
                "score_share",
                "mean of the expert's score over the sum of the token's scores",
                "score_share",
            ),
        )
    },
    invariances=("token_permutation", "expert_relabelling"),
)
def load_balancing_loss(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """The loss that training balances with, as these tokens show it.

    With f_e the share of slots that expert e takes and P_e the mean of its score over the sum of
    the token's scores, the loss is E sum_e f_e P_e. Megatron-Core counts f over the kT slots (1 at
    balance); Hugging Face counts it over the T tokens, which makes it k times as large, and in its
    models over the concatenation of all layers, which a figure of one layer cannot be.

    At 1 the loss is balanced or blind: it is also 1 when scores are equal and loads are not.
    Read it beside the load.
    """
    counts = reductions["expert_counts"].astype(np.float64)
    scores = reductions["score_sums"] / of_scores.FIXED_POINT
    experts, is_used = facts.router.num_experts, counts.any()
    mean_score = scores / scores.sum() if is_used else np.full(experts, np.nan)
    loss = float(experts * (counts / counts.sum() * mean_score).sum()) if is_used else None
    return {
        "layers": {"load_balancing_loss_megatron": loss},
        "experts": {"expert": np.arange(experts), "score_share": mean_score},
    }


@metric(
    needs=("mask_fill",),
    layers=(
        estimate(
            "fill_decides_share",
            "share of tokens whose chosen set depends on the fill of the group mask",
            "mask_fill",
        ),
    ),
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


@metric(
    needs=("weight_sum",),
    layers=(
        estimate(
            "guarded_weight_share",
            "share of the routing weight that the guard of their sum takes",
            "weight_sum",
        ),
    ),
    invariances=("token_permutation", "expert_relabelling"),
)
def weight_sum(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """What is missing from a sum of routing weights that should be 1.

    Rules that divide the weights by their sum guard it against 0: s_i / (sum s + epsilon), or the
    larger of the sum and a floor. Where all scores are as small as the guard (sigmoids of logits
    below -14 beside an epsilon of 1e-6) the weights add up to nearly nothing and the routed experts
    are all but switched off. 1 less the mean sum, factors of the rule and of experts aside; a sum
    of 0 counts as 0. Missing for rules whose sum cannot be that small.
    """
    (total,) = means(reductions["weight_sum"])
    return {"layers": {"guarded_weight_share": None if total is None else 1.0 - total}}


# ----------------------------------------------------------------------------------- specialisation


@metric(
    needs=("expert_counts_by_domain",),
    layers=(
        estimate(
            "domain_information_nats",
            "mutual information of domain and chosen expert; missing below two domains",
            "domain_information",
            "nats",
        ),
        figure(
            "domain_information_floor_nats",
            "what unrelated domains show on as many independent tokens",
            "domain_information",
            "nats",
        ),
        estimate(
            "domain_information_share",
            "the information over the entropy of the chosen expert",
            "domain_information",
        ),
    ),
    invariances=("token_permutation", "expert_relabelling"),
)
def domain_specialisation(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Domain specialisation: how much the domain of a token tells about the experts it chooses.

    ``domain_information_nats`` is the mutual information of the domain and the expert of a slot, I
    = sum p(d, e) log(p(d, e) / (p(d) p(e))), plug-in; ``domain_information_floor_nats`` is what
    slots without any relation show on as many independent tokens, (D - 1)(E - 1) / (2 k T) to first
    order. ``domain_information_share`` divides by the entropy of the expert of a slot: 0 for
    experts that serve all domains alike, 1 when the domain decides. Dependent tokens show more than
    the floor; the standard error, by documents, is the better judge.

    How much more an expert is used in one domain is the column ``load`` of table ``experts`` in the
    rows of that domain: N_(e, domain) / N_domain over k / E.
    """
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
