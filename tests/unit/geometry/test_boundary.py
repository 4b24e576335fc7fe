"""Boundary distance and ties of several experts at the corners: equal rows, zeros, parallels."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.geometry.boundary.linear import NO_BOUNDARY, boundary_distance, row_distances
from moegeom.geometry.boundary.order_distance import (
    flat_distance,
    least_distance,
    order_distance,
    row_coordinates,
)
from moegeom.geometry.boundary.orders import logit_distance
from moegeom.geometry.selection import top_k

INF = np.inf

#: Three rows of the plane at which all tie only in the origin.
FAN = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])


def measured(weight, y, k, bias=None):
    logits = y @ weight.T + (0.0 if bias is None else bias)
    return boundary_distance(logits, top_k(logits, k), row_distances(weight, bias))


#: Rows, inputs, how many are chosen, bias -> distance and pair of each token.
CORNERS = {
    "the worked triangle": (FAN, [[2.0, 0.5]], 1, None, [1.5 / np.sqrt(2)], [[0, 1]]),
    "all chosen": (FAN, np.ones((5, 2)), 3, None, [INF] * 5, [[-1, -1]] * 5),
    "equal rows with biases": (
        *(np.ones((2, 3)), [[1.0, 2.0, 3.0]], 1, np.array([0.25, 0.0])),
        *([INF], [[-1, -1]]),
    ),
    "zero rows": (np.zeros((3, 2)), [[1.0, -1.0]], 1, None, [0.0], [[0, 1]]),
    "on a boundary the first pair": (np.eye(3), [[1.0, 1.0, 1.0]], 1, None, [0.0], [[0, 1]]),
    # (0, 2) and (1, 3) are both at distance 1; the second chosen expert is asked first
    "equal quotients": (np.vstack([np.eye(2), -np.eye(2)]), [[1.0, 1.0]], 2, None, [1.0], [[1, 3]]),
    "no token": (np.eye(3), np.empty((0, 3)), 1, None, [], np.empty((0, 2))),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_distance_and_pair_at_a_corner(corner):
    weight, y, k, bias, distance, pair = CORNERS[corner]
    boundary = measured(weight, np.asarray(y), k, bias)
    assert_allclose(boundary.distance, distance, rtol=1e-15)
    assert_array_equal(boundary.pair, pair)


def test_a_permanent_tie_is_at_distance_zero_wherever_it_decides():
    random = np.random.default_rng(7)
    weight, y = random.standard_normal((5, 4)), random.standard_normal((200, 4))
    weight[3] = weight[1]
    boundary = measured(weight, y, 2)
    decides = np.isin(top_k(y @ weight.T, 2), [1, 3]).sum(axis=1) == 1
    assert_array_equal(boundary.distance == 0.0, decides)
    assert_array_equal(boundary.pair[decides], np.tile([1, 3], (decides.sum(), 1)))
    assert_array_equal(row_distances(weight).permanent_ties, [[1, 3]])
    assert_array_equal(row_distances(np.zeros((3, 2))).permanent_ties, [[0, 1], [0, 2], [1, 2]])
    # a bias tells duplicates apart
    rows = row_distances(weight, np.array([0.0, 0.5, 0.0, -0.5, 0.0]))
    assert rows.permanent_ties.shape == (0, 2)
    assert rows.inverse[1, 3] == NO_BOUNDARY


# ------------------------------------------------------------------------- ties of several experts
def test_three_experts_of_the_fan_tie_in_the_origin_alone():
    nearest = order_distance(FAN @ [2.0, 0.5], FAN, 1, 2)
    assert_allclose(nearest.upper, np.hypot(2.0, 0.5), rtol=1e-12)
    assert (nearest.is_exact, nearest.tied) == (True, (0, 1, 2))
    here = order_distance(np.zeros(3), FAN, 2, 2)
    assert (here.lower, here.upper) == (0.0, 0.0)
    assert logit_distance(np.zeros(3), FAN, 2, 2).upper == 0.0
    assert flat_distance(np.arange(3.0), FAN, (1,)) == 0.0


@pytest.mark.parametrize(("k", "order"), [(3, 1), (1, 3), (1, 0), (2, 9)])
def test_orders_that_do_not_exist_are_infinitely_far(k, order):
    nowhere = order_distance(FAN @ np.ones(2), FAN, k, order)
    assert (nowhere.lower, nowhere.upper, nowhere.tied) == (INF, INF, ())
    assert logit_distance(FAN @ np.ones(2), FAN, k, order).upper == INF


def test_a_permanent_tie_of_three_experts_is_everywhere():
    """Equal rows and biases; the chosen set holds one of them wherever the input is."""
    weight = np.vstack([np.tile([[1.0, 2.0]], (3, 1)), [[-1.0, 0.0]]])
    z = weight @ np.array([0.7, 0.1])
    assert order_distance(z, weight, 1, 2).upper == 0.0
    # ranked last they are no tie at the border of the first: the fourth must join or pass
    assert order_distance(-z, -weight, 1, 1).upper > 0.1
    zeros = np.zeros((4, 3))
    assert order_distance(np.zeros(4), zeros, 2, 3).upper == 0.0
    assert order_distance(np.arange(4.0), zeros, 2, 2).upper == INF
    assert logit_distance(np.arange(4.0), zeros, 2, 2).upper == INF


def test_parallel_boundaries_never_meet_or_are_one():
    weight, bias = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]]), np.array([0.0, 0.0, -1.0])
    z = weight @ np.array([0.2, 5.0])
    nowhere = order_distance(z + bias, weight, 1, 2)
    assert (nowhere.lower, nowhere.upper, nowhere.tied) == (INF, INF, ())
    assert flat_distance(bias, weight, (0, 1, 2)) == INF
    assert logit_distance(bias, weight, 1, 2).upper == INF
    assert_allclose(order_distance(z, weight, 1, 2).upper, 0.2, rtol=1e-12)


def test_coordinates_keep_the_distances_between_rows():
    weight = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32) + 7.0
    rows = row_coordinates(weight)
    assert rows.shape == (5, 5)
    for i, j in [(0, 1), (2, 4)]:
        expected = np.linalg.norm(weight[i].astype(float) - weight[j])
        assert_allclose(np.linalg.norm(rows[i] - rows[j]), expected, rtol=1e-12)


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
    bracket = order_distance(z, weight, k, order)
    assert not bracket.is_exact
    assert 0.0 < bracket.lower < exact.upper <= bracket.upper


def test_a_real_shape_is_solved_within_few_steps():
    """128 experts, 8 chosen: crossing costs prune ties far from the border."""
    random = np.random.default_rng(1)
    weight = random.uniform(0.5, 1.5, (128, 1)) * random.standard_normal((128, 256))
    rows, z = row_coordinates(weight), weight @ random.standard_normal(256)
    ties = [order_distance(z, rows, 8, order, most_nodes=1500) for order in (1, 2, 3)]
    assert all(tie.is_exact for tie in ties)
    assert ties[0].upper <= ties[1].upper <= ties[2].upper


@pytest.mark.parametrize("slope", [1e-3, 1e-5, 1e-7, 1e-8, 1e-9])
def test_a_far_corner_between_nearly_opposite_boundaries_is_not_lost_in_rounding(slope):
    """The boundaries of (1, 0) and (-1, slope) meet at (1, 1 / slope), far from the origin."""
    corner = least_distance(np.array([[1.0, 0.0], [-1.0, slope]]), np.array([1.0, 0.0]), 0.0)
    assert_allclose([corner.bound * slope, corner.point[1] * slope], 1.0, rtol=1e-2)
