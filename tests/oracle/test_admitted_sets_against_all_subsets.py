"""Sets that tied scores admit, against every subset of six experts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moegeom.geometry.selection import admitted_sets

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
        found = admitted_sets(np.tile(scores, (len(tried), 1)), np.array(shuffled))
        assert [t for t, good in zip(tried, found.is_admitted, strict=True) if good] == right
        assert (found.num_sets == len(right)).all()
        by_lowest = tuple(sorted(np.argsort(-scores, kind="stable")[:k]))
        reversed_order = EXPERTS - 1 - np.argsort(-scores[::-1], kind="stable")
        by_highest = tuple(sorted(reversed_order[:k]))
        assert [t for t, good in zip(tried, found.is_lowest, strict=True) if good] == [by_lowest]
        assert [t for t, good in zip(tried, found.is_highest, strict=True) if good] == [by_highest]
        assert found.credit("random").sum() == pytest.approx(1.0)


def test_masked_experts_may_be_chosen_only_where_too_few_are_left():
    scores = np.array([[1.0, -np.inf, 2.0, -np.inf]])
    assert admitted_sets(scores, np.array([[2, 0]])).is_admitted[0]
    found = admitted_sets(scores, np.array([[2, 0, 3]]))
    assert found.is_admitted[0]
    assert found.num_sets[0] == 2.0


def test_a_score_that_is_nan_admits_nothing():
    found = admitted_sets(np.array([[1.0, np.nan, 0.0]]), np.array([[0]]))
    assert not found.is_admitted[0]
    assert found.credit("random")[0] == 0.0
