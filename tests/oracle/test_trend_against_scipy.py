"""Oracles: scipy's fits for slopes, brute force and simulation for onsets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import optimize, stats

from moegeom.geometry.statistics import LEAST_STEPS, departures, onset, slope

STEPS = np.array([100.0, 300.0, 600.0, 1000.0, 1500.0, 2200.0])


def series(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    error = generator.uniform(0.02, 0.4, len(STEPS))
    return 0.3 + 4e-4 * STEPS + error * generator.standard_normal(len(STEPS)), error


def fitted(value: np.ndarray, error: np.ndarray, is_absolute: bool) -> tuple[float, float]:
    found, covariance = optimize.curve_fit(
        lambda x, a, b: a + b * x / 1000.0,
        STEPS,
        value,
        sigma=error,
        absolute_sigma=is_absolute,
    )
    return found[1] / 1000.0, np.sqrt(covariance[1, 1]) / 1000.0


@pytest.mark.parametrize("seed", range(8))
def test_without_errors_the_slope_is_that_of_linregress(seed):
    value, _ = series(seed)
    found, expected = slope(STEPS, value), stats.linregress(STEPS, value)
    assert_allclose(found.value, expected.slope, rtol=1e-12)
    wide = stats.t.ppf(0.975, len(STEPS) - 2) * expected.stderr
    assert_allclose(found.half_width, wide, rtol=1e-10)


@pytest.mark.parametrize("seed", range(8))
def test_with_errors_the_slope_is_weighted_and_the_wider_interval_is_given(seed):
    value, error = series(seed)
    found = slope(STEPS, value, error)
    expected, scatter = fitted(value, error, is_absolute=False)
    _, documents = fitted(value, error, is_absolute=True)
    wide = max(stats.t.ppf(0.975, len(STEPS) - 2) * scatter, stats.norm.ppf(0.975) * documents)
    assert_allclose(found.value, expected, rtol=1e-6)
    assert_allclose(found.half_width, wide, rtol=1e-5)


def test_departures_are_the_least_of_all_pairs():
    value, error = series(3)
    expected = np.ones(len(value))
    for j in range(1, len(value)):
        pairs = list(itertools.product(range(j), range(j, len(value))))
        t = [(value[k] - value[i]) / np.sqrt(error[k] ** 2 + error[i] ** 2) for i, k in pairs]
        one_sided = min(
            max(stats.t.sf(x, 15) for x in t),
            max(stats.t.cdf(x, 15) for x in t),
        )
        expected[j] = min(1.0, 2.0 * one_sided)
    assert_allclose(departures(value, error, 15.0), expected, rtol=1e-10)


def test_a_series_that_does_not_move_is_given_an_onset_in_at_most_one_of_twenty():
    generator = np.random.default_rng(5)
    error = np.full(len(STEPS), 0.1)
    number = 2000
    found = [
        onset(departures(generator.normal(1.0, 0.1, len(STEPS)), error, 15.0), 0.05)
        for _ in range(number)
    ]
    assert sum(index is not None for index in found) <= 0.05 * number


@pytest.mark.parametrize("begin", range(1, len(STEPS)))
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_jump_is_found_at_the_step_where_it_happens(begin, sign):
    generator = np.random.default_rng(begin)
    error = np.full(len(STEPS), 0.01)
    value = 1.0 + error * generator.standard_normal(len(STEPS))
    value[begin:] += sign
    assert onset(departures(value, error, 15.0), 0.05) == begin


def test_a_value_that_comes_back_has_no_onset():
    value = np.array([1.0, 1.0, 3.0, 3.0, 1.0, 1.0])
    assert onset(departures(value, np.full(6, 0.01), 15.0), 0.05) is None


@pytest.mark.parametrize("number", range(LEAST_STEPS))
def test_few_steps_have_no_onset(number):
    value = np.arange(number, dtype=np.float64)
    p_values = departures(value, np.full(number, 1e-6), 15.0)
    assert_allclose(p_values, 1.0)
    assert onset(p_values, 0.05) is None


def test_what_is_not_known_is_nan_or_no_onset():
    line = np.arange(5.0)
    for error in (np.zeros(5), np.array([0.1, np.nan, 0.1, 0.1, 0.1])):
        assert_allclose(departures(line, error, 15.0), 1.0)
        assert_allclose(slope(line, line, error).value, 1.0)  # unweighted
    assert np.isnan(slope(np.array([3.0]), np.array([1.0])).value)
    assert np.isnan(slope(np.array([3.0, 3.0]), np.array([1.0, 2.0])).value)
    two = slope(np.array([0.0, 2.0]), np.array([1.0, 2.0]))
    assert_allclose(two.value, 0.5)
    assert np.isnan(two.half_width)
    gap = slope(np.arange(4.0), np.array([0.0, np.nan, 2.0, 3.0]))
    assert_allclose(gap.value, 1.0)
