"""Expert sets: how many occur, of which sizes, and which experts are in one together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.metric import Column, RouterFacts, Values, count, estimate, figure, metric
from moegeom.geometry import load as loads
from moegeom.metrics.rows import COLUMNS, MOST_EXPERTS, upper_triangle

#: Expert sets listed per router, the most frequent ones.
NUM_LISTED = 256


def _without_each(parts: Sequence[Mapping[str, Any]], facts: RouterFacts) -> Values:
    seen = [part["expert_sets"] for part in parts]
    shares = [_shares(of["count"], float(of["rate"]), is_part=True) for of in seen]
    return {"layers": {name: [share[name] for share in shares] for name in shares[0]}}


@metric(
    needs=("expert_sets",),
    layers=(
        figure(
            "num_expert_sets",
            "distinct chosen sets (divided by the sampling rate when below 1)",
            "visited_expert_sets",
            "expert_sets",
        ),
        estimate(
            "expert_set_coverage",
            "Good-Turing estimate: share of further tokens whose set was already seen",
            "good_turing",
        ),
        figure(
            "expert_set_chao1",
            "Chao's lower estimate of the number of sets that tokens use",
            "chao1",
            "expert_sets",
        ),
        estimate(
            "expert_set_entropy_nats",
            "entropy of the expert set distribution, Miller-Madow; missing when sampled, and where "
            f"coverage is below {loads.LEAST_COVERAGE:g}: unseen sets would be left out",
            "expert_set_entropy",
            "nats",
        ),
        estimate(
            "expert_set_collision_nats",
            "collision entropy (Renyi, order 2) of the expert sets; missing when sampled, and "
            f"where fewer than {loads.LEAST_PAIRS} pairs of tokens share a set",
            "expert_set_collision",
            "nats",
        ),
        Column("expert_set_sampling_rate", "share of the hash space that was kept"),
    ),
    tables={
        "expert_sets": (
            Column("expert_set", "experts of the set, ascending", "experts", "list"),
            count("num_tokens", "tokens that chose it", "tokens"),
        )
    },
    without_each=_without_each,
    invariances=("token_permutation",),
)
def expert_sets(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Visited expert sets: which sets of experts tokens choose, and how many remain unseen.

    An expert set is the chosen set of a token. Among T tokens S distinct ones are seen, most of
    them once: S grows with T, so it says little by itself. ``expert_set_coverage`` (Good-Turing)
    estimates the share of further tokens whose set was already seen, ``expert_set_chao1`` is a
    lower estimate of the number of sets in use, ``expert_set_entropy_nats`` the entropy of their
    distribution, where coverage lets it be known. Where nearly every token has a set of its own,
    these say how many tokens there are, and not how many sets: read ``expert_set_collision_nats``,
    minus the logarithm of the probability that two tokens share theirs.

    In the full input space every set has a cell (nearly every real router has more input dimensions
    than experts); what is informative is which of them data visit.
    """
    seen = reductions["expert_sets"]
    counts, rate = seen["count"], float(seen["rate"])
    # the lower hash first among equals: any order would do, but it must be the same everywhere
    top = loads.largest(counts, NUM_LISTED)
    return {
        "layers": {
            "num_expert_sets": len(counts) / rate,
            "expert_set_chao1": loads.chao1(counts) / rate,
            "expert_set_sampling_rate": rate,
            **_shares(counts, rate),
        },
        "expert_sets": {
            "expert_set": _members(seen["members"][seen["row"][top]]),
            "num_tokens": counts[top],
        },
    }


def _shares(counts: np.ndarray, rate: float, is_part: bool = False) -> dict[str, float | None]:
    """Estimates within their ranges; of a part, which an error is made of, whatever its size."""
    coverage = loads.good_turing_coverage(counts)
    shannon = collision = None
    if rate == 1.0 and len(counts):
        collision = loads.collision_entropy_nats(counts, 1 if is_part else loads.LEAST_PAIRS)
        if is_part or coverage >= loads.LEAST_COVERAGE:
            shannon = loads.expert_set_entropy_nats(counts)
    return {
        "expert_set_coverage": coverage,
        "expert_set_entropy_nats": shannon,
        "expert_set_collision_nats": collision,
    }


def _members(rows: np.ndarray) -> np.ndarray | list[list[int]]:
    """Experts of each set, without empty slots where there are some."""
    if not (rows < 0).any():
        return rows
    return [row[row >= 0].tolist() for row in rows]


@metric(
    needs=("set_sizes",),
    layers=(
        estimate(
            "num_chosen_mean",
            "mean number of experts that a token chooses",
            "num_chosen",
            "experts",
        ),
        count(
            "num_chosen_p99",
            "the least number that 99 % of the tokens do not exceed",
            "experts",
            formula="num_chosen",
        ),
        estimate("no_expert_share", "share of tokens that choose no expert", "num_chosen"),
    ),
    invariances=("token_permutation", "expert_relabelling"),
)
def set_sizes(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Sizes of the chosen sets, where tokens choose different numbers of experts.

    A token may choose none at all: what only shared experts or the residual stream carry.
    """
    counts = reductions["set_sizes"]
    tokens = int(counts.sum())
    if not tokens:
        return {"layers": {}}
    below = np.cumsum(counts) >= 0.99 * tokens
    return {
        "layers": {
            "num_chosen_mean": float(counts @ np.arange(len(counts))) / tokens,
            "num_chosen_p99": int(below.argmax()),
            "no_expert_share": int(counts[0]) / tokens,
        }
    }


#: Pairs listed per router, the most frequent ones.
NUM_LISTED_PAIRS = 256


@metric(
    needs=("expert_pairs",),
    layers=(
        estimate(
            "overlap_routing",
            "mean Jaccard index of the token sets of two experts",
            "overlap_routing",
        ),
        figure(
            "overlap_routing_chance",
            "the same for sets of one size drawn evenly",
            "overlap_routing",
        ),
        estimate(
            "coactivation_max_over_chance",
            "largest frequency of a pair over that of even chance; missing for k = 1",
            "coactivation",
        ),
    ),
    tables={
        "coactivation": (
            count("expert", "lower expert number", "expert"),
            count("other_expert", "higher expert number", "expert"),
            count("num_tokens_together", "tokens that chose both", "tokens"),
            figure(
                "share_of_expert",
                "of the expert's tokens, the share with the other",
                "coactivation",
            ),
            figure(
                "share_of_other", "of the other's tokens, the share with the expert", "coactivation"
            ),
            figure("over_chance", "frequency over even chance", "coactivation"),
        )
    },
    invariances=("token_permutation", "expert_relabelling"),
)
def coactivation(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """
    Co-activation: which experts are chosen together, over all pairs, beside what chance would show.

    N_ij tokens chose both i and j. ``overlap_routing`` is the mean over pairs of the Jaccard index
    N_ij / (N_i + N_j - N_ij) of their sets of tokens: 0 when no two experts share a token. Its
    chance level for sets drawn evenly is (k - 1) / (2E - k - 1). The most frequent pairs stand in
    the table ``coactivation`` with N_ij / N_i and with their frequency over what even chance gives.

    All pairs of chosen experts count, not only neighbours in rank. Uneven loads alone raise the
    overlap of busy experts: read it beside the load and the random router.
    """
    counts = reductions["expert_pairs"]
    experts, top_k = facts.router.num_experts, facts.router.rule.num_chosen
    first, second = loads.expert_pairs(experts)
    together = counts[first, second]
    if not counts.any() or experts < 2:
        return {"layers": {}}
    layers: dict[str, float | int | None] = {
        "overlap_routing": float(loads.jaccard_mean(counts)),
        "overlap_routing_chance": None if top_k is None else loads.jaccard_chance(experts, top_k),
    }
    if top_k is None or top_k < 2:
        return {"layers": layers}
    tokens = int(np.trace(counts)) // top_k
    over_chance = loads.coactivation_over_chance(counts, tokens, top_k)[first, second]
    layers["coactivation_max_over_chance"] = float(over_chance.max())
    top = loads.largest(together, NUM_LISTED_PAIRS)
    top = top[together[top] > 0]
    i, j = first[top], second[top]
    return {
        "layers": layers,
        "coactivation": {
            "expert": i,
            "other_expert": j,
            "num_tokens_together": together[top],
            "share_of_expert": together[top] / counts[i, i],
            "share_of_other": together[top] / counts[j, j],
            "over_chance": over_chance[top],
        },
    }


@metric(
    needs=("expert_pairs",),
    tables={"matrices": COLUMNS},
    invariances=("token_permutation",),
    is_for_figures=True,
)
def coactivation_matrix(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    """Co-activation over chance for every pair of experts: what its heat map shows.

    1 where two experts are chosen together as often as even chance has it, 0 where never. Uneven
    loads alone raise the values of busy experts. The metric ``coactivation`` lists the most
    frequent pairs with their counts; here all of them stand, with three digits. Routers of more
    than 512 experts, and those that choose one expert, have none.
    """
    counts, top_k = reductions["expert_pairs"], facts.router.rule.num_chosen
    is_kept = facts.is_whole and not facts.is_random and len(counts) <= MOST_EXPERTS
    if not is_kept or top_k is None or top_k < 2 or not counts.any():
        return {}
    over = loads.coactivation_over_chance(counts, int(np.trace(counts)) // top_k, top_k)
    return {"matrices": upper_triangle("coactivation", over)}
