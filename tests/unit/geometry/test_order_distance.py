"""Ties of several experts at the corners: equal rows, parallel boundaries, no solver."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.boundary.order_distance import (
    flat_distance,
    least_distance,
    order_distance,
    row_coordinates,
)
from moegeom.geometry.boundary.orders import logit_distance

#: Three rows of the plane at which all tie only in the origin.
FAN = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])


def test_three_experts_of_the_fan_tie_in_the_origin_alone():
    y = np.array([2.0, 0.5])
    found = order_distance(FAN @ y, FAN, 1, 2)
    np.testing.assert_allclose(found.upper, np.hypot(2.0, 0.5), rtol=1e-12)
    assert found.is_exact
    assert found.tied == (0, 1, 2)


@pytest.mark.parametrize(("k", "order"), [(3, 1), (1, 3), (1, 0), (2, 9)])
def test_orders_that_do_not_exist_are_infinitely_far(k, order):
    found = order_distance(FAN @ np.ones(2), FAN, k, order)
    assert (found.lower, found.upper, found.tied) == (np.inf, np.inf, ())
    assert logit_distance(FAN @ np.ones(2), FAN, k, order).upper == np.inf


def test_an_input_on_the_tie_is_at_distance_0():
    found = order_distance(np.zeros(3), FAN, 2, 2)
    assert (found.lower, found.upper) == (0.0, 0.0)
    assert logit_distance(np.zeros(3), FAN, 2, 2).upper == 0.0


def test_a_permanent_tie_of_three_experts_is_everywhere():
    """Equal rows and biases; the chosen set holds one of them wherever the input is."""
    weight = np.vstack([np.tile([[1.0, 2.0]], (3, 1)), [[-1.0, 0.0]]])
    z = weight @ np.array([0.7, 0.1])
    assert order_distance(z, weight, 1, 2).upper == 0.0
    # ranked last they are no tie at the border of the first: the fourth must join or pass
    assert order_distance(-z, -weight, 1, 1).upper > 0.1


def test_parallel_boundaries_never_meet():
    weight = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
    bias = np.array([0.0, 0.0, -1.0])
    found = order_distance(weight @ np.array([0.2, 5.0]) + bias, weight, 1, 2)
    assert (found.lower, found.upper, found.tied) == (np.inf, np.inf, ())
    assert flat_distance(bias, weight, (0, 1, 2)) == np.inf
    assert logit_distance(bias, weight, 1, 2).upper == np.inf


def test_parallel_boundaries_that_meet_are_one_boundary():
    weight = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
    found = order_distance(weight @ np.array([0.2, 5.0]), weight, 1, 2)
    np.testing.assert_allclose(found.upper, 0.2, rtol=1e-12)


def test_a_router_of_zeros_ties_everywhere_or_nowhere():
    zeros = np.zeros((4, 3))
    assert order_distance(np.zeros(4), zeros, 2, 3).upper == 0.0
    assert order_distance(np.arange(4.0), zeros, 2, 2).upper == np.inf
    assert logit_distance(np.arange(4.0), zeros, 2, 2).upper == np.inf


def test_a_flat_of_one_expert_is_here():
    assert flat_distance(np.arange(3.0), FAN, (1,)) == 0.0


def test_coordinates_keep_the_distances_between_rows():
    random = np.random.default_rng(0)
    weight = random.standard_normal((5, 40)).astype(np.float32) + 7.0
    rows = row_coordinates(weight)
    assert rows.shape == (5, 5)
    for i, j in [(0, 1), (2, 4)]:
        expected = np.linalg.norm(weight[i].astype(float) - weight[j])
        np.testing.assert_allclose(np.linalg.norm(rows[i] - rows[j]), expected, rtol=1e-12)


def test_without_the_solver_the_bracket_stays_open_and_true(monkeypatch):
    """A rare case where costs alone do not rule out a nearer flat whose own point is no tie."""
    random = np.random.default_rng(508)
    experts, hidden = int(random.integers(4, 8)), int(random.integers(2, 6))
    weight = random.standard_normal((experts, hidden))
    z = weight @ random.standard_normal(hidden) * 2
    k, order = int(random.integers(1, experts)), int(random.integers(2, experts))
    exact = order_distance(z, weight, k, order)
    assert exact.is_exact

    def give_up(*args, **kwargs):
        raise RuntimeError("too many rounds")

    monkeypatch.setattr("scipy.optimize.nnls", give_up)
    found = order_distance(z, weight, k, order)
    assert not found.is_exact
    assert 0.0 < found.lower < exact.upper <= found.upper


def test_a_real_shape_is_solved_within_few_steps():
    """128 experts, 8 chosen: crossing costs prune ties far from the border."""
    random = np.random.default_rng(1)
    weight = random.uniform(0.5, 1.5, (128, 1)) * random.standard_normal((128, 256))
    rows = row_coordinates(weight)
    z = weight @ random.standard_normal(256)
    found = [order_distance(z, rows, 8, order, most_nodes=1500) for order in (1, 2, 3)]
    assert all(distance.is_exact for distance in found)
    assert found[0].upper <= found[1].upper <= found[2].upper


@pytest.mark.parametrize("slope", [1e-3, 1e-5, 1e-7, 1e-8, 1e-9])
def test_a_far_corner_between_nearly_opposite_boundaries_is_not_lost_in_rounding(slope):
    """The boundaries of (1, 0) and (-1, slope) meet at (1, 1 / slope), far from the origin."""
    found = least_distance(np.array([[1.0, 0.0], [-1.0, slope]]), np.array([1.0, 0.0]), 0.0)
    assert found.bound * slope == pytest.approx(1.0, rel=1e-2)
    assert found.point[1] * slope == pytest.approx(1.0, rel=1e-2)
