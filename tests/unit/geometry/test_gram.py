"""Gram score and its marks of comparison, by hand and at the corners."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.gram import (
    best_gram_score,
    cosines,
    gram_score,
    mean_absolute_cosine,
    random_gram_score,
    random_gram_score_sd,
)


def cosines_of(rows):
    rows = np.asarray(rows, np.float64)
    return cosines(rows @ rows.T)


def score(rows):
    return gram_score(cosines_of(rows))


@pytest.fixture
def random():
    return np.random.default_rng(3)


def test_the_worked_score():
    rows = [[1, 0], [1, 1], [0, 2]]
    np.testing.assert_allclose(score(rows), 0.422650, atol=5e-7)  # 1 - 1 / sqrt(3)
    np.testing.assert_allclose(mean_absolute_cosine(cosines_of(rows)), np.sqrt(2) / 3, rtol=1e-15)


def test_orthonormal_rows_score_one(random):
    rotation = np.linalg.qr(random.standard_normal((5, 5)))[0]
    np.testing.assert_allclose(score(rotation), 1.0, atol=1e-15)


def test_rows_on_one_line_score_nothing_whatever_their_sense():
    np.testing.assert_allclose(score([[1, 2], [2, 4], [-3, -6]]), 0.0, atol=1e-15)


def test_lengths_and_rotations_change_no_cosine(random):
    rows = random.standard_normal((6, 4))
    turned = rows @ np.linalg.qr(random.standard_normal((4, 4)))[0] * random.uniform(0.1, 9, (6, 1))
    np.testing.assert_allclose(cosines_of(turned), cosines_of(rows), atol=1e-14)


def test_a_common_shift_changes_no_centred_score_but_the_raw_one(random):
    rows = random.standard_normal((8, 64))
    moved = rows + 5.0 * random.standard_normal(64)
    np.testing.assert_allclose(
        score(moved - moved.mean(axis=0)), score(rows - rows.mean(axis=0)), atol=1e-12
    )
    np.testing.assert_array_less(score(moved), score(rows) - 0.5)


def test_zero_rows_are_left_out(random):
    rows = random.standard_normal((4, 3))
    with_zeros = np.vstack([rows[:2], np.zeros((1, 3)), rows[2:]])
    np.testing.assert_allclose(score(with_zeros), score(rows), rtol=1e-15)
    found = cosines_of(with_zeros)
    np.testing.assert_array_equal(np.isnan(found[2]), np.ones(5, dtype=bool))
    np.testing.assert_array_equal(np.isnan(found[0]), [False, False, True, False, False])


@pytest.mark.parametrize("rows", [np.empty((0, 3)), np.ones((1, 3)), np.zeros((4, 3)), [[1], [0]]])
def test_fewer_than_two_rows_have_no_score(rows):
    found = cosines_of(rows)
    np.testing.assert_array_equal([gram_score(found), mean_absolute_cosine(found)], [np.nan] * 2)


def test_cosines_stay_within_one_whatever_the_rounding(random):
    rows = np.repeat(random.standard_normal((20, 7)), 2, axis=0) * random.uniform(0, 1, (40, 1))
    assert np.abs(cosines_of(rows)).max() == 1.0


def test_the_welch_bound_of_four_rows_in_space_is_two_thirds():
    np.testing.assert_allclose(best_gram_score(4, 3, is_centred=False), 2 / 3, rtol=1e-15)
    tetrahedron = [[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
    np.testing.assert_allclose(score(tetrahedron), 2 / 3, rtol=1e-14)


@pytest.mark.parametrize("experts", [2, 3, 8, 50])
def test_a_simplex_is_the_best_that_centred_rows_can_do(experts):
    simplex = np.eye(experts) - 1.0 / experts
    best = best_gram_score(experts, experts + 3, is_centred=True)
    np.testing.assert_allclose(score(simplex), best, atol=1e-14)
    np.testing.assert_allclose(best, 1 - 1 / (experts - 1), atol=1e-15)


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize(("experts", "hidden"), [(4, 3), (9, 2), (3, 8), (2, 1), (12, 12)])
def test_no_rows_score_more_than_the_best(experts, hidden, is_centred, random):
    best = best_gram_score(experts, hidden, is_centred)
    for _ in range(200):
        rows = random.standard_normal((experts, hidden))
        found = score(rows - is_centred * rows.mean(axis=0))
        np.testing.assert_array_less(found, best + 1e-12)


@pytest.mark.parametrize("is_centred", [False, True])
def test_fewer_than_two_rows_have_nothing_to_be_compared_with(is_centred):
    for count in (0, 1):
        np.testing.assert_equal(random_gram_score(count, 8, is_centred), np.nan)
        np.testing.assert_equal(random_gram_score_sd(count, 8, is_centred), np.nan)
        np.testing.assert_equal(best_gram_score(count, 8, is_centred), np.nan)


def test_two_centred_rows_are_opposite_so_chance_says_zero():
    np.testing.assert_allclose(random_gram_score(2, 40, is_centred=True), 0.0, atol=1e-15)
