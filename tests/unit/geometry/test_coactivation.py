"""Experts chosen together: sets of tokens, chance levels, corners."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from moegeom.geometry.load import (
    coactivation_over_chance,
    jaccard_chance,
    jaccard_mean,
    num_pairs_seen,
)


def drawn(tokens, experts, k, seed=0):
    """Sets drawn evenly."""
    order = np.random.default_rng(seed).random((tokens, experts))
    return np.argsort(order, axis=1)[:, :k]


def pair_counts(chosen, experts):
    inside = np.zeros((len(chosen), experts), dtype=np.int64)
    np.put_along_axis(inside, chosen, 1, axis=1)
    return inside.T @ inside


@pytest.fixture(params=[(40, 7, 2), (30, 12, 4), (200, 5, 3), (9, 30, 2)], ids=str)
def case(request):
    chosen = drawn(*request.param)
    experts = request.param[1]
    sets = [{t for t, row in enumerate(chosen.tolist()) if e in row} for e in range(experts)]
    return pair_counts(chosen, experts), sets, request.param


def test_overlap_is_the_mean_jaccard_index_of_sets_of_tokens(case):
    counts, sets, _ = case
    found = [len(a & b) / len(a | b) for a, b in combinations(sets, 2) if a | b]
    np.testing.assert_allclose(jaccard_mean(counts), np.mean(found), rtol=1e-14)


def test_pairs_are_counted_once(case):
    counts, sets, _ = case
    assert num_pairs_seen(counts) == sum(1 for a, b in combinations(sets, 2) if a & b)


def test_over_chance_is_the_frequency_over_that_of_sets_drawn_evenly(case):
    counts, sets, (tokens, experts, k) = case
    found = coactivation_over_chance(counts, tokens, k)
    all_sets = list(combinations(range(experts), k))
    chance = sum(1 for chosen in all_sets if {0, 1} <= set(chosen)) / len(all_sets)
    for i, j in combinations(range(experts), 2):
        expected = len(sets[i] & sets[j]) / tokens / chance
        np.testing.assert_allclose(found[i, j], expected, rtol=1e-13)
        np.testing.assert_equal(found[j, i], found[i, j])


def test_over_chance_is_one_on_average(case):
    """Every token has k (k - 1) / 2 pairs, whatever the loads."""
    counts, _, (tokens, experts, k) = case
    upper = coactivation_over_chance(counts, tokens, k)[np.triu_indices(experts, 1)]
    np.testing.assert_allclose(upper.mean(), 1.0, rtol=1e-13)


@pytest.mark.parametrize(("experts", "k"), [(16, 2), (64, 8), (8, 1), (6, 5)])
def test_chance_is_the_overlap_of_sets_drawn_evenly(experts, k):
    found = jaccard_mean(pair_counts(drawn(40_000, experts, k), experts))
    np.testing.assert_allclose(jaccard_chance(experts, k), found, rtol=0.01, atol=1e-15)


@pytest.mark.parametrize(("experts", "k"), [(4, 2), (6, 3), (5, 4), (7, 1), (3, 3)])
def test_chance_is_exact_when_every_set_occurs_once(experts, k):
    every = np.array(list(combinations(range(experts), k)))
    counts = pair_counts(every, experts)
    np.testing.assert_allclose(jaccard_mean(counts), jaccard_chance(experts, k), rtol=1e-14)
    if k > 1:
        upper = coactivation_over_chance(counts, len(every), k)[np.triu_indices(experts, 1)]
        np.testing.assert_allclose(upper, 1.0, rtol=1e-14)


def test_names_of_experts_do_not_matter(case):
    counts, _, _ = case
    order = np.random.default_rng(1).permutation(len(counts))
    moved = counts[np.ix_(order, order)]
    np.testing.assert_allclose(jaccard_mean(moved), jaccard_mean(counts), rtol=1e-14)
    assert num_pairs_seen(moved) == num_pairs_seen(counts)


def test_pairs_of_two_dead_experts_are_left_out():
    """Experts 0 and 1 always together, 2 and 3 dead: one pair of 1, four of 0."""
    counts = np.zeros((4, 4), dtype=np.int64)
    counts[:2, :2] = 10
    np.testing.assert_allclose(jaccard_mean(counts), 1 / 5, rtol=1e-15)
    assert num_pairs_seen(counts) == 1


def test_without_tokens_nothing_is_known():
    none = np.zeros((3, 3), dtype=np.int64)
    assert np.isnan(jaccard_mean(none))
    assert np.isnan(coactivation_over_chance(none, 0, 2)).all()
    assert num_pairs_seen(none) == 0


def test_one_choice_per_token_shares_nothing():
    counts = np.diag([3, 4, 5])
    np.testing.assert_equal(jaccard_mean(counts), 0.0)
    np.testing.assert_equal(jaccard_chance(3, 1), 0.0)
    assert np.isnan(coactivation_over_chance(counts, 12, 1)).all()


def test_one_expert_has_no_pairs():
    one = np.array([[7]])
    assert np.isnan(jaccard_mean(one))
    assert np.isnan(jaccard_chance(1, 1))
    assert num_pairs_seen(one) == 0
