"""Rank, condition and effective rank at the corners."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.gram import Spectrum, effective_rows, row_spectrum


def spectrum(rows, is_centred=False):
    rows = np.asarray(rows, np.float64)
    return row_spectrum(rows @ rows.T, rows.shape[1], is_centred)


def centred_spectrum(weight):
    rows = effective_rows(weight, None)
    return row_spectrum(rows.gram, weight.shape[1], True)


@pytest.fixture
def random():
    return np.random.default_rng(4)


def test_the_worked_spectrum():
    found = spectrum([[3, 0, 0], [0, 1, 0]])
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert (found.rank, found.largest_possible_rank) == (2, 2)
    np.testing.assert_allclose(found.condition, 3.0, rtol=1e-15)
    np.testing.assert_allclose(found.effective_rank, np.exp(entropy), rtol=1e-15)


def test_equal_singular_values_count_whole():
    found = spectrum(2.0 * np.eye(7))
    np.testing.assert_allclose([found.condition, found.effective_rank], [1.0, 7.0], rtol=1e-14)


def test_rows_on_one_line_have_rank_one_and_no_condition():
    found = spectrum([[1, 2, 3], [2, 4, 6]])
    assert (found.rank, found.largest_possible_rank) == (1, 2)
    np.testing.assert_array_equal(found.condition, np.inf)
    np.testing.assert_allclose(found.effective_rank, 1.0, atol=1e-6)


def test_a_common_shift_changes_no_centred_figure(random):
    weight = random.standard_normal((6, 20))
    plain, moved = centred_spectrum(weight), centred_spectrum(weight + 9.0)
    assert (moved.rank, moved.largest_possible_rank) == (5, 5) == (plain.rank, 5)
    np.testing.assert_allclose(moved.condition, plain.condition, rtol=1e-11)
    np.testing.assert_allclose(moved.effective_rank, plain.effective_rank, rtol=1e-12)


def test_scale_rotation_and_order_change_nothing(random):
    weight = random.standard_normal((5, 8))
    other = 7.0 * weight[[4, 2, 0, 1, 3]] @ np.linalg.qr(random.standard_normal((8, 8)))[0]
    a, b = centred_spectrum(weight), centred_spectrum(other)
    assert a.rank == b.rank
    np.testing.assert_allclose(b.condition, a.condition, rtol=1e-11)
    np.testing.assert_allclose(b.effective_rank, a.effective_rank, rtol=1e-12)


@pytest.mark.parametrize(
    ("experts", "hidden", "raw", "centred"),
    [(4, 9, 4, 3), (9, 4, 4, 4), (4, 4, 4, 3), (5, 4, 4, 4)],
)
def test_centring_costs_a_rank_only_where_there_are_dimensions_enough(
    experts, hidden, raw, centred, random
):
    weight = random.standard_normal((experts, hidden))
    assert spectrum(weight).rank == spectrum(weight).largest_possible_rank == raw
    found = centred_spectrum(weight)
    assert found.rank == found.largest_possible_rank == centred
    assert np.isfinite(found.condition)


@pytest.mark.parametrize("duplicates", [1, 3])
def test_each_duplicate_row_costs_a_rank(duplicates, random):
    weight = random.standard_normal((8, 40)).astype(np.float32)
    weight[-duplicates:] = weight[0]
    found = centred_spectrum(weight)
    assert (found.rank, found.largest_possible_rank) == (7 - duplicates, 7)
    np.testing.assert_array_equal(found.condition, np.inf)


def assert_nothing(found: Spectrum, possible: int) -> None:
    assert (found.rank, found.largest_possible_rank) == (0, possible)
    np.testing.assert_array_equal([found.condition, found.effective_rank], [np.nan, np.nan])


def test_zero_rows_have_no_spectrum():
    assert_nothing(spectrum(np.zeros((3, 5))), 3)


def test_equal_rows_have_no_centred_spectrum():
    assert_nothing(centred_spectrum(np.full((3, 5), 0.1)), 2)


def test_one_row_has_no_centred_spectrum():
    assert_nothing(centred_spectrum(np.ones((1, 5))), 0)


def test_no_row_has_no_spectrum():
    assert_nothing(spectrum(np.empty((0, 5)), is_centred=True), 0)
