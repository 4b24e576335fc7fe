"""Oracle: scikit-learn's neighbours, SciPy's distances, the worked cubes, eigenvalues of samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.neighbors import NearestNeighbors

from moegeom.geometry.space import (
    centred_gram,
    distinct_rows,
    levina_bickel,
    nearest_distances,
    participation_ratio,
    participation_ratio_corrected,
    squared_distances,
    two_nn,
    two_nn_fitted,
)


def random_rows(seed, tokens=300, dimension=12):
    return np.random.default_rng(seed).standard_normal((tokens, dimension))


def far_clusters():
    """Points 1e-6 apart, a million from the centre: their products hold nothing of distances."""
    random = np.random.default_rng(0)
    centre = random.standard_normal((2, 40)) * 1e6
    return centre[np.repeat([0, 1], 60)] + random.standard_normal((120, 40)) * 1e-6


def outliers():
    """A few tokens of a thousand times the norm, as attention sinks have."""
    rows = random_rows(1)
    rows[:3] *= 1e3
    return rows


CLOUDS = {
    "gaussian": random_rows(0),
    "off_centre": random_rows(2) + 1e5,
    "outliers": outliers(),
    "far_clusters": far_clusters(),
    "line": np.linspace(0.0, 1.0, 200)[:, None] ** 2 * np.ones((1, 3)),
    "repeated": np.repeat(random_rows(3, 40), 30, axis=0),
    "one_dimension": random_rows(4, dimension=1),
}


@pytest.mark.parametrize("name", CLOUDS)
def test_nearest_distances_are_those_of_all_pairs(name):
    rows = CLOUDS[name]
    apart = np.sort(cdist(rows, rows), axis=1)[:, 1:21]  # by differences of coordinates
    nearest = nearest_distances(rows, 20)
    np.testing.assert_allclose(nearest, apart, rtol=1e-9, atol=0)
    np.testing.assert_array_equal(nearest_distances(rows, 20, centred_gram(rows)), nearest)


@pytest.mark.parametrize("name", ["gaussian", "outliers"])
def test_nearest_distances_are_scikit_learns(name):
    rows = CLOUDS[name]
    tree = NearestNeighbors(n_neighbors=21, algorithm="ball_tree").fit(rows)
    np.testing.assert_allclose(nearest_distances(rows, 20), tree.kneighbors(rows)[0][:, 1:], 1e-9)


def test_neighbours_that_do_not_exist_are_nan():
    found = nearest_distances(np.array([[0.0], [3.0], [7.0]]), 4)
    np.testing.assert_array_equal(found[:, 2:], np.nan)
    np.testing.assert_allclose(found[:, :2], [[3, 7], [3, 4], [4, 7]], rtol=1e-14)
    np.testing.assert_array_equal(nearest_distances(np.zeros((1, 5)), 2), [[np.nan, np.nan]])
    assert nearest_distances(np.zeros((0, 5)), 2).shape == (0, 2)


@pytest.mark.parametrize("name", CLOUDS)
def test_squared_distances_err_by_no_more_than_they_say(name):
    rows = CLOUDS[name]
    found = squared_distances(rows)
    expected = cdist(rows, rows, "sqeuclidean")
    length = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
    bound = (rows.shape[1] + 8) * 2.0**-53 * np.add.outer(length, length) ** 2
    np.testing.assert_array_less(np.abs(found - expected), bound + 1e-14 * expected + 1e-300)
    np.testing.assert_array_equal(np.diag(found), 0.0)
    np.testing.assert_array_equal(found, found.T)
    assert found.min() >= 0.0


def test_distinct_rows_are_the_first_of_each():
    rows = random_rows(5, 6)[[3, 1, 3, 0, 1, 5]]
    np.testing.assert_array_equal(distinct_rows(rows), [0, 1, 3, 5])
    np.testing.assert_array_equal(distinct_rows(np.array([[0.0], [-0.0], [1.0]])), [0, 2])
    np.testing.assert_array_equal(distinct_rows(np.zeros((4, 0))), [0])
    np.testing.assert_array_equal(distinct_rows(np.zeros((0, 4))), [])


def test_distinct_rows_are_numpys_unique_ones():
    rows = np.random.default_rng(0).integers(0, 3, (200, 4)).astype(np.float64)
    _, first = np.unique(rows, axis=0, return_index=True)
    np.testing.assert_array_equal(distinct_rows(rows), np.sort(first))


@pytest.mark.parametrize(
    ("dimension", "two", "averaged"), [(2, 1.96, 1.96), (5, 4.65, 4.54), (10, 8.40, 8.23)]
)
def test_cubes_have_the_worked_dimensions(dimension, two, averaged):
    """docs/theory.md B12, for other draws; the boundary makes them smaller than the dimension."""
    rows = np.random.default_rng(dimension).random((3000, dimension))
    nearest = nearest_distances(rows, 20)
    spread = 4.0 / np.sqrt(3000)  # of the mean of 3000 exponential numbers, four sigmas
    np.testing.assert_allclose(two_nn(nearest), two, rtol=spread)
    np.testing.assert_allclose(two_nn_fitted(nearest), two, rtol=2 * spread)
    found = [levina_bickel(nearest, k) for k in (10, 15, 20)]
    np.testing.assert_allclose(np.median(found), averaged, rtol=0.03)
    assert found == sorted(found, reverse=True)  # wider neighbourhoods see more of the boundary


def test_a_folded_sheet_has_its_own_dimension_and_not_that_of_the_space():
    u, v = np.random.default_rng(0).random((2, 3000)) * 3.0
    rows = np.stack([np.cos(u) * (u + 2), np.sin(u) * (u + 2), v, v**2, u * 0], axis=1)
    nearest = nearest_distances(rows, 20)
    found = [two_nn(nearest), two_nn_fitted(nearest), levina_bickel(nearest, 10)]
    np.testing.assert_allclose(found, 2.0, rtol=0.08)


def ratios_of(dimension, tokens, seed):
    """First neighbour at 1, second drawn as points of that dimension have it: P(mu > m) = m^-d."""
    second = np.random.default_rng(seed).random(tokens) ** (-1.0 / dimension)
    return np.stack([np.ones(tokens), second], axis=1)


@pytest.mark.parametrize("dimension", [1.0, 7.5, 40.0])
def test_two_nn_is_unbiased_for_its_own_law(dimension):
    found = [two_nn(ratios_of(dimension, 30, seed)) for seed in range(2000)]
    error = 4 * np.std(found) / np.sqrt(len(found))
    np.testing.assert_allclose(np.mean(found), dimension, rtol=0, atol=error)


def test_the_fit_ignores_what_happens_to_the_largest_tenth():
    nearest = ratios_of(6.0, 2000, 0)
    spoilt = nearest.copy()
    worst = np.argsort(nearest[:, 1])[1850:]
    spoilt[worst, 1] = 1e6
    np.testing.assert_array_equal(two_nn_fitted(spoilt), two_nn_fitted(nearest))
    np.testing.assert_allclose(two_nn_fitted(nearest), 6.0, rtol=0.1)
    assert two_nn(spoilt) < 3.0


def test_the_fit_is_the_least_squares_line_through_zero():
    nearest = ratios_of(3.0, 50, 1)
    x = np.sort(np.log(nearest[:, 1]))[:45]
    y = -np.log(1.0 - np.arange(1, 46) / 50)
    slope, *_ = np.linalg.lstsq(x[:, None], y, rcond=None)
    np.testing.assert_allclose(two_nn_fitted(nearest), slope[0], rtol=1e-12)
    assert np.isfinite(two_nn_fitted(nearest, 1.0))


def test_levina_bickel_token_by_token():
    nearest = nearest_distances(random_rows(7, 60), 5)
    inverse = [sum(np.log(row[4] / row[j]) for j in range(4)) / 4 for row in nearest]
    np.testing.assert_allclose(levina_bickel(nearest, 5), 60 / sum(inverse), rtol=1e-12)


def test_dimensions_do_not_depend_on_scale_shift_or_rotation():
    rows = random_rows(8, 200, 6)
    turn = np.linalg.qr(random_rows(9, 6, 6))[0]
    for moved in (rows * 1e-7, rows + 50.0, rows @ turn, rows[::-1]):
        one, other = nearest_distances(rows, 10), nearest_distances(moved, 10)
        for estimate in (two_nn, two_nn_fitted, lambda n: levina_bickel(n, 10)):
            np.testing.assert_allclose(estimate(other), estimate(one), rtol=1e-7)


def test_too_few_or_equal_tokens_have_no_dimension():
    for rows in (np.zeros((0, 3)), np.zeros((1, 3)), np.eye(2, 3), np.zeros((50, 3))):
        nearest = nearest_distances(rows, 4)
        assert np.isnan(two_nn(nearest))
        assert np.isnan(two_nn_fitted(nearest))
        assert np.isnan(levina_bickel(nearest, 4))
    ring = np.exp(2j * np.pi * np.arange(8) / 8)  # both neighbours equally far
    nearest = nearest_distances(np.stack([ring.real, ring.imag], axis=1).round(12), 2)
    assert not two_nn(nearest) < 1e6
    assert np.isnan(levina_bickel(nearest_distances(random_rows(0), 4), 1))


@pytest.mark.parametrize("shape", [(30, 200), (200, 30)])
def test_participation_ratio_is_that_of_the_eigenvalues_of_the_covariance(shape):
    rows = random_rows(10, *shape) * np.arange(1.0, shape[1] + 1)
    values = np.linalg.eigvalsh(np.cov(rows.T))
    expected = values.sum() ** 2 / (values**2).sum()
    np.testing.assert_allclose(participation_ratio(centred_gram(rows)), expected, rtol=1e-11)


def test_the_correction_takes_the_size_of_the_sample_out():
    """docs/theory.md B12: 40 dimensions, 200 tokens: 32.58 raw, 39.15 corrected."""
    raw = np.array([participation_ratio(centred_gram(random_rows(s, 200, 40))) for s in range(40)])
    corrected = [participation_ratio_corrected(r, 200) for r in raw.tolist()]
    np.testing.assert_allclose(raw.mean(), 32.58, atol=1.0)
    np.testing.assert_allclose(np.mean(corrected), 40.0, rtol=0.015)
    np.testing.assert_allclose(participation_ratio_corrected(32.58, 200), 39.15, atol=0.01)


def test_participation_at_the_corners():
    assert np.isnan(participation_ratio(np.zeros((4, 4))))
    np.testing.assert_allclose(participation_ratio(centred_gram(CLOUDS["line"])), 1.0, rtol=1e-12)
    assert np.isnan(participation_ratio_corrected(np.nan, 50))
    assert np.isnan(participation_ratio_corrected(1.0, 1))
    assert participation_ratio_corrected(9.0, 10) == np.inf  # white noise: as many as there can be
