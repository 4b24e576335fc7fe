"""Distinct values are counted, not guessed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from moegeom.geometry.number_formats import (
    PREFIX,
    WINDOW,
    distinct_values,
    expected_window_levels,
    window_levels,
)

SMALL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3.0])


@given(
    arrays(np.float32, array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9), elements=SMALL)
)
def test_distinct_values_are_what_a_set_holds(values):
    expected = [len(set(row)) for row in values.tolist()]
    np.testing.assert_array_equal(distinct_values(values), expected)


def test_a_window_is_counted_by_itself():
    row = np.concatenate([np.ones(WINDOW), np.arange(WINDOW)])
    np.testing.assert_array_equal(window_levels(row[None]), [(1 + WINDOW) / 2])


def test_what_is_left_of_a_window_is_not_looked_at():
    row = np.concatenate([np.arange(WINDOW), np.zeros(WINDOW - 1)])
    np.testing.assert_array_equal(window_levels(row[None]), [WINDOW])


def test_columns_beyond_the_prefix_are_not_looked_at():
    rows = np.tile(np.arange(2.0 * PREFIX), (3, 1))
    rows[:, PREFIX:] = 0.0
    np.testing.assert_array_equal(window_levels(rows), [WINDOW] * 3)


@pytest.mark.parametrize("columns", [0, 1, WINDOW - 1])
def test_rows_shorter_than_a_window_have_no_figure(columns):
    np.testing.assert_array_equal(window_levels(np.ones((2, columns))), [np.nan, np.nan])


def test_no_row_has_no_figure():
    assert window_levels(np.empty((0, 64))).shape == (0,)


@pytest.mark.parametrize("bits", [0, 2, 3, 7, 10, 12])
def test_a_power_of_two_in_scale_changes_no_expectation(bits):
    whole = expected_window_levels(1.3, bits)
    for power in (-14, -1, 5):
        np.testing.assert_allclose(
            expected_window_levels(1.3 * 2.0**power, bits), whole, rtol=1e-12
        )


def test_more_mantissa_bits_hold_more_values_and_never_more_than_a_window():
    found = [expected_window_levels(0.02, bits) for bits in (0, 2, 3, 7, 10, 12)]
    np.testing.assert_array_less(0.0, np.diff(found))
    np.testing.assert_array_less(found, WINDOW)
    np.testing.assert_array_equal([expected_window_levels(0.02, b) for b in (13, 23, 52)], WINDOW)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_without_a_scale_nothing_is_expected(scale):
    for bits in (3, 23):
        np.testing.assert_equal(expected_window_levels(scale, bits), np.nan)


def test_windows_of_zeros_are_left_out():
    row = np.concatenate([np.zeros(WINDOW), np.arange(WINDOW)])
    np.testing.assert_array_equal(window_levels(row[None]), [WINDOW])
    assert np.isnan(window_levels(np.zeros((2, WINDOW)))).all()
