"""Directions of data, and how many of them rows see: cases that are known."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.expert_rank import DataDirections, data_directions, ranks_on_data


def test_directions_hold_the_share_of_the_variance_that_was_asked_for():
    random = np.random.default_rng(0)
    sizes = np.array([4.0, 2.0, 1.0, 0.1])
    rows = random.standard_normal((20_000, 4)) * sizes
    rows = rows @ np.linalg.qr(random.standard_normal((4, 4)))[0] + 3.0
    # 16, 20 and 21 of 21.01
    for share, expected in ((0.7, 1), (0.9, 2), (0.99, 3), (1.0, 4)):
        found = data_directions(rows, share)
        np.testing.assert_allclose(found.deviations, sizes[:expected], rtol=0.03)
        np.testing.assert_allclose(found.axes.T @ found.axes, np.eye(expected), atol=1e-12)
    assert len(data_directions(rows, 1.0, 2).deviations) == 2
    assert data_directions(np.ones((9, 4))).axes.shape == (4, 0)


def test_ranks_are_those_of_diagonal_matrices():
    data = DataDirections(np.eye(5)[:, :3], np.array([2.0, 1.0, 0.5]))
    flat = DataDirections(np.eye(5)[:, 3:], np.ones(2))
    weight = np.zeros((6, 5))
    weight[[0, 1, 2], [0, 1, 2]] = 1.0, 2.0, 4.0
    weight[3, 4] = 7.0
    (rank, effective), (one, alone) = ranks_on_data(weight, [data, flat])
    # each direction is seen with size 2
    assert (rank, one) == (3, 1)
    np.testing.assert_allclose([effective, alone], [3.0, 1.0], rtol=1e-12)
    weight[0, 0] = 0.0
    assert ranks_on_data(weight, [data])[0] == (2, pytest.approx(2.0))
    assert ranks_on_data(np.zeros((6, 5)), [data]) == [(0, 0.0)]
    assert ranks_on_data(weight, [DataDirections(np.zeros((5, 0)), np.zeros(0))]) == [(0, 0.0)]


def test_neurons_bound_the_rank():
    random = np.random.default_rng(1)
    data = data_directions(random.standard_normal((500, 20)), 1.0)
    for neurons in (3, 20, 40):
        ((rank, effective),) = ranks_on_data(random.standard_normal((neurons, 20)), [data])
        assert rank == min(neurons, 20)
        assert effective <= rank + 1e-9
