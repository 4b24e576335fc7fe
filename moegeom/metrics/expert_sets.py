"""Visited expert sets: which sets of experts tokens choose, and how many remain unseen.

An expert set is the chosen set of a token. Among T tokens S distinct ones are seen, most of them
once: S grows with T, so it says little by itself. ``expert_set_coverage`` (Good-Turing) estimates
the share of further tokens whose set was already seen, ``expert_set_chao1`` is a lower estimate of
the number of sets in use, ``expert_set_entropy_nats`` the entropy of their distribution. Table
``rarefaction`` gives the expected number of distinct sets among fewer tokens: compare streams of
different length there, at equal T.

In the full input space every set has a cell (nearly every real router has more input dimensions
than experts); what is informative is which of them data visit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.metric import Column, Metric, RouterFacts, Values
from moegeom.geometry.load import chao1, expert_set_entropy_nats, good_turing_coverage, rarefied

#: Expert sets listed per router, the most frequent ones.
NUM_LISTED = 256


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    seen = reductions["expert_sets"]
    counts, rate = seen["count"], float(seen["rate"])
    router = facts.router
    # the lower hash first among equals: any order would do, but it must be the same everywhere
    top = np.argsort(-counts, kind="stable")[:NUM_LISTED]
    experts, top_k = router.num_experts, router.rule.num_chosen
    if top_k is None:
        possible = experts * math.log(2.0)
    else:
        possible = math.lgamma(experts + 1) - math.lgamma(top_k + 1)
        possible -= math.lgamma(experts - top_k + 1)
    return {
        "layers": {
            "num_expert_sets": len(counts) / rate,
            "expert_sets_possible_log10": possible / math.log(10.0),
            "expert_set_chao1": chao1(counts) / rate,
            "expert_set_sampling_rate": rate,
            **_shares(counts, rate),
        },
        "expert_sets": {
            "expert_set": _members(seen["members"][seen["row"][top]]),
            "num_tokens": counts[top],
        },
        "rarefaction": _rarefaction(counts, rate),
    }


def _shares(counts: np.ndarray, rate: float) -> dict[str, float | None]:
    is_whole = rate == 1.0
    return {
        "expert_set_coverage": good_turing_coverage(counts),
        "expert_set_entropy_nats": expert_set_entropy_nats(counts) if is_whole else None,
        "modal_expert_set_share": float(counts.max() / counts.sum())
        if len(counts) and is_whole
        else None,
    }


def _without_each(parts: Sequence[Mapping[str, Any]], facts: RouterFacts) -> Values:
    seen = [part["expert_sets"] for part in parts]
    shares = [_shares(of["count"], float(of["rate"])) for of in seen]
    return {"layers": {name: [share[name] for share in shares] for name in shares[0]}}


def _members(rows: np.ndarray) -> np.ndarray | list[list[int]]:
    """Experts of each set, without empty slots where there are some."""
    if not (rows < 0).any():
        return rows
    return [row[row >= 0].tolist() for row in rows]


def _rarefaction(counts: np.ndarray, rate: float) -> dict[str, np.ndarray]:
    """Expected distinct sets for powers of two below the number of tokens, and for that itself."""
    total = int(counts.sum())
    if not total or rate < 1.0:
        return {"num_tokens_drawn": np.empty(0, np.int64), "expected_expert_sets": np.empty(0)}
    sizes = np.unique(np.append(2 ** np.arange(0, int(math.log2(total)) + 1), total))
    return {"num_tokens_drawn": sizes, "expected_expert_sets": rarefied(counts, sizes)}


METRIC = Metric(
    name="expert_sets",
    version=1,
    text="Distinct chosen sets among the tokens, and estimates for those not met. Counted exactly "
    "up to 2^20 entries, then on a hash sample whose rate is a column.",
    scope="router",
    needs=("expert_sets",),
    columns={
        "layers": (
            Column(
                "num_expert_sets",
                "distinct chosen sets (divided by the sampling rate when below 1)",
                "expert_sets",
                formula="visited_expert_sets",
            ),
            Column(
                "expert_sets_possible_log10",
                "log10 of the number of sets of that size, of any size where sizes differ",
                "log10 expert sets",
            ),
            Column(
                "expert_set_coverage",
                "Good-Turing estimate: share of further tokens whose set was already seen",
                formula="good_turing",
                has_se=True,
            ),
            Column(
                "expert_set_chao1",
                "Chao's lower estimate of the number of sets that tokens use",
                "expert_sets",
                formula="chao1",
            ),
            Column(
                "expert_set_entropy_nats",
                "entropy of the expert set distribution, Miller-Madow; missing when sampled",
                "nats",
                formula="expert_set_entropy",
                has_se=True,
            ),
            Column(
                "modal_expert_set_share",
                "share of tokens in the most frequent set; missing when sampled",
                formula="modal_expert_set",
                has_se=True,
            ),
            Column("expert_set_sampling_rate", "share of the hash space that was kept"),
        ),
        "expert_sets": (
            Column("expert_set", "experts of the set, ascending", "experts", "list"),
            Column("num_tokens", "tokens that chose it", "tokens", "int"),
        ),
        "rarefaction": (
            Column("num_tokens_drawn", "tokens drawn without replacement", "tokens", "int"),
            Column(
                "expected_expert_sets",
                "expected number of distinct sets among them; no rows when sampled",
                "expert_sets",
                formula="rarefaction",
            ),
        ),
    },
    finish=_finish,
    without_each=_without_each,
    invariances=("token_permutation",),
)
