"""Experts that go by other numbers on the other side, from what both chose for the same tokens."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, Integer


def common_choices(
    one: Integer[np.ndarray, "tokens k"], other: Integer[np.ndarray, "tokens m"], num_experts: int
) -> Int64[np.ndarray, "experts experts"]:
    r""":math:`N_{ab}`: tokens for which the one side chose expert a and the other expert b."""
    pairs = one.astype(np.int64)[:, :, None] * num_experts + other.astype(np.int64)[:, None, :]
    counts = np.bincount(pairs.ravel(), minlength=num_experts * num_experts)
    return counts.reshape(num_experts, num_experts).astype(np.int64)


def overlap_beyond_chance(
    counts: Int64[np.ndarray, "experts experts"],
    matching: Int64[np.ndarray, "experts"],
    num_tokens: int,
) -> float:
    r"""(o - c) / (k - c) for sets of k experts: o is the mean number of common ones, c that of two
    dice with the same loads; 1 for equal sets, and where no other sets were possible.

    ``counts`` as of ``common_choices``; expert a is number ``matching[a]`` of the other side.
    Cohen's kappa where k is 1. Oracle in tests: scikit-learn's.
    """
    k = float(np.sqrt(counts.sum() / num_tokens)) if num_tokens else 0.0
    if not k:
        return 1.0
    mine = counts.sum(axis=1) / (k * num_tokens)
    theirs = counts.sum(axis=0)[matching] / (k * num_tokens)
    common = float(np.trace(counts[:, matching])) / num_tokens
    chance = float(mine @ theirs)
    return (common - chance) / (k - chance) if chance < k else 1.0


def expert_matching(
    counts: Int64[np.ndarray, "experts experts"],
) -> Int64[np.ndarray, "experts"]:
    r"""For each expert of the one side its number on the other: the permutation p with most
    :math:`\sum_a N_{a p_a}`.

    Where several are as good, the one that leaves more experts where they are. Hungarian method
    (scipy). Oracle in tests: all permutations of six experts.
    """
    from scipy.optimize import linear_sum_assignment

    experts = len(counts)
    # less than one token for all experts together, so that it decides between equals only
    own = np.eye(experts) / (experts + 1)
    return linear_sum_assignment(counts + own, maximize=True)[1].astype(np.int64)
