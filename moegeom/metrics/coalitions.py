"""Visited coalitions: which sets of experts tokens choose, and how many remain unseen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.coalition import chao1, coalition_entropy_nats, good_turing_coverage

#: Coalitions listed per router, the most frequent ones.
NUM_LISTED = 256


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    seen = reductions["coalitions"]
    counts, rate = seen["count"], float(seen["rate"])
    router = facts.router
    # the lower hash first among equals: any order would do, but it must be the same everywhere
    top = np.argsort(-counts, kind="stable")[:NUM_LISTED]
    possible = math.lgamma(router.num_experts + 1) - math.lgamma(router.rule.top_k + 1)
    possible -= math.lgamma(router.num_experts - router.rule.top_k + 1)
    return {
        "layers": {
            "num_coalitions": len(counts) / rate,
            "coalitions_possible_log10": possible / math.log(10.0),
            "coalition_coverage": good_turing_coverage(counts),
            "coalition_chao1": chao1(counts) / rate,
            "coalition_entropy_nats": coalition_entropy_nats(counts) if rate == 1.0 else None,
            "modal_coalition_share": float(counts.max() / counts.sum())
            if len(counts) and rate == 1.0
            else None,
            "coalition_sampling_rate": rate,
        },
        "coalitions": {"coalition": seen["members"][seen["row"][top]], "num_tokens": counts[top]},
    }


METRIC = Metric(
    name="coalitions",
    version=1,
    text="Distinct chosen sets among the tokens, and estimates for those not met. Counted exactly "
    "up to 2^20 entries, then on a hash sample whose rate is a column.",
    scope="router",
    needs=("coalitions",),
    columns={
        "layers": (
            Column(
                "num_coalitions",
                "distinct chosen sets (divided by the sampling rate when below 1)",
                "coalitions",
                formula="visited_coalitions",
            ),
            Column(
                "coalitions_possible_log10",
                "log10 of the number of sets of that size",
                "log10 coalitions",
            ),
            Column(
                "coalition_coverage",
                "Good-Turing estimate: share of further tokens whose set was already seen",
                formula="good_turing",
                has_se=True,
            ),
            Column(
                "coalition_chao1",
                "Chao's lower estimate of the number of sets that tokens use",
                "coalitions",
                formula="chao1",
            ),
            Column(
                "coalition_entropy_nats",
                "entropy of the coalition distribution, Miller-Madow; null when sampled",
                "nats",
                formula="coalition_entropy",
                has_se=True,
            ),
            Column(
                "modal_coalition_share",
                "share of tokens in the most frequent set; null when sampled",
                formula="modal_coalition",
                has_se=True,
            ),
            Column("coalition_sampling_rate", "share of the hash space that was kept"),
        ),
        "coalitions": (
            Column("coalition", "experts of the set, ascending", "experts", "list"),
            Column("num_tokens", "tokens that chose it", "tokens", "int"),
        ),
    },
    finish=_finish,
    invariances=("token_permutation",),
)
