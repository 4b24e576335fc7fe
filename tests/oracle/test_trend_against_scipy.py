"""Oracle: scipy.stats for the slope and its interval; simulation for the onset."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from moegeom.core.intervals import half_width
from moegeom.geometry.trend import onset, slope


@pytest.mark.parametrize("seed", range(5))
def test_slope_and_interval_are_those_of_linregress(seed):
    random = np.random.default_rng(seed)
    x = np.sort(random.choice(1000, 8, replace=False)).astype(float)
    y = 0.01 * x + random.standard_normal(8)
    found, expected = slope(x, y), scipy.stats.linregress(x, y)
    np.testing.assert_allclose(found.value, expected.slope, rtol=1e-10)
    width = scipy.stats.t.ppf(0.975, 6) * expected.stderr
    np.testing.assert_allclose(found.half_width, width, rtol=1e-9)


def test_the_interval_is_the_wider_of_scatter_and_errors():
    x, y = np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0])
    assert slope(x, y).half_width < 1e-6
    wide = slope(x, y, np.full(3, 0.5)).half_width
    np.testing.assert_allclose(wide, 1.959964 * 0.5 / np.sqrt(2.0), rtol=1e-6)


def test_the_interval_holds_the_true_slope_in_95_of_100_series():
    random = np.random.default_rng(0)
    x = np.array([100.0, 300.0, 600.0, 1000.0, 1500.0])
    held = 0
    for _ in range(2000):
        found = slope(x, 1e-3 * x + 0.1 * random.standard_normal(5))
        held += abs(found.value - 1e-3) <= found.half_width
    assert 0.93 < held / 2000 < 0.97


def test_what_is_not_known_is_left_out():
    x = np.array([0.0, 1.0, 2.0, 3.0])
    y = np.array([0.0, np.nan, 2.0, 3.0])
    np.testing.assert_allclose(slope(x, y).value, 1.0)
    assert np.isnan(slope(x[:1], y[:1]).value)
    assert np.isnan(slope(x[:2], np.array([0.0, 1.0])).half_width)


def test_onset_is_the_first_step_that_stays_outside():
    error = np.full(6, 0.1)
    assert onset(np.array([0.0, 0.05, 1.0, 1.1, 0.9, 1.0]), error) == 2
    assert onset(np.array([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]), error) == 3
    assert onset(np.array([0.0, 1.0, 1.0, 1.0, 1.0, 0.0]), error) is None
    assert onset(np.array([0.0, 1.0, 1.0, -1.0, 1.0, 1.0]), error) == 4
    assert onset(np.array([0.0, 1.0]), error[:2]) is None
    assert onset(np.array([0.0, np.nan, 1.0]), error[:3]) is None


def test_a_constant_series_has_an_onset_in_fewer_than_5_of_100_cases():
    random = np.random.default_rng(1)
    found = [onset(0.1 * random.standard_normal(6), np.full(6, 0.1)) for _ in range(2000)]
    assert np.mean([step is not None for step in found]) < 0.05


@pytest.mark.parametrize("blocks", [2, 5, 16])
def test_half_widths_are_students(blocks):
    expected = 0.3 * scipy.stats.t.ppf(0.975, blocks - 1)
    np.testing.assert_allclose(half_width(0.3, blocks), expected, rtol=1e-9)
    np.testing.assert_allclose(half_width(1.0, None), scipy.stats.norm.ppf(0.975), rtol=1e-6)
