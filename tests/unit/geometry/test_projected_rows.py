from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moegeom.geometry.rows import composed_rows, cosine_scale, unit_length


def test_rows_have_length_one_and_a_row_of_zeros_stays_one() -> None:
    found = unit_length(np.array([[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]], np.float32))
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]], rtol=1e-15)


def test_a_composed_row_by_hand() -> None:
    projection = np.array([[5.0, 0.0, 10.0], [0.0, 5.0, 0.0]], np.float32)
    weight, bias = composed_rows(np.array([[3.0, 4.0]]), projection, np.array([10.0, -5.0]))
    np.testing.assert_allclose(weight, [[3.0, 4.0, 6.0]], rtol=1e-15)
    np.testing.assert_allclose(bias, [2.0], rtol=1e-15)
    assert composed_rows(np.array([[3.0, 4.0]]), projection, None)[1] is None


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 5), st.integers(1, 9))
def test_the_affine_map_is_the_two_steps_within_the_stated_bound(
    seed: int, experts: int, projected: int, hidden: int
) -> None:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((experts, projected)).astype(np.float32)
    projection = random.standard_normal((projected, hidden)).astype(np.float32)
    weight, _ = composed_rows(rows, projection, None)
    exact = rows.astype(np.longdouble)
    exact /= np.sqrt((exact**2).sum(axis=1, keepdims=True))
    terms = (projected + 4) * 2.0**-53
    bound = terms / (1.0 - terms) * (np.abs(exact) @ np.abs(projection.astype(np.longdouble)))
    error = np.abs(exact @ projection.astype(np.longdouble) - weight)
    np.testing.assert_array_less(error, bound + 1e-300)


def test_the_scale_is_over_the_length_and_finite_at_zero() -> None:
    np.testing.assert_allclose(cosine_scale(np.array([2.0, 0.0]), 3.0), [1.5, 3e12])
