"""The boundary distance is a distance: nothing flips nearer, something flips farther."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.selection import margin, top_k


class Case:
    """A random affine router and some inputs."""

    def __init__(self, seed: int, tokens: int = 8, spread: bool = True) -> None:
        self.random = np.random.default_rng(seed)
        experts = int(self.random.integers(2, 14))
        hidden = int(self.random.integers(1, 9))
        self.k = int(self.random.integers(1, experts))
        sizes = self.random.uniform(0.3, 2.0, (experts, 1)) if spread else 1.0
        self.weight = sizes * self.random.standard_normal((experts, hidden))
        self.bias = self.random.standard_normal(experts)
        self.y = 2 * self.random.standard_normal((tokens, hidden))

    def logits(self, y):
        return y @ self.weight.T + self.bias

    def measured(self, y):
        logits = self.logits(y)
        return boundary_distance(
            logits, top_k(logits, self.k), row_distances(self.weight, self.bias)
        )

    def sets(self, y):
        return np.sort(top_k(self.logits(y), self.k), axis=1)

    def directions(self, count):
        drawn = self.random.standard_normal((count, self.y.shape[1]))
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS)
def test_no_direction_flips_within_the_distance(seed):
    case = Case(seed, tokens=3)
    distance = case.measured(case.y).distance
    steps = case.directions(200)
    for token in range(3):
        moved = case.y[token] + 0.999 * distance[token] * steps
        expected = np.tile(case.sets(case.y[token : token + 1]), (200, 1))
        np.testing.assert_array_equal(case.sets(moved), expected)


@given(SEEDS)
def test_a_step_of_the_distance_along_the_witness_flips(seed):
    case = Case(seed)
    found = case.measured(case.y)
    out, entering = found.pair.T
    normal = case.weight[out] - case.weight[entering]
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    short = case.y - 0.999 * found.distance[:, None] * normal
    far = case.y - 1.001 * found.distance[:, None] * normal
    before = case.sets(case.y)
    np.testing.assert_array_equal(case.sets(short), before)
    np.testing.assert_array_equal((case.sets(far) != before).any(axis=1), np.ones(8, dtype=bool))


@given(SEEDS)
def test_the_distance_is_one_lipschitz(seed):
    case = Case(seed)
    other = case.y + case.random.exponential(1.0, (8, 1)) * case.directions(8)
    change = np.abs(case.measured(other).distance - case.measured(case.y).distance)
    step = np.linalg.norm(other - case.y, axis=1)
    np.testing.assert_array_less(change, step * (1 + 1e-9) + 1e-9)


@given(SEEDS)
def test_a_common_shift_of_rows_and_biases_changes_nothing(seed):
    case = Case(seed)
    before = case.measured(case.y)
    case.weight = case.weight + case.random.standard_normal(case.y.shape[1])
    case.bias = case.bias + 3.5
    after = case.measured(case.y)
    np.testing.assert_allclose(after.distance, before.distance, rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(after.pair, before.pair)


@given(SEEDS, st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_scaling_the_router_changes_no_distance(seed, factor):
    case = Case(seed)
    before = case.measured(case.y)
    case.weight, case.bias = case.weight * factor, case.bias * factor
    np.testing.assert_allclose(case.measured(case.y).distance, before.distance, rtol=1e-12)


@given(SEEDS, st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_scaling_input_and_bias_scales_the_distance(seed, factor):
    case = Case(seed)
    before = case.measured(case.y)
    case.bias = case.bias * factor
    scaled = case.measured(case.y * factor)
    np.testing.assert_allclose(scaled.distance, before.distance * factor, rtol=1e-12)


@given(SEEDS)
def test_relabelling_experts_relabels_the_pair_and_nothing_else(seed):
    case = Case(seed)
    before = case.measured(case.y)
    order = case.random.permutation(len(case.weight))
    case.weight, case.bias = case.weight[order], case.bias[order]
    after = case.measured(case.y)
    np.testing.assert_allclose(after.distance, before.distance, rtol=1e-12)
    np.testing.assert_array_equal(order[after.pair], before.pair)


@given(SEEDS)
def test_the_distance_is_at_least_the_margin_over_the_widest_pair(seed):
    """And at most the quotient of the pair (k-th, next), which need not be the nearest."""
    case = Case(seed)
    logits = case.logits(case.y)
    gap = margin(logits, case.k)
    rows = row_distances(case.weight, case.bias)
    order = top_k(logits, case.k + 1)
    pair = rows.inverse[order[:, -2], order[:, -1]]
    found = case.measured(case.y).distance
    np.testing.assert_array_less(gap * rows.smallest.min() * (1 - 1e-12) - 1e-15, found)
    np.testing.assert_array_less(found, gap * pair * (1 + 1e-12) + 1e-15)


@pytest.mark.parametrize("k", [1, 4, 15])
def test_the_nearest_boundary_is_often_not_that_of_the_last_pair(k):
    """F-07: with rows of different length, another boundary is nearer for many tokens."""
    random = np.random.default_rng(1)
    weight = random.uniform(0.5, 1.5, (16, 1)) * random.standard_normal((16, 24))
    y = random.standard_normal((2000, 24))
    logits = y @ weight.T
    found = boundary_distance(logits, top_k(logits, k), row_distances(weight))
    last = top_k(logits, k + 1)[:, -2:]
    share = (found.pair != last).any(axis=1).mean()
    np.testing.assert_array_less(0.03, share)
