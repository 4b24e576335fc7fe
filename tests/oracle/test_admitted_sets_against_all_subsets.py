"""Sets that tied scores admit, against every subset of six experts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moegeom.geometry.set_code import set_distances

EXPERTS = 6


def subsets(scores: np.ndarray, k: int) -> list[tuple[int, ...]]:
    """Sets of k experts none of which is worse than an expert left out."""
    return [
        chosen
        for chosen in itertools.combinations(range(EXPERTS), k)
        if min(scores[list(chosen)]) >= max(np.delete(scores, chosen), default=-np.inf)
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("levels", [2, 3, 50])
def test_a_set_is_admitted_exactly_if_no_expert_left_out_is_better(k, levels):
    generator = np.random.default_rng([k, levels])
    for _ in range(40):
        scores = generator.integers(0, levels, EXPERTS).astype(np.float64)
        right = subsets(scores, k)
        tried = list(itertools.combinations(range(EXPERTS), k))
        shuffled = [generator.permutation(chosen) for chosen in tried]
        found = set_distances(np.tile(scores, (len(tried), 1)), np.array(shuffled))
        assert [t for t, good in zip(tried, found.is_met, strict=True) if good] == right


def test_masked_experts_may_be_chosen_only_where_too_few_are_left():
    scores = np.array([[1.0, -np.inf, 2.0, -np.inf]])
    assert set_distances(scores, np.array([[2, 0]])).is_met[0]
    assert set_distances(scores, np.array([[2, 0, 3]])).is_met[0]
    assert not set_distances(scores, np.array([[2, 3]])).is_met[0]


def test_a_score_that_is_nan_admits_nothing():
    assert not set_distances(np.array([[1.0, np.nan, 0.0]]), np.array([[0]])).is_met[0]
