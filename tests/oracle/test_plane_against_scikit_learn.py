"""moegeom.geometry.space: principal components of tokens, neighbours and silhouette."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import silhouette_score
from sklearn.neighbors import NearestNeighbors

from moegeom.geometry.space import (
    neighbours_of_same_label,
    principal_components,
    silhouette,
    squared_distances,
)


@pytest.fixture(scope="module", params=range(3))
def drawn(request) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(request.param)
    label = rng.integers(0, 5, 200)
    rows = rng.normal(size=(5, 30))[label] * request.param + rng.normal(size=(200, 30))
    return rows * np.linspace(3.0, 1.0, 30), label


@pytest.mark.parametrize("count", [2, 7, 30])
def test_coordinates_are_those_of_the_largest_singular_values(drawn, count):
    rows, _ = drawn
    centred = rows - rows.mean(axis=0)
    left, sizes, right = np.linalg.svd(centred, full_matrices=False)
    found = principal_components(rows, squared_distances(rows), count)
    expected = np.abs(left[:, :count] * sizes[:count])
    np.testing.assert_allclose(np.abs(found.points), expected, atol=1e-8)
    np.testing.assert_allclose(np.abs(found.axes), np.abs(right[:count]), atol=1e-8)
    np.testing.assert_allclose(found.shares, sizes[:count] ** 2 / (sizes**2).sum(), rtol=1e-9)
    np.testing.assert_allclose(centred @ found.axes.T, found.points, atol=1e-8)
    assert (found.points[np.abs(found.points).argmax(axis=0), np.arange(count)] > 0).all()


def test_the_share_of_neighbours_is_that_of_sorted_distances(drawn):
    rows, label = drawn
    tree = NearestNeighbors(n_neighbors=11).fit(rows)
    nearest = tree.kneighbors(rows, return_distance=False)[:, 1:]
    share, chance = neighbours_of_same_label(squared_distances(rows), label, 10)
    assert share == pytest.approx((label[nearest] == label[:, None]).mean())
    pairs = label[:, None] == label[None, :]
    assert chance == pytest.approx((pairs.sum() - 200) / (200 * 199))


def test_the_silhouette_is_that_of_scikit_learn(drawn):
    rows, label = drawn
    label = np.where(np.arange(200) == 7, 99, label)  # one alone with its label
    found = silhouette(squared_distances(rows), label)
    assert found == pytest.approx(silhouette_score(rows, label), abs=1e-9)


def test_equal_points_and_a_single_label_have_no_figure():
    rows = np.ones((20, 4))
    found = principal_components(rows, squared_distances(rows))
    assert np.isnan(found.shares).all()
    assert not found.points.any()
    label = np.zeros(20, np.int64)
    assert math.isnan(silhouette(squared_distances(rows), label))
    assert all(
        map(math.isnan, neighbours_of_same_label(squared_distances(rows)[:5, :5], label[:5], 10))
    )
