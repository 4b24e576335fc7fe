"""Rows composed with a projection, and random projections: distances stay, numbers are fixed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.geometry.rows import (
    composed_rows,
    cosine_scale,
    projected,
    projection_matrix,
    unit_length,
)


def test_rows_by_hand() -> None:
    rows = unit_length(np.array([[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]], np.float32))
    assert_allclose(rows, [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]], rtol=1e-15)
    projection = np.array([[5.0, 0.0, 10.0], [0.0, 5.0, 0.0]], np.float32)
    weight, bias = composed_rows(np.array([[3.0, 4.0]]), projection, np.array([10.0, -5.0]))
    assert_allclose(weight, [[3.0, 4.0, 6.0]], rtol=1e-15)
    assert_allclose(bias, [2.0], rtol=1e-15)
    assert composed_rows(np.array([[3.0, 4.0]]), projection, None)[1] is None
    # the scale is over the length, and finite at zero
    assert_allclose(cosine_scale(np.array([2.0, 0.0]), 3.0), [1.5, 3e12])


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 5), st.integers(1, 9))
def test_the_affine_map_is_the_two_steps_within_the_stated_bound(seed, experts, width, hidden):
    random = np.random.default_rng(seed)
    rows = random.standard_normal((experts, width)).astype(np.float32)
    projection = random.standard_normal((width, hidden)).astype(np.float32)
    weight, _ = composed_rows(rows, projection, None)
    exact = rows.astype(np.longdouble)
    exact /= np.sqrt((exact**2).sum(axis=1, keepdims=True))
    terms = (width + 4) * 2.0**-53
    bound = terms / (1.0 - terms) * (np.abs(exact) @ np.abs(projection.astype(np.longdouble)))
    assert (np.abs(exact @ projection.astype(np.longdouble) - weight) < bound + 1e-300).all()


def test_the_numbers_are_fixed_in_every_process_and_differ_between_sizes():
    """A change of them makes every stored baseline worthless."""
    first = projection_matrix(3, 2)[0]
    assert_allclose(first, [-0.5384130151920838, -0.9562103996867505], rtol=1e-15)
    program = (
        "from moegeom.geometry.rows import projection_matrix;"
        "print(projection_matrix(40, 5).tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert other.stdout.decode().strip() == projection_matrix(40, 5).tobytes().hex()
    a, b = projection_matrix(8, 4), projection_matrix(8, 5)
    assert np.abs(a * 2.0 - b[:, :4] * np.sqrt(5.0)).max() > 0.01


def test_distances_keep_their_mean_square_and_spread_by_an_eighth():
    """Standard deviation 1 / sqrt(2 count), 12.5 % for 32."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((80, 4096)) * random.uniform(0.1, 10, (80, 1))
    short = projected(rows, 32)
    i, j = np.triu_indices(80, 1)
    ratio = np.linalg.norm(short[i] - short[j], axis=1) / np.linalg.norm(rows[i] - rows[j], axis=1)
    assert_allclose(np.mean(ratio**2), 1.0, atol=0.08)
    assert_allclose(ratio.std(), 0.125, atol=0.02)
    # centring may come before or after
    before, after = projected(rows - rows.mean(axis=0), 6), projected(rows, 6)
    assert_allclose(before, after - after.mean(axis=0), atol=1e-11)
    assert_array_equal(projected(np.zeros((2, 9)), 4), np.zeros((2, 4)))
    assert projected(np.empty((0, 9)), 4).shape == (0, 4)
