"""Oracle: scipy.stats for spread and entropy, the mean absolute difference for the Gini
coefficient, simulation for the floor."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from moegeom.geometry import load
from moegeom.geometry.load import chao1, expert_set_entropy_nats, good_turing_coverage


@pytest.fixture(params=range(8))
def counts(request):
    random = np.random.default_rng(request.param)
    experts = int(random.integers(2, 70))
    drawn = random.poisson(random.gamma(0.5, 40.0, experts))
    drawn[0] += 1
    return drawn


@pytest.mark.parametrize("ddof", [0, 1])
def test_cv_is_scipys_variation(counts, ddof):
    expected = scipy.stats.variation(counts, ddof=ddof)
    np.testing.assert_allclose(load.load_cv(counts, ddof), expected, rtol=1e-13)


def test_entropy_is_scipys_entropy(counts):
    expected = scipy.stats.entropy(counts)
    np.testing.assert_allclose(load.load_entropy_nats(counts), expected, rtol=1e-12, atol=1e-14)


def test_gini_is_half_the_relative_mean_absolute_difference(counts):
    difference = np.abs(counts[:, None] - counts[None, :]).mean()
    expected = difference / (2 * counts.mean())
    np.testing.assert_allclose(load.gini(counts), expected, rtol=1e-12, atol=1e-14)


def test_violations_are_the_extreme_counts_over_the_mean(counts):
    mean = sum(counts.tolist()) / len(counts)
    np.testing.assert_allclose(load.max_vio(counts), max(counts) / mean - 1, rtol=1e-13)
    np.testing.assert_allclose(load.min_vio(counts), min(counts) / mean - 1, rtol=1e-13)


def test_dead_and_underused_are_counted_one_by_one(counts):
    fair = counts.sum() / len(counts)
    dead = sum(1 for c in counts if c == 0) / len(counts)
    underused = sum(1 for c in counts if c < 0.1 * fair) / len(counts)
    np.testing.assert_allclose(load.dead_share(counts), dead, rtol=1e-15)
    np.testing.assert_allclose(load.underused_share(counts), underused, rtol=1e-15)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(512, 64, 8), (300, 16, 1), (200, 8, 6)])
def test_the_floor_is_the_cv_of_simulated_even_routing(tokens, experts, k):
    random = np.random.default_rng(3)
    squared = []
    for _ in range(300):
        order = random.random((tokens, experts)).argpartition(k - 1, axis=1)[:, :k]
        drawn = np.bincount(order.reshape(-1), minlength=experts)
        squared.append(float(load.load_cv(drawn)) ** 2)
    # the counts add up to kT, so their population variance has mean T (k/E) (1 - k/E) exactly
    error = 4 * np.std(squared) / np.sqrt(len(squared))
    found = load.load_cv_floor(tokens, experts, k) ** 2
    np.testing.assert_allclose(found, np.mean(squared), rtol=0, atol=error)


def test_expert_set_entropy_is_scipys_entropy_with_miller_madow(counts):
    seen = counts[counts > 0]
    expected = scipy.stats.entropy(seen) + (len(seen) - 1) / (2 * seen.sum())
    np.testing.assert_allclose(expert_set_entropy_nats(counts), expected, rtol=1e-12)


def _draw(random, population, tokens):
    return random.choice(len(population), tokens, p=population)


def test_good_turing_coverage_is_the_share_of_new_tokens_already_seen():
    random = np.random.default_rng(5)
    population = random.dirichlet(np.full(400, 0.3))
    errors, spread = [], []
    for _ in range(200):
        drawn = np.bincount(_draw(random, population, 300), minlength=400)
        covered = population[drawn > 0].sum()
        errors.append(good_turing_coverage(drawn[drawn > 0]) - covered)
        spread.append(covered)
    # unbiased up to 1 / T
    limit = 4 * np.std(errors) / np.sqrt(200) + 1 / 300
    np.testing.assert_allclose(np.mean(errors), 0.0, atol=limit)


def test_chao1_bounds_the_true_number_from_below_and_the_seen_number_from_above():
    random = np.random.default_rng(6)
    population = random.dirichlet(np.full(150, 0.6))
    found, seen = [], []
    for _ in range(100):
        drawn = np.bincount(_draw(random, population, 250), minlength=150)
        found.append(chao1(drawn[drawn > 0]))
        seen.append((drawn > 0).sum())
    np.testing.assert_array_less(seen, np.add(found, 1e-9))
    np.testing.assert_array_less(np.mean(found), 150.0)
