"""Oracle: mpmath's quadrature of Gaussian densities, SLSQP, and paths."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import norm

from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.noise import noisy_rows
from moegeom.geometry.occupation import (
    capped_occupation,
    occupation_bound,
    occupation_integral,
    occupations,
    sigmas_to_tube,
    slab_occupation,
    tube_occupation,
)
from moegeom.geometry.selection import top_k


def quadrature(integrand, horizon):
    ends = [0, horizon / 1000, horizon / 100, horizon / 10, horizon]
    return float(mpmath.quad(integrand, ends))


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("b", [0.02, 0.7, 6.0])
def test_integrals_are_those_of_their_definition(order, b):
    found = occupation_integral(order, np.array([b]), 2.5)
    expected = quadrature(lambda t: t ** (-mpmath.mpf(order) / 2) * mpmath.exp(-b / t), 2.5)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("constant", [1e-4, 0.3, 9.0])
def test_capped_integrals_are_those_of_their_definition(order, constant):
    edge = constant ** (2.0 / order)
    ends = [0.0, *[end for end in (edge,) if end < 1.3], 1.3]
    expected = mpmath.quad(lambda t: min(1.0, constant * t ** (-order / 2.0)) if t else 1.0, ends)
    found = capped_occupation(order, np.array([constant]), 1.3)
    np.testing.assert_allclose(found, [float(expected)], rtol=1e-9)


@pytest.mark.parametrize("m", [0.0, 0.05, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("horizon", [0.01, 1.0, 30.0])
def test_time_in_a_slab_is_the_integral_of_its_probability(m, horizon):
    def inside(t):
        root = mpmath.sqrt(t) if t else mpmath.mpf("1e-30")
        return mpmath.ncdf((0.1 - m) / root) - mpmath.ncdf((-0.1 - m) / root)

    found = slab_occupation(np.array([m, np.inf]), np.full(2, 0.1), horizon)
    np.testing.assert_allclose(found, [quadrature(inside, horizon), 0.0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("m", [0.0, 0.2, 1.0, 3.0])
def test_a_tube_of_codimension_one_is_a_slab(m):
    found = tube_occupation(1, m, 0.3, 2.0, 0.7)
    slab = slab_occupation(np.array([m / 0.7]), np.array([0.3 / 0.7]), 2.0)
    np.testing.assert_allclose(found, slab[0], rtol=1e-8)


@pytest.mark.parametrize("m", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("order", [2, 3])
def test_time_in_a_tube_is_that_of_gaussian_points(order, m):
    random = np.random.default_rng(order)
    time = 2.0 * random.random(400_000)
    points = np.sqrt(time)[:, None] * random.standard_normal((400_000, order))
    points[:, 0] += m
    inside = np.linalg.norm(points, axis=1) <= 0.3
    error = inside.std() / np.sqrt(len(inside))
    assert abs(tube_occupation(order, m, 0.3, 2.0) - 2.0 * inside.mean()) < 8.0 * error


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("m", [0.0, 0.2, 0.31, 1.0, 4.0])
@pytest.mark.parametrize("horizon", [0.05, 2.0, 50.0])
def test_bounds_are_above_the_exact_time_and_never_beyond_the_horizon(order, m, horizon):
    sharp = np.array([max(m - 0.3, 0.0) / 0.8])
    bound = occupation_bound(order, sharp, np.array([0.8**order]), 0.3, horizon)[0]
    exact = tube_occupation(order, m, 0.3, horizon, 0.8)
    assert exact * (1.0 - 1e-7) <= bound <= horizon


def test_the_worked_slab_is_below_its_bound_and_that_below_the_published_one():
    one = np.ones(1)
    exact = slab_occupation(one, np.array([0.1]), 1.0)[0]
    bound = occupation_bound(1, np.array([0.9]), one, 0.1, 1.0)[0]
    published = 0.2 / np.sqrt(2.0 * np.pi) * 2.0
    np.testing.assert_allclose([exact, bound], [0.0334875, 0.0401725], atol=5e-8)
    assert exact < bound < published == pytest.approx(0.1596, abs=5e-5)


def test_the_distance_to_a_tube_is_the_least_one_and_at_least_the_published():
    random = np.random.default_rng(4)
    for _ in range(8):
        root = random.standard_normal((3, 3))
        covariance, offset = root @ root.T + 0.1 * np.eye(3), random.standard_normal(3)
        inverse = np.linalg.inv(covariance)
        found = sigmas_to_tube(offset, covariance, 0.4)
        least = minimize(
            lambda w, m=offset, q=inverse: (m - w) @ q @ (m - w),
            0.2 * offset / np.linalg.norm(offset),
            method="SLSQP",
            constraints={"type": "ineq", "fun": lambda w: 0.16 - w @ w},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        expected = np.sqrt(least.fun) if np.linalg.norm(offset) > 0.4 else 0.0
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        published = np.sqrt(offset @ inverse @ offset)
        published -= 0.4 / np.sqrt(np.linalg.eigvalsh(covariance)[0])
        assert found >= published - 1e-12
    assert sigmas_to_tube(np.array([0.1, 0.2]), np.eye(2), 0.3) == 0.0
    plain = sigmas_to_tube(np.array([3.0, 4.0]), 4.0 * np.eye(2), 1.0)
    np.testing.assert_allclose(plain, 2.0, rtol=1e-12)


def occupied(weight, z, k, orders, width, draws, factor=1.0, drift=None, seed=0):
    weight = np.array(weight, dtype=np.float64)
    return occupations(
        np.array(z),
        weight,
        noisy_rows(weight, factor),
        row_distances(weight, np.arange(len(weight)) / 7.0),
        k,
        orders,
        width,
        1.0,
        draws,
        np.random.default_rng(seed),
        drift,
    )


def test_draws_give_the_slab_however_wide_the_noise():
    (found,) = occupied([[1.0, 0.5], [0.0, 0.0]], [0.9, 0.0], 1, (1,), 0.1, 400_000, 0.7)
    m = 0.9 / np.hypot(1.0, 0.5) / 0.7
    exact = slab_occupation(np.array([m]), np.array([0.1 / 0.7]), 1.0)[0]
    assert abs(found.share - exact) < 4.0 * found.error < 0.01


def test_draws_of_order_2_give_the_tube_where_three_experts_are_all():
    """Rows of an equilateral triangle: all three tie in one point of their plane."""
    angles = 2.0 * np.pi / 3.0 * np.arange(3)
    weight = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    at = np.array([0.35, 0.1])
    found = occupied(weight, weight @ at, 1, (2, 1, 2), 0.3, 2500)
    exact = tube_occupation(2, float(np.linalg.norm(at)), 0.3, 1.0)
    assert abs(found[1].share - exact) < 4.0 * found[1].error < 0.04
    assert found[0].share > found[1].share
    assert found[0].undecided == found[1].undecided == 0.0


def test_draws_with_drift_are_what_paths_do():
    random = np.random.default_rng(8)
    weight = random.standard_normal((5, 3))
    at, gamma, factor = random.standard_normal(3), np.array([0.8, -0.4, 0.6]), 0.5
    (found,) = occupied(weight, weight @ at, 2, (1,), 0.1, 60_000, factor, weight @ gamma)
    (still,) = occupied(weight, weight @ at, 2, (1,), 0.1, 60_000, factor)
    assert abs(found.share - still.share) > 8.0 * found.error
    paths, steps = 2000, 200
    place, near = np.tile(at, (paths, 1)), np.zeros(paths)
    apart = np.linalg.norm(weight[:, None] - weight, axis=2) + np.eye(5)
    for _ in range(steps):
        place += gamma / steps + factor / np.sqrt(steps) * random.standard_normal((paths, 3))
        z = place @ weight.T
        is_chosen = np.zeros(z.shape, dtype=bool)
        np.put_along_axis(is_chosen, top_k(z, 2).astype(np.int64), True, axis=1)
        is_pair = is_chosen[:, :, None] & ~is_chosen[:, None, :]
        distance = (z[:, :, None] - z[:, None, :]) / apart
        near += np.where(is_pair, distance, np.inf).min(axis=(1, 2)) <= 0.1
    error = np.hypot(found.error, (near / steps).std() / np.sqrt(paths))
    assert abs(found.share - near.mean() / steps) < 4.0 * error + 0.005


def test_no_draw_near_a_tie_has_an_error_of_one_draw():
    (found,) = occupied([[1.0, 0.0], [0.0, 1.0]], [50.0, 0.0], 1, (1,), 0.01, 100)
    assert found.share == 0.0
    assert found.error == pytest.approx(0.01, rel=0.02)
    assert norm.sf(50.0 / np.sqrt(2.0)) < 1e-100
