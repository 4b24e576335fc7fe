"""Centred effective rows are free of gauges: common shifts, folded gains, row order."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.gram import effective_rows


@pytest.fixture
def random():
    return np.random.default_rng(5)


@pytest.fixture
def weight(random):
    return random.standard_normal((6, 9)).astype(np.float32)


def test_the_worked_pair():
    found = effective_rows(np.array([[1.0, 2.0], [3.0, 2.0]]), np.array([2.0, 1.0]))
    np.testing.assert_array_equal(found.centred, [[-2.0, 0.0], [2.0, 0.0]])
    np.testing.assert_array_equal(found.mean, [4.0, 2.0])
    np.testing.assert_array_equal(found.gram, [[4.0, -4.0], [-4.0, 4.0]])
    np.testing.assert_array_equal(found.squared_norms, [4.0, 4.0])


def test_a_common_shift_changes_no_centred_figure(weight, random):
    plain = effective_rows(weight.astype(np.float64), None)
    shift = 30.0 * random.standard_normal(9)
    moved = effective_rows(weight + shift, None)
    np.testing.assert_allclose(moved.centred, plain.centred, atol=1e-13)
    np.testing.assert_allclose(moved.gram, plain.gram, atol=1e-12)
    np.testing.assert_allclose(moved.mean, plain.mean + shift, atol=1e-13)


def test_a_gain_may_stand_in_front_or_in_the_weight(weight):
    gain = np.exp2(np.arange(9) - 4.0).astype(np.float32)  # powers of two: no rounding
    beside, folded = effective_rows(weight, gain), effective_rows(weight * gain, None)
    np.testing.assert_array_equal(beside.centred, folded.centred)
    np.testing.assert_array_equal(beside.gram, folded.gram)


def test_rows_and_mean_give_the_effective_router_back(weight, random):
    gain = random.uniform(0.1, 2.0, 9)
    found = effective_rows(weight, gain)
    np.testing.assert_allclose(found.centred + found.mean, weight * gain, atol=1e-15)
    np.testing.assert_allclose(found.centred.sum(axis=0), np.zeros(9), atol=1e-14)


def test_renaming_experts_renames_rows(weight):
    order = np.array([3, 1, 5, 0, 4, 2])
    plain, renamed = effective_rows(weight, None), effective_rows(weight[order], None)
    np.testing.assert_allclose(renamed.centred, plain.centred[order], atol=1e-15)
    np.testing.assert_allclose(renamed.gram, plain.gram[np.ix_(order, order)], atol=1e-14)


@pytest.mark.parametrize("experts", [1, 2, 3, 7, 60, 256])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rows_are_zero_and_not_rounding(experts, dtype, random):
    row = (0.1 + random.standard_normal(9)).astype(dtype)
    found = effective_rows(np.tile(row, (experts, 1)), np.full(9, 0.3))
    np.testing.assert_array_equal(found.centred, np.zeros((experts, 9)))
    np.testing.assert_array_equal(found.gram, np.zeros((experts, experts)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_left_out_of_everything(bad, weight):
    spoilt = weight.copy()
    spoilt[[1, 4], 2] = bad
    found, rest = effective_rows(spoilt, None), effective_rows(weight[[0, 2, 3, 5]], None)
    np.testing.assert_array_equal(found.finite, [True, False, True, True, False, True])
    np.testing.assert_array_equal(found.centred, rest.centred)
    np.testing.assert_array_equal(found.mean, rest.mean)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gain_that_is_not_finite_leaves_no_row(bad, weight):
    weight[:, 3] = 0.0  # inf * 0 is not a number either
    found = effective_rows(weight, np.array([1.0] * 3 + [bad] + [1.0] * 5))
    np.testing.assert_array_equal(found.finite, np.zeros(6, dtype=bool))
    assert (found.centred.shape, found.gram.shape) == ((0, 9), (0, 0))
    np.testing.assert_array_equal(found.mean, np.zeros(9))


def test_a_row_whose_powers_overflow_counts_as_not_finite(weight):
    long = weight.astype(np.float64)
    long[2] *= 1e200
    found = effective_rows(long, np.full(9, 1e200))
    np.testing.assert_array_equal(found.finite, np.zeros(6, dtype=bool))
    np.testing.assert_array_equal(effective_rows(long, None).finite, np.arange(6) != 2)


def test_the_router_itself_is_not_written_to(weight):
    before = weight.astype(np.float64)
    given = before.copy()
    effective_rows(given, np.full(9, 2.0))
    np.testing.assert_array_equal(given, before)
