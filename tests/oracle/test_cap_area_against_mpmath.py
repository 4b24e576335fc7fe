"""Oracle: mpmath with 50 digits, and directions drawn at random."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity

from moegeom.geometry.gram import cap_area_log10, cap_constant, cap_half_angle, mean_pairwise_cosine

DIMENSIONS = [2, 3, 5, 64, 1000, 4096, 7168]
NEAR_ONE = [1.0 - 1e-4, 1.0 - 1e-6, 1.0 - 1e-9, 1.0 - 1e-13, 1.0 - 2.0**-53]
SINES = [1e-300, 1e-160, 1e-8, 1e-3, 0.1, 0.5, 0.7, 0.9, 0.99, 0.999, *NEAR_ONE]


def area(sine: float, dimension: int):
    with mpmath.workdps(50):
        half = mpmath.mpf(dimension - 1) / 2
        square = mpmath.mpf(sine) ** 2
        return mpmath.betainc(half, 0.5, 0, square, regularized=True) / 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("sine", SINES)
def test_the_logarithm_of_the_area_is_mpmaths(sine, dimension):
    expected = float(mpmath.log10(area(sine, dimension)))
    np.testing.assert_allclose(cap_area_log10(sine, dimension), expected, rtol=1e-11)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_area_grows_with_the_angle_to_half_the_sphere(dimension):
    found = [cap_area_log10(sine, dimension) for sine in [0.0, *SINES, 1.0]]
    assert found[0] == -math.inf
    np.testing.assert_array_less(found[:-1], found[1:])
    np.testing.assert_allclose(found[-1], math.log10(0.5), rtol=1e-15)
    np.testing.assert_equal(cap_area_log10(1.0 + 1e-9, dimension), found[-1])
    assert math.isnan(cap_area_log10(-0.1, dimension))


def test_on_a_circle_the_area_is_the_angle():
    angles = np.linspace(0.01, math.pi / 2, 50)
    found = [cap_area_log10(math.sin(a), 2) for a in angles]
    np.testing.assert_allclose(np.power(10.0, found), angles / math.pi, rtol=1e-7)


def test_on_the_sphere_of_space_the_area_is_archimedes():
    angles = np.linspace(0.01, 1.5, 50)
    found = [cap_area_log10(math.sin(a), 3) for a in angles]
    np.testing.assert_allclose(np.power(10.0, found), (1.0 - np.cos(angles)) / 2.0, rtol=1e-9)


@pytest.mark.parametrize("dimension", [4, 9])
def test_the_area_is_the_share_of_random_directions(dimension):
    drawn = np.random.default_rng(0).standard_normal((200_000, dimension))
    cosine = drawn[:, 0] / np.linalg.norm(drawn, axis=1)
    for angle in (0.6, 1.0, 1.4):
        share = (cosine > math.cos(angle)).mean()
        found = 10.0 ** cap_area_log10(math.sin(angle), dimension)
        np.testing.assert_allclose(share, found, rtol=0, atol=4 * math.sqrt(found / 200_000))


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_constant_is_the_limit_of_small_caps(dimension):
    sine = 1e-12
    ratio = area(sine, dimension) / mpmath.mpf(sine) ** (dimension - 1)
    np.testing.assert_allclose(cap_constant(dimension), float(ratio), rtol=1e-10)


def test_in_high_dimensions_the_leading_term_needs_the_cosine():
    """docs/theory.md B10: without it the logarithm is off by 0.0624."""
    leading = math.log10(cap_constant(7168)) + 7167 * math.log10(0.5)
    found = cap_area_log10(0.5, 7168)
    np.testing.assert_allclose(found - leading, 0.0625, atol=1e-4)
    np.testing.assert_allclose(found, leading - math.log10(math.sqrt(0.75)), atol=1e-4)


def test_the_half_angle_holds_the_ball():
    """Directions of the ball of radius R around mu, and a tangent to it."""
    random = np.random.default_rng(0)
    mu = np.array([3.0, 1.0, -2.0, 0.5])
    radius = 1.3
    angle = cap_half_angle(radius, float(np.linalg.norm(mu)))
    step = random.standard_normal((20_000, 4))
    points = mu + radius * step / np.linalg.norm(step, axis=1, keepdims=True)
    found = np.arccos(cosine_similarity(points, mu[None])[:, 0])
    assert found.max() <= angle + 1e-12
    np.testing.assert_allclose(found.max(), angle, rtol=1e-3)


def test_half_angles_at_the_corners():
    np.testing.assert_equal(cap_half_angle(0.0, 2.0), 0.0)
    np.testing.assert_allclose(cap_half_angle(1.0, 2.0), math.pi / 6, rtol=1e-15)
    for radius, length in [(2.0, 2.0), (3.0, 2.0), (0.0, 0.0), (math.nan, 1.0), (-1.0, 2.0)]:
        assert math.isnan(cap_half_angle(radius, length))


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_the_mean_cosine_is_that_of_all_pairs(shift):
    rows = np.random.default_rng(1).standard_normal((70, 9)) + shift
    cosine = cosine_similarity(rows)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = mean_pairwise_cosine(float(np.linalg.norm(unit.sum(axis=0))), 70)
    expected = cosine[~np.eye(70, dtype=bool)].mean()
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-15)


def test_mean_cosines_at_the_corners():
    np.testing.assert_allclose(mean_pairwise_cosine(5.0, 5), 1.0)
    np.testing.assert_allclose(mean_pairwise_cosine(0.0, 5), -0.25)
    assert math.isnan(mean_pairwise_cosine(1.0, 1))
    assert math.isnan(mean_pairwise_cosine(0.0, 0))
