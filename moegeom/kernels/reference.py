"""Reference kernels: NumPy in float64, calling ``geometry``; slow, and right by inspection."""

from __future__ import annotations

from typing import Final

import numpy as np

from moegeom.core.router import GroupMask, Rule
from moegeom.core.shapes import Bool, Float, Float64, Int32, Int64
from moegeom.geometry import keys, rounding
from moegeom.geometry import selection as steps
from moegeom.geometry.boundary import linear
from moegeom.geometry.histogram import bin_index
from moegeom.geometry.load import entropy_nats, log_sum_exp, normalised_scores
from moegeom.geometry.selection import SCORES


# ------------------------------------------------------------------------------------------- choice
def input_norm(values: Float[np.ndarray, "tokens hidden"]) -> Float64[np.ndarray, "tokens"]:
    """|y| of each token; nan or inf exactly when a coordinate is not finite."""
    with np.errstate(invalid="ignore"):
        return np.sqrt((values.astype(np.float64) ** 2).sum(axis=1))


def selection_scores(
    logits: Float[np.ndarray, "tokens experts"], score: str, bias: Float64[np.ndarray, "experts"]
) -> Float64[np.ndarray, "tokens experts"]:
    """``score(logit) + bias`` in float64."""
    return SCORES[score](logits) + bias


def group_mask(
    selection: Float64[np.ndarray, "tokens experts"], groups: GroupMask
) -> tuple[Float64[np.ndarray, "tokens experts"], Float64[np.ndarray, "tokens"]]:
    """Masked selection scores and the group margin."""
    return steps.group_mask(selection, groups), steps.group_margin(selection, groups)


def top_k(
    selection: Float[np.ndarray, "tokens experts"], k: int
) -> tuple[Int32[np.ndarray, "tokens k"], Float64[np.ndarray, "tokens"]]:
    """The k largest in descending order, ties to the lowest index, and the margin."""
    return steps.top_k(selection, k), steps.margin(selection, k)


def routing_weights(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rule: Rule,
    shared_sum: Float64[np.ndarray, "tokens"] | None = None,
) -> Float64[np.ndarray, "tokens k"]:
    """Weights in the order of ``chosen``. Logits are those behind the logit map."""
    scores = SCORES[rule.score](logits)
    return steps.routing_weights(logits, scores, chosen, rule.weights, shared_sum)


def score_statistics(
    logits: Float[np.ndarray, "tokens experts"], score: str
) -> tuple[
    Float[np.ndarray, "tokens experts"],
    Float64[np.ndarray, "tokens"],
    Float64[np.ndarray, "tokens"],
]:
    """Probabilities (of the dtype of the logits), entropy in nats and log-sum-exp of each token."""
    probability = normalised_scores(logits, score)
    return probability.astype(logits.dtype), entropy_nats(probability), log_sum_exp(logits)


# ---------------------------------------------------------------------------------------- distances
def boundary_distance(
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
    rows: linear.RowDistances,
    wants_pair: bool = True,
) -> tuple[Float64[np.ndarray, "tokens"], Int32[np.ndarray, "tokens 2"] | None]:
    """Distance and, if wanted, the pair of experts of the nearest boundary.

    ``margin`` is that of ``chosen``; faster kernels prune with it.
    """
    boundary = linear.boundary_distance(logits, chosen, rows)
    return boundary.distance, boundary.pair if wants_pair else None


def distance_bracket(
    logits: Float[np.ndarray, "tokens m"],
    expert: Int32[np.ndarray, "tokens m"],
    chosen: Int32[np.ndarray, "tokens k"],
    margin: Float64[np.ndarray, "tokens"],
    rows: linear.RowDistances,
) -> tuple[
    Float64[np.ndarray, "tokens"], Float64[np.ndarray, "tokens"], Int32[np.ndarray, "tokens 2"]
]:
    """Least and largest distance, and the pair of experts of the nearest boundary.

    ``chosen`` are the largest of ``logits`` and ``margin`` is theirs, so that m > k or m = E;
    faster kernels prune with it.
    """
    bracket = linear.distance_bracket(logits, expert, chosen, rows)
    return bracket.lower, bracket.upper, bracket.pair


def rounding_sigmas(
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    rows: rounding.RowSpreads,
) -> Float64[np.ndarray, "tokens"]:
    """Nearest boundary in standard deviations of rounding; faster kernels prune with the bounds."""
    return rounding.rounding_sigmas(values, logits, chosen, rows.weight)


boundary_angle: Final = linear.boundary_angle


# ------------------------------------------------------------------------------------------- counts
expert_set_key: Final = keys.expert_set_key


def same_set(
    chosen: Int32[np.ndarray, "tokens k"], recorded: Int32[np.ndarray, "tokens m"]
) -> Bool[np.ndarray, "tokens"]:
    """True where both rows hold the same set of experts, in whatever order."""
    if chosen.shape[1] != recorded.shape[1]:
        return np.zeros_like(chosen[:, 0], dtype=bool)
    return (np.sort(chosen, axis=1) == np.sort(recorded, axis=1)).all(axis=1)


def num_shared(
    first: Int32[np.ndarray, "tokens k"], second: Int32[np.ndarray, "tokens m"]
) -> Int64[np.ndarray, "tokens"]:
    """Size of the intersection of each two rows, whatever their order; -1 is an empty slot."""
    equal = (first[:, :, None] == second[:, None, :]) & (first[:, :, None] >= 0)
    return equal.sum(axis=(1, 2))


def count_experts(
    counts: Int64[np.ndarray, "populations blocks experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    population: Int32[np.ndarray, "tokens"],
    block: Int32[np.ndarray, "tokens"],
) -> None:
    """Adds 1 at (population, block, expert) for each chosen slot; -1 is an empty slot."""
    token, slot = np.nonzero(chosen >= 0)
    np.add.at(counts, (population[token], block[token], chosen[token, slot]), 1)


def count_pairs(
    counts: Int64[np.ndarray, "blocks experts experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    block: Int32[np.ndarray, "tokens"],
) -> None:
    """Adds 1 at (block, i, j) for each two slots of a token with i <= j; -1 is an empty slot."""
    for token in range(len(chosen)):
        experts = np.sort(chosen[token][chosen[token] >= 0])
        first, second = np.triu_indices(len(experts))
        np.add.at(counts[block[token]], (experts[first], experts[second]), 1)


def count_bins(
    histogram: Int64[np.ndarray, "populations blocks bins"],
    values: Float64[np.ndarray, "tokens"],
    population: Int32[np.ndarray, "tokens"],
    block: Int32[np.ndarray, "tokens"],
) -> None:
    """Adds 1 at (population, block, bin of the value)."""
    np.add.at(histogram, (population, block, bin_index(values)), 1)


def add_scores(
    sums: Int64[np.ndarray, "populations blocks experts"],
    probability: Float[np.ndarray, "tokens experts"],
    population: Int32[np.ndarray, "tokens"],
    block: Int32[np.ndarray, "tokens"],
) -> None:
    """Adds each probability, rounded to a whole number of 2^-36, at (population, block, expert)."""
    fixed = np.rint(probability.astype(np.float64) * 2.0**36).astype(np.int64)
    np.add.at(sums, (population, block), fixed)
