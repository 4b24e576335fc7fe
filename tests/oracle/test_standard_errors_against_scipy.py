"""moegeom.geometry.statistics against standard errors of means of scipy.stats."""

import numpy as np
import pytest
from scipy import stats

from moegeom.geometry.statistics import clustered_error, jackknife_error


def test_error_of_a_mean_of_equal_blocks_is_the_standard_error_of_the_mean():
    values = np.random.default_rng(0).normal(size=(16, 3))
    left = (values.sum(axis=0) - values) / 15
    np.testing.assert_allclose(jackknife_error(left), stats.sem(values, axis=0), rtol=1e-12)


def test_one_block_and_infinite_values_have_no_error():
    np.testing.assert_array_equal(jackknife_error(np.ones((1, 2))), [np.nan, np.nan])
    found = jackknife_error(np.array([[1.0, np.inf], [1.0, 2.0], [1.0, 3.0]]))
    np.testing.assert_array_equal(found, [0.0, np.nan])


def test_error_over_equal_clusters_is_the_standard_error_of_their_means():
    values = np.random.default_rng(0).normal(size=(12, 50)) + np.arange(12)[:, None]
    cluster = np.repeat(np.arange(12)[::-1] * 7, 50)
    influence = (values - values.mean()).ravel() / values.size
    found = clustered_error(influence, cluster)
    assert found == pytest.approx(stats.sem(values.mean(axis=1)), rel=1e-12)


def test_a_ratio_over_unequal_clusters_spreads_as_its_error_says():
    rng = np.random.default_rng(1)
    found, errors = [], []
    for _ in range(400):
        cluster = np.repeat(np.arange(40), rng.integers(5, 60, 40))
        values = rng.normal(size=40)[cluster] + rng.normal(size=len(cluster))
        found.append(values.mean())
        errors.append(clustered_error((values - values.mean()) / len(values), cluster) or 0.0)
    assert 0.9 < np.mean(errors) / np.std(found) < 1.1


def test_one_cluster_has_no_error():
    assert clustered_error(np.array([0.5, -0.5]), np.zeros(2, np.int64)) is None
