"""Alternation, return and agreement of ranks against their definitions, and at the corners."""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_equal
from scipy import stats

from moegeom.geometry import series
from moegeom.geometry.statistics import rank_correlation


def num_runs(signs: np.ndarray) -> int:
    return 1 + int((signs[1:] != signs[:-1]).sum())


@pytest.mark.parametrize(("steps", "above"), [(5, 2), (7, 3), (9, 4), (8, 1), (6, 6)])
def test_runs_have_the_probability_that_all_orders_give_them(steps, above):
    every = itertools.combinations(range(steps), above)
    orders = [np.isin(np.arange(steps), places) for places in every]
    runs = np.array([num_runs(signs) for signs in orders])
    for signs in orders[:: max(1, len(orders) // 7)]:
        expected = float((runs >= num_runs(signs)).mean())
        assert_allclose(series.alternation_p_value(signs), expected, rtol=1e-12)


def test_no_series_is_less_likely_than_one_that_alternates_throughout():
    for steps in (4, 7, 8):
        every = itertools.product([False, True], repeat=steps)
        least = min(series.alternation_p_value(np.array(signs)) for signs in every)
        assert_allclose(least, series.least_alternation_p_value(steps), rtol=1e-12)


def test_main_scores_follow_the_steps_and_changes_are_relative():
    generator = np.random.default_rng(0)
    states = generator.standard_normal((9, 5))
    order = generator.permutation(9)
    one, other = series.main_scores(states), series.main_scores(states[order])
    assert_allclose(np.abs(other), np.abs(one[order]), atol=1e-12)
    assert_allclose(np.linalg.norm(one), np.linalg.norm(states - states.mean(0), 2), rtol=1e-12)
    assert_allclose(series.main_scores(np.ones((4, 3))), 0.0)
    rows = np.array([[3.0, 4.0]])
    assert_allclose(
        series.changes([rows, rows * 1.1, rows], ["a", "b", "b"]), [0.1, 0.0], rtol=1e-12
    )
    assert_allclose(series.changes([0 * rows, rows, rows], ["", "", ""]), [np.inf, 0.0])


def grams(states: np.ndarray) -> np.ndarray:
    """Of (steps, experts, width)."""
    centred = states - states.mean(axis=0)
    return np.einsum("tew,sew->ets", centred, centred)


def test_a_walk_undoes_nothing_scatter_a_half_and_a_return_all():
    generator = np.random.default_rng(1)
    noise = generator.standard_normal((4, 16, 400))
    walk = np.cumsum(noise, axis=0)
    walked, scattered = series.undone(grams(walk), 1, 2, 3), series.undone(grams(noise), 1, 2, 3)
    walk[3] = walk[1] + noise[3]
    back = series.undone(grams(walk), 1, 2, 3)
    assert_allclose([walked.share, scattered.share, back.share], [0.0, 0.5, 1.0], atol=0.05)
    assert_allclose([scattered.nearness, back.nearness], [1.0, 0.5], atol=0.05)
    assert 0.0 < back.error < 0.05
    # nan where nothing happened
    alone = generator.standard_normal((3, 1, 5))
    still = series.undone(grams(np.ones((3, 4, 5))), 0, 1, 2)
    assert_equal([still.share, series.undone(grams(alone), 0, 1, 2).error], [np.nan, np.nan])


def test_the_agreement_of_one_step_is_spearmans_and_ties_bound_its_p_value():
    generator = np.random.default_rng(2)
    one, other = generator.standard_normal((2, 1, 12))
    agreement = series.rank_agreement(one, one + other)
    expected = stats.spearmanr(one[0], (one + other)[0], alternative="greater")
    correlation, p_value = (np.asarray(value) for value in expected)
    assert_allclose(agreement.correlation, correlation, rtol=1e-12)
    assert_allclose(agreement.p_value, p_value, rtol=0.25)
    flat, rising = np.zeros((2, 8)), np.tile(np.arange(8.0), (2, 1))
    assert series.rank_agreement(flat, rising).p_value == 1.0
    halves = (rising >= 4.0).astype(np.float64)
    # 4! 4! of the 8! numberings exchange experts that are tied
    assert_allclose(series.rank_agreement(halves, rising).p_value, 1 / 70, rtol=1e-9)


@pytest.mark.parametrize("experts", [5, 6])
def test_its_p_value_is_that_of_all_numberings(experts):
    generator = np.random.default_rng(0)
    one, other = generator.standard_normal((2, 3, experts))
    other += 0.6 * one
    agreement = series.rank_agreement(one, other)
    orders = itertools.permutations(range(experts))
    every = [series.rank_agreement(one, other[:, order]).correlation for order in orders]
    as_large = np.mean(np.array(every) >= agreement.correlation - 1e-9)
    assert_allclose(agreement.p_value, as_large, rtol=1e-9)
    assert_allclose(agreement.by_chance, 1.96 * np.std(every), rtol=1e-9)


def test_with_more_experts_its_p_value_is_near_that_of_many_numberings():
    generator = np.random.default_rng(7)
    one, other = generator.standard_normal((2, 3, 16))
    other += 0.35 * one
    agreement = series.rank_agreement(one, other)
    orders = [generator.permutation(16) for _ in range(2000)]
    every = [series.rank_agreement(one, other[:, order]).correlation for order in orders]
    share = float(np.mean(np.array(every) >= agreement.correlation))
    assert 0.001 < share < 0.2
    assert_allclose(agreement.p_value, share, rtol=0.35, atol=2e-3)


def test_a_rank_correlation_is_that_of_scipy_and_missing_of_a_constant():
    one, other = np.random.default_rng(1).integers(0, 9, (2, 40))  # with ties
    assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)
    assert rank_correlation(one, np.ones(40)) is None
