"""Oracles: scipy.stats for tails and degrees of freedom, simulation for what is promised of them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from moegeom.checks.statistics import (
    POWER,
    detectable_shift,
    holm_rejects,
    p_above,
    p_differs,
    welch_freedom,
)

FREEDOMS = [1, 2, 7, 15, 200]


@pytest.mark.parametrize("freedom", FREEDOMS)
@pytest.mark.parametrize("t", [-40.0, -3.0, -0.1, 0.0, 0.4, 2.0, 12.0, 300.0])
def test_p_values_are_the_tails_of_students_t(t, freedom):
    error = 0.3
    found = p_above(2.0 + t * error, 2.0, error, freedom)
    np.testing.assert_allclose(found, stats.t.sf(t, freedom), rtol=1e-10)
    both = p_differs(t * error, error, freedom)
    np.testing.assert_allclose(both, 2.0 * stats.t.sf(abs(t), freedom), rtol=1e-10)


def test_a_test_of_a_sample_is_scipys():
    values = np.random.default_rng(0).normal(0.4, 1.0, 16)
    error = float(values.std(ddof=1) / 4.0)
    above = stats.ttest_1samp(values, 0.1, alternative="greater")
    np.testing.assert_allclose(p_above(float(values.mean()), 0.1, error, 15), above.pvalue)
    differs = stats.ttest_1samp(values, 0.0)
    np.testing.assert_allclose(p_differs(float(values.mean()), error, 15), differs.pvalue)


def test_without_error_a_comparison_is_exact():
    assert [p_above(v, 1.0, 0.0, 5) for v in (0.9, 1.0, 1.1)] == [1.0, 1.0, 0.0]
    assert [p_differs(v, 0.0, 5) for v in (-1.0, 0.0, 1e-300)] == [0.0, 1.0, 0.0]


def test_an_infinite_figure_is_beyond_every_limit():
    assert [p_above(v, 1.0, 0.1, 5) for v in (np.inf, -np.inf)] == [0.0, 1.0]
    assert p_above(3.0, np.inf, 0.1, 5) == 1.0


@pytest.mark.parametrize(("first", "second"), [(16, 16), (16, 5), (3, 40), (2, 2)])
def test_degrees_of_freedom_are_those_of_scipys_welch_test(first, second):
    random = np.random.default_rng([first, second])
    a, b = random.normal(0, 1, first), random.normal(0, 3, second)
    errors = [float(v.std(ddof=1) / np.sqrt(len(v))) for v in (a, b)]
    expected = stats.ttest_ind(a, b, equal_var=False)
    found = welch_freedom(errors, (first - 1, second - 1))
    np.testing.assert_allclose(found, expected.df, rtol=1e-12)
    difference = float(a.mean() - b.mean())
    p_value = p_differs(difference, float(np.hypot(*errors)), found)
    np.testing.assert_allclose(p_value, expected.pvalue, rtol=1e-10)


def test_degrees_of_freedom_without_errors_are_the_smaller():
    assert welch_freedom((0.0, 0.0), (15, 7)) == 7
    np.testing.assert_allclose(welch_freedom((0.3, 0.0), (15, 7)), 15.0)


def adjusted(p_values) -> np.ndarray:
    """Holm's adjusted p-values: the running maximum of (m - i + 1) p_(i), at most 1."""
    p_values = np.asarray(p_values)
    order = np.argsort(p_values, kind="stable")
    steps = (len(p_values) - np.arange(len(p_values))) * p_values[order]
    found = np.empty(len(p_values))
    found[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_holm_rejects_where_the_adjusted_p_value_is_at_most_the_level(count):
    random = np.random.default_rng(count)
    for _ in range(200):
        p_values = random.random(count) ** random.uniform(1, 12)
        if count > 3:
            p_values[1] = p_values[2]
        level = float(random.choice([0.01, 0.05, 0.3]))
        expected = adjusted(p_values) <= level
        assert holm_rejects(p_values.tolist(), level) == expected.tolist()


def test_the_worked_procedure():
    """Wikipedia's example: .01 and .005 are rejected at .05, .03 ends it although .04 < .05."""
    assert holm_rejects([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]


@pytest.mark.parametrize("correlation", [0.0, 0.7, 1.0, -1.0])
def test_the_error_of_the_whole_run_stays_below_the_level(correlation):
    """40 hypotheses, 30 true, with dependent figures: some true one is rejected in at most 5 %."""
    random, runs, level = np.random.default_rng(3), 4000, 0.05
    common = random.standard_normal((runs, 1))
    sign = np.where(np.arange(40) % 2, np.sign(correlation) or 1.0, 1.0)
    share = abs(correlation)
    drawn = np.sqrt(1 - share) * random.standard_normal((runs, 40)) + np.sqrt(share) * common * sign
    drawn[:, 30:] += 4.0
    p_values = stats.norm.sf(drawn)
    false_alarms = [any(holm_rejects(row, level)[:30]) for row in p_values.tolist()]
    # three standard errors of the simulation
    np.testing.assert_array_less(np.mean(false_alarms), level + 3 * np.sqrt(level / runs))
    if correlation == 0.0:  # and it is no empty promise
        np.testing.assert_array_less(level / 2, np.mean(false_alarms))


@pytest.mark.parametrize(
    ("freedom", "num_tests"), [(15, 1), (15, 8), (30, 1), (30, 20), (200, 100)]
)
def test_the_detectable_shift_is_found_with_the_stated_power(freedom, num_tests):
    random, runs, level = np.random.default_rng(4), 20_000, 0.05
    shift = detectable_shift(1.0, freedom, level, num_tests)
    figure = shift + random.standard_normal(runs)
    error = np.sqrt(random.chisquare(freedom, runs) / freedom)
    found = [
        p_above(float(value), 0.0, float(se), freedom) <= level / num_tests
        for value, se in zip(figure, error, strict=True)
    ]
    np.testing.assert_allclose(np.mean(found), POWER, atol=0.02)


def test_a_larger_error_or_more_tests_need_a_larger_shift():
    plain = detectable_shift(1.0, 15, 0.05, 1)
    np.testing.assert_allclose(detectable_shift(2.5, 15, 0.05, 1), 2.5 * plain)
    more = [detectable_shift(1.0, 15, 0.05, count) for count in (1, 10, 100)]
    np.testing.assert_array_less(0.0, np.diff(more))
