"""moegeom.geometry.statistics against the standard error of a mean of scipy.stats."""

import numpy as np
from scipy import stats

from moegeom.geometry.statistics import jackknife_error


def test_error_of_a_mean_of_equal_blocks_is_the_standard_error_of_the_mean():
    values = np.random.default_rng(0).normal(size=(16, 3))
    left = (values.sum(axis=0) - values) / 15
    np.testing.assert_allclose(jackknife_error(left), stats.sem(values, axis=0), rtol=1e-12)


def test_one_block_and_infinite_values_have_no_error():
    np.testing.assert_array_equal(jackknife_error(np.ones((1, 2))), [np.nan, np.nan])
    found = jackknife_error(np.array([[1.0, np.inf], [1.0, 2.0], [1.0, 3.0]]))
    np.testing.assert_array_equal(found, [0.0, np.nan])
