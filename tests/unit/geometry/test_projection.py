"""Projections keep distances, and are the same numbers everywhere."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from moegeom.geometry.rows import projected, projection_matrix


@pytest.fixture
def random():
    return np.random.default_rng(2)


def test_the_numbers_are_fixed():
    """A change of them makes every stored baseline worthless."""
    found = projection_matrix(3, 2)
    np.testing.assert_allclose(found[0], [-0.5384130151920838, -0.9562103996867505], rtol=1e-15)


def test_another_process_draws_the_same_numbers():
    program = (
        "from moegeom.geometry.rows import projection_matrix;"
        "print(projection_matrix(40, 5).tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert other.stdout.decode().strip() == projection_matrix(40, 5).tobytes().hex()


def test_sizes_have_numbers_of_their_own():
    a, b = projection_matrix(8, 4), projection_matrix(8, 5)
    np.testing.assert_array_less(0.01, np.abs(a * 2.0 - b[:, :4] * np.sqrt(5.0)).max())


def test_distances_keep_their_mean_square_and_spread_by_an_eighth(random):
    """Standard deviation 1 / sqrt(2 count), 12.5 % for 32."""
    rows = random.standard_normal((80, 4096)) * random.uniform(0.1, 10, (80, 1))
    short = projected(rows, 32)
    i, j = np.triu_indices(80, 1)
    ratio = np.linalg.norm(short[i] - short[j], axis=1) / np.linalg.norm(rows[i] - rows[j], axis=1)
    np.testing.assert_allclose(np.mean(ratio**2), 1.0, atol=0.08)
    np.testing.assert_allclose(ratio.std(), 0.125, atol=0.02)


def test_centring_may_come_before_or_after(random):
    rows = random.standard_normal((7, 30))
    before, after = projected(rows - rows.mean(axis=0), 6), projected(rows, 6)
    np.testing.assert_allclose(before, after - after.mean(axis=0), atol=1e-13)


def test_zero_rows_stay_zero_and_no_row_gives_none():
    np.testing.assert_array_equal(projected(np.zeros((2, 9)), 4), np.zeros((2, 4)))
    assert projected(np.empty((0, 9)), 4).shape == (0, 4)
