"""Boundary distance at the corners: equal rows, zero rows, one expert, all experts."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.boundary.linear import NO_BOUNDARY, boundary_distance, row_distances
from moegeom.geometry.selection import top_k


def measured(weight, y, k, bias=None):
    logits = y @ weight.T + (0.0 if bias is None else bias)
    return boundary_distance(logits, top_k(logits, k), row_distances(weight, bias))


@pytest.fixture
def random():
    return np.random.default_rng(7)


def test_the_worked_triangle():
    weight = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    found = measured(weight, np.array([[2.0, 0.5]]), 1)
    np.testing.assert_allclose(found.distance, [1.5 / np.sqrt(2)], rtol=1e-15)
    np.testing.assert_array_equal(found.pair, [[0, 1]])


def test_choosing_every_expert_leaves_no_boundary(random):
    found = measured(random.standard_normal((4, 3)), random.standard_normal((5, 3)), 4)
    np.testing.assert_array_equal(found.distance, np.full(5, np.inf))
    np.testing.assert_array_equal(found.pair, np.full((5, 2), -1))


def test_a_permanent_tie_is_at_distance_zero_wherever_it_decides(random):
    weight = random.standard_normal((5, 4))
    weight[3] = weight[1]
    y = random.standard_normal((200, 4))
    found, logits = measured(weight, y, 2), y @ weight.T
    chosen = top_k(logits, 2)
    decides = np.isin(chosen, [1, 3]).sum(axis=1) == 1
    np.testing.assert_array_equal(found.distance == 0.0, decides)
    np.testing.assert_array_equal(row_distances(weight).permanent_ties, [[1, 3]])
    np.testing.assert_array_equal(found.pair[decides], np.tile([1, 3], (decides.sum(), 1)))


def test_duplicate_rows_are_no_permanent_tie_when_a_bias_tells_them_apart(random):
    weight = random.standard_normal((3, 4))
    weight[2] = weight[0]
    rows = row_distances(weight, np.array([0.5, 0.0, -0.5]))
    np.testing.assert_array_equal(rows.permanent_ties, np.empty((0, 2)))
    np.testing.assert_array_equal(rows.inverse[0, 2], NO_BOUNDARY)


def test_duplicate_rows_alone_with_different_biases_never_flip():
    weight, bias = np.ones((2, 3)), np.array([0.25, 0.0])
    found = measured(weight, np.array([[1.0, 2.0, 3.0]]), 1, bias)
    np.testing.assert_array_equal(found.distance, [np.inf])
    np.testing.assert_array_equal(found.pair, [[-1, -1]])


def test_zero_rows_without_bias_tie_permanently():
    weight = np.zeros((3, 2))
    found = measured(weight, np.array([[1.0, -1.0]]), 1)
    np.testing.assert_array_equal(found.distance, [0.0])
    np.testing.assert_array_equal(row_distances(weight).permanent_ties, [[0, 1], [0, 2], [1, 2]])


def test_on_a_boundary_the_distance_is_zero_and_the_first_pair_is_named():
    weight = np.eye(3)
    found = measured(weight, np.array([[1.0, 1.0, 1.0]]), 1)
    np.testing.assert_array_equal(found.distance, [0.0])
    np.testing.assert_array_equal(found.pair, [[0, 1]])


def test_equal_quotients_name_the_pair_nearest_the_end_of_the_chosen_set():
    weight = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    found = measured(weight, np.array([[1.0, 1.0]]), 2)
    # (0, 2) and (1, 3) are both at distance 1; the second chosen expert is asked first
    np.testing.assert_array_equal(found.distance, [1.0])
    np.testing.assert_array_equal(found.pair, [[1, 3]])


def test_no_token_gives_no_distance():
    weight = np.eye(3)
    found = measured(weight, np.empty((0, 3)), 1)
    np.testing.assert_array_equal(found.distance, np.empty(0))
    np.testing.assert_array_equal(found.pair, np.empty((0, 2)))
