"""Shares of balls near boundaries, by draws, partitions and another library."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest

from moegeom.geometry.thickening import (
    ball_logits,
    log_half_binomial,
    log_order_bound,
    log_slab_share,
    tube_share,
)


def points(dimension: int, number: int, seed: int = 0) -> np.ndarray:
    """Uniform in the unit ball."""
    random = np.random.default_rng(seed)
    found = random.standard_normal((number, dimension))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return found * random.random((number, 1)) ** (1.0 / dimension)


@pytest.mark.parametrize(("dimension", "order"), [(3, 1), (6, 4), (7168, 1), (7168, 3)])
def test_half_binomials_are_quotients_of_gammas(dimension, order):
    with mpmath.workdps(40):
        half = mpmath.mpf(dimension) / 2
        expected = mpmath.log(mpmath.binomial(half, mpmath.mpf(order) / 2))
    assert log_half_binomial(dimension, order) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("dimension", "distance", "width"),
    [
        *((3, -0.5, 0.1), (3, 0.0, 0.2), (40, 0.2, 0.05), (40, 0.02, 0.05), (7168, 0.51, 0.01)),
        *((7168, 0.003, 0.004), (7168, 0.99, 0.005), (5, 0.95, 0.1), (100, 0.1, 1e-9)),
    ],
)
def test_a_slab_is_the_integral_of_the_sections_of_its_ball(dimension, distance, width):
    with mpmath.workdps(60):
        low, high = max(-1, distance - width), min(1, distance + width)
        power = (mpmath.mpf(dimension) - 1) / 2
        whole = mpmath.beta(mpmath.mpf(1) / 2, power + 1)
        # most of it may lie at the end that is nearer to the middle
        steps = [mpmath.mpf(step) / 64 for step in range(65)]
        near, far = (low, high) if abs(low) < abs(high) else (high, low)
        cuts = sorted(near + (far - near) * step**5 for step in steps)
        share = mpmath.quad(lambda s: (1 - s * s) ** power, cuts) / whole
        expected = float(mpmath.log(share))
    assert log_slab_share(dimension, distance, width, 1.0) == pytest.approx(expected, rel=1e-9)


def test_the_sign_of_the_far_side_counts():
    found = math.exp(log_slab_share(3, -0.5, 0.1, 1.0))
    inside = np.abs(points(3, 400_000)[:, 0] + 0.5) < 0.1
    assert found == pytest.approx(0.112, abs=1e-12)  # .680 without it
    assert found == pytest.approx(inside.mean(), abs=0.003)


@pytest.mark.parametrize("dimension", [2, 3, 40, 7168])
def test_slabs_side_by_side_are_the_ball(dimension):
    edges = np.linspace(-2.0, 2.0, 33)
    shares = [
        log_slab_share(dimension, (a + b) / 2, (b - a) / 2, 2.0)
        for a, b in itertools.pairwise(edges)
    ]
    assert sum(map(math.exp, shares)) == pytest.approx(1.0, abs=1e-12)
    assert log_slab_share(dimension, 3.0, 0.5, 2.0) == -math.inf


@pytest.mark.parametrize(("order", "expected"), [(2, 0.174717), (3, 0.064354)])
def test_a_tube_holds_the_points_that_are_near_its_flat(order, expected):
    found = tube_share(6, order, 0.4, 0.3, 1.0)
    away = points(6, 400_000)[:, :order].copy()
    away[:, 0] -= 0.4
    near = np.linalg.norm(away, axis=1) < 0.3
    assert found == pytest.approx(expected, abs=1e-6)
    assert found == pytest.approx(near.mean(), abs=0.003)


def test_tubes_at_their_corners():
    assert tube_share(5, 1, 0.2, 0.1, 1.0) == math.exp(log_slab_share(5, 0.2, 0.1, 1.0))
    assert tube_share(5, 2, 3.0, 0.5, 1.0) == 0.0
    assert tube_share(5, 3, 0.0, 2.0, 1.0) == pytest.approx(1.0, abs=1e-8)
    assert tube_share(5, 2, 0.3, 5.0, 1.0) == pytest.approx(1.0, abs=1e-8)


def test_bounds_of_orders_in_4096_dimensions():
    found = [log_order_bound(64, n, 4096, 0.01 / 64) / math.log(10.0) for n in (1, 2, 3, 4)]
    np.testing.assert_allclose(found, [1.2065, 0.3187, -0.7722, -2.0211], atol=1e-4)
    assert log_order_bound(3, 3, 8, 0.1) == -math.inf


def test_a_bound_is_never_below_what_is_near():
    rows, inside = np.random.default_rng(1).standard_normal((5, 6)), points(6, 20_000)
    least = np.full(len(inside), np.inf)
    for i, j in itertools.combinations(range(5), 2):
        away = rows[i] - rows[j]
        least = np.minimum(least, np.abs(inside @ away) / np.linalg.norm(away))
    for width in (0.01, 0.05, 0.1):
        assert (least < width).mean() <= math.exp(log_order_bound(5, 1, 6, width))


@pytest.mark.parametrize(("experts", "hidden"), [(12, 96), (12, 7)])
def test_logits_of_a_ball_are_those_of_its_points(experts, hidden):
    random = np.random.default_rng(2)
    rows, bias = random.standard_normal((experts, hidden)), random.standard_normal(experts)
    found = ball_logits(rows, bias, 1.7, 100_000, random)
    direct = 1.7 * points(hidden, 100_000, 5) @ rows.T + bias
    size = direct.std(axis=0)
    np.testing.assert_allclose((found.mean(axis=0) - direct.mean(axis=0)) / size, 0.0, atol=0.02)
    scale = np.outer(size, size)
    np.testing.assert_allclose(np.cov(found.T) / scale, np.cov(direct.T) / scale, atol=0.03)
    # and what is near a boundary of the first two
    away = rows[0] - rows[1]
    for width in (0.05, 0.3):
        near = [
            (np.abs(z[:, 0] - z[:, 1]) < width * np.linalg.norm(away)).mean()
            for z in (found, direct)
        ]
        assert near[0] == pytest.approx(near[1], abs=0.006)
