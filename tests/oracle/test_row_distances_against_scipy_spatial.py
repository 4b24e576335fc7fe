"""Oracle: scipy.spatial.distance, which subtracts the rows themselves."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from moegeom.geometry.boundary.linear import row_distances


def inverse(weight) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return 1.0 / cdist(weight.astype(np.float64), weight.astype(np.float64))


def off_diagonal(matrix) -> np.ndarray:
    return matrix[~np.eye(len(matrix), dtype=bool)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("experts", "hidden"), [(2, 1), (5, 3), (64, 40), (128, 16)])
def test_inverse_distances_are_scipys(experts, hidden, dtype):
    random = np.random.default_rng([experts, hidden])
    weight = random.standard_normal((experts, hidden)).astype(dtype)
    found = row_distances(weight).inverse
    np.testing.assert_allclose(off_diagonal(found), off_diagonal(inverse(weight)), rtol=1e-11)


@pytest.mark.parametrize("relative", [1e-2, 1e-3, 1e-4, 1.1e-4, 1e-5, 1e-7, 1e-12])
def test_nearly_equal_rows_do_not_lose_their_distance_to_cancellation(relative):
    """The Gram matrix knows |w|^2 to 1e-16, so a squared distance of 1e-8 |w|^2 to 1e-8."""
    random = np.random.default_rng(3)
    weight = random.standard_normal((8, 200))
    weight[5] = weight[2] * (1.0 + relative)
    weight[6] = weight[3] + relative * random.standard_normal(200)
    found = row_distances(weight).inverse
    np.testing.assert_allclose(off_diagonal(found), off_diagonal(inverse(weight)), rtol=3e-8)


def test_the_smallest_entry_of_each_row_bounds_its_boundaries():
    weight = np.random.default_rng(4).standard_normal((9, 4))
    found = row_distances(weight)
    expected = [np.delete(inverse(weight)[i], i).min() for i in range(9)]
    np.testing.assert_allclose(found.smallest, expected, rtol=1e-12)
