"""Noise at the corners: none, on a boundary, every expert chosen, no token."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.router import Rule, Weights
from moegeom.geometry import noise
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.noise import (
    SimulatedFlip,
    boundary_sigmas,
    flip_bounds,
    logit_deviations,
    simulate_flip,
)
from moegeom.geometry.noise_size import noise_between
from moegeom.geometry.selection import top_k

RANDOM = np.random.default_rng(1)
WEIGHT = RANDOM.standard_normal((6, 4))
INPUTS = RANDOM.standard_normal((30, 4))
LOGITS = INPUTS @ WEIGHT.T
ROWS = row_distances(WEIGHT)
RULE = Rule(2, "softmax", Weights("scores"))


def bounds(z, k, scale, rows=ROWS):
    found = flip_bounds(z, top_k(z, k), rows, np.full(len(z), scale))
    return np.stack([found.lower, found.estimate, found.upper])


def test_every_expert_chosen_stays_chosen():
    np.testing.assert_array_equal(bounds(LOGITS, 6, 1.0), np.zeros((3, 30)))


def test_without_noise_nothing_flips_off_the_boundaries():
    np.testing.assert_array_equal(bounds(LOGITS, 2, 0.0), np.zeros((3, 30)))
    found = simulate_flip(INPUTS, WEIGHT, RULE, np.zeros((1, 1)), 3, np.random.default_rng(0))
    assert (found.share, found.standard_error) == (0.0, 0.0)


@pytest.mark.parametrize("scale", [0.0, 1e-9])
def test_on_a_boundary_every_other_noise_flips(scale):
    level = np.array([[1.0, 1.0, -5.0]])
    found = bounds(level, 1, scale, row_distances(np.eye(3)))
    np.testing.assert_allclose(found, np.full((3, 1), 0.5), rtol=1e-3)


def test_bounds_are_in_order_and_grow_with_the_noise():
    found = [bounds(LOGITS, 2, scale) for scale in np.geomspace(1e-3, 10.0, 30)]
    for lower, estimate, upper in found:
        assert (lower <= estimate).all()
        assert (estimate <= upper).all()
    assert (np.diff(found, axis=0)[:, [0, 2]] >= 0.0).all()


def test_no_token_has_no_share():
    assert bounds(LOGITS[:0], 2, 1.0).shape == (3, 0)
    none = SimulatedFlip(np.zeros(0, dtype=np.int64), 3)
    assert np.isnan([none.share, none.standard_error]).all()


def test_one_draw_counts_tokens():
    one = SimulatedFlip(np.array([0, 1, 1, 0]), 1)
    assert (one.share, one.standard_error) == (0.5, 0.25)


def test_tiles_change_nothing(monkeypatch):
    whole = bounds(LOGITS, 2, 0.3)
    monkeypatch.setattr(noise, "_AT_ONCE", 1)
    np.testing.assert_allclose(bounds(LOGITS, 2, 0.3), whole, rtol=1e-13)
    parts = simulate_flip(INPUTS, WEIGHT, RULE, np.full((1, 1), 0.1), 50, np.random.default_rng(0))
    assert 0.0 < parts.share < 1.0


def test_noise_may_have_a_size_for_each_token():
    scale = np.where(np.arange(30) < 15, 0.0, 5.0)[:, None]
    found = simulate_flip(INPUTS, WEIGHT, RULE, scale, 20, np.random.default_rng(0))
    assert (found.flipped[:15] == 0).all()
    assert (found.flipped[15:] > 0).all()


def test_deviations_of_equal_rows_and_of_two_experts():
    np.testing.assert_array_equal(logit_deviations(row_distances(np.ones((4, 2)))), np.zeros(4))
    np.testing.assert_array_equal(logit_deviations(row_distances(np.ones((1, 2)))), [0.0])
    two = row_distances(np.array([[2.0], [0.0]]))
    np.testing.assert_allclose(logit_deviations(two), [np.sqrt(2.0)] * 2)


def test_equal_runs_are_without_noise_and_a_constant_difference_is_none():
    equal = noise_between(INPUTS, INPUTS)
    assert (equal.scale, equal.kappa, equal.systematic_share) == (0.0, 0.0, 0.0)
    np.testing.assert_array_equal(equal.scales, np.zeros(4))
    shifted = noise_between(INPUTS, INPUTS + np.array([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(shifted.systematic_share, 1.0)
    np.testing.assert_allclose(shifted.scales, [np.sqrt(0.5), 0.0, 0.0, 0.0])


def test_runs_without_tokens_have_no_noise_to_measure():
    found = noise_between(INPUTS[:0], INPUTS[:0])
    assert np.isnan([found.scale, found.kappa, found.systematic_share]).all()
    assert found.scales.shape == (4,)


def test_no_token_has_no_sigmas_and_as_many_columns_as_others():
    """Two recordings of one run: no token moves, and the boundaries of none are asked for."""
    rows = row_distances(np.eye(6, 3))
    none = np.zeros((0, 6), np.float32), np.zeros((0, 2), np.int32)
    assert boundary_sigmas(*none, rows).shape == (0, 2 * 4)
