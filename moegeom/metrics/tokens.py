"""Tokens: how many, whether recorded choices agree, and what their neighbours choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, RouterFacts, Values, count, estimate, metric
from moegeom.core.shapes import Float64
from moegeom.geometry.load import load_entropy_nats
from moegeom.kernels.reductions import choices as reduced


@metric(
    needs=("token_counts",),
    columns={
        "layers": (
            count("num_tokens", "finite tokens that were routed", "tokens"),
            count("num_blocks", "blocks of documents behind standard errors", "blocks"),
        )
    },
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
    columns={
        "layers": (
            count("num_reproduced", "recorded chosen sets that are reproduced", "tokens"),
            count(
                "num_near_tie",
                "not reproduced, but within the float bound of a tie",
                "tokens",
                formula="float_bound",
            ),
            count("num_not_reproduced", "not reproduced beyond that bound", "tokens"),
        )
    },
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
    columns={
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
    columns={
        "layers": (
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
        "experts": (
            count("expert", "expert number", "expert"),
            count("num_first", "tokens whose first choice it is", "tokens"),
        ),
    },
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
    pairs, repeated, *counts = reductions["top1"].tolist()
    top1 = np.array(counts, dtype=np.int64)
    experts = facts.router.num_experts
    table = {"expert": np.arange(experts), "num_first": top1}
    if not top1.any():
        return {"layers": {}, "experts": table}
    share = top1 / top1.sum()
    entropy = float(load_entropy_nats(top1))
    return {
        "layers": {
            "first_choice_repeat": repeated / pairs if pairs else None,
            "first_choice_repeat_chance": float((share**2).sum()),
            "first_choice_entropy_normalised": entropy / math.log(experts) if experts > 1 else None,
        },
        "experts": table,
    }


@metric(
    needs=("neighbours", "expert_counts"),
    columns={
        "layers": (
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
                "neighbour_same_set",
                "share of neighbours with equal chosen sets",
                "neighbour_overlap",
            ),
        )
    },
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
    return {
        "layers": {
            "num_neighbours": pairs,
            "neighbour_overlap": top_k and of_pairs[reduced.SHARED] / (pairs * top_k),
            "neighbour_overlap_chance": top_k and _chance(top_k, counts),
            "neighbour_same_set": of_pairs[reduced.SAME_SET] / pairs,
        }
    }


def _chance(top_k: int, counts: Float64[np.ndarray, "experts"]) -> float:
    share = counts / counts.sum()
    return float(top_k * (share**2).sum())
