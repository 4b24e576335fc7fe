"""The boundary distance is a distance: nothing flips nearer, something flips farther."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.selection import margin, top_k


class Case:
    """A random affine router and some inputs."""

    def __init__(self, seed: int, tokens: int = 8) -> None:
        self.random = np.random.default_rng(seed)
        experts = int(self.random.integers(2, 14))
        hidden = int(self.random.integers(1, 9))
        self.k = int(self.random.integers(1, experts))
        sizes = self.random.uniform(0.3, 2.0, (experts, 1))
        self.weight = sizes * self.random.standard_normal((experts, hidden))
        self.bias = self.random.standard_normal(experts)
        self.y = 2 * self.random.standard_normal((tokens, hidden))

    def logits(self, y):
        return y @ self.weight.T + self.bias

    def measured(self, y=None, weight=None, bias=None):
        """For these inputs, rows and biases, or the own ones."""
        y = self.y if y is None else y
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        logits = y @ weight.T + bias
        return boundary_distance(logits, top_k(logits, self.k), row_distances(weight, bias))

    def sets(self, y):
        return np.sort(top_k(self.logits(y), self.k), axis=1)

    def directions(self, count):
        drawn = self.random.standard_normal((count, self.y.shape[1]))
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


SEEDS = st.integers(0, 2**32 - 1)
FACTORS = st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20])


@given(SEEDS)
def test_no_direction_flips_within_the_distance(seed):
    case = Case(seed, tokens=3)
    distance, before = case.measured().distance, case.sets(case.y)
    for token in range(3):
        moved = case.y[token] + 0.999 * distance[token] * case.directions(200)
        assert_array_equal(case.sets(moved), np.tile(before[token], (200, 1)))


@given(SEEDS)
def test_a_step_of_the_distance_along_the_witness_flips(seed):
    case = Case(seed)
    boundary, before = case.measured(), case.sets(case.y)
    out, entering = boundary.pair.T
    normal = case.weight[out] - case.weight[entering]
    normal *= boundary.distance[:, None] / np.linalg.norm(normal, axis=1, keepdims=True)
    assert_array_equal(case.sets(case.y - 0.999 * normal), before)
    assert (case.sets(case.y - 1.001 * normal) != before).any(axis=1).all()


@given(SEEDS)
def test_the_distance_is_one_lipschitz(seed):
    case = Case(seed)
    other = case.y + case.random.exponential(1.0, (8, 1)) * case.directions(8)
    change = np.abs(case.measured(other).distance - case.measured().distance)
    assert (change < np.linalg.norm(other - case.y, axis=1) * (1 + 1e-9) + 1e-9).all()


@given(SEEDS, FACTORS)
def test_common_rows_and_scales_of_the_router_change_nothing_and_inputs_scale_along(seed, factor):
    case = Case(seed)
    plain = case.measured()
    weight = case.weight + case.random.standard_normal(case.y.shape[1])
    shifted = case.measured(weight=weight, bias=case.bias + 3.5)
    assert_allclose(shifted.distance, plain.distance, rtol=1e-7, atol=1e-9)
    assert_array_equal(shifted.pair, plain.pair)
    scaled = case.measured(weight=case.weight * factor, bias=case.bias * factor)
    assert_allclose(scaled.distance, plain.distance, rtol=1e-12)
    along = case.measured(case.y * factor, bias=case.bias * factor)
    assert_allclose(along.distance, plain.distance * factor, rtol=1e-12)


@given(SEEDS)
def test_relabelling_experts_relabels_the_pair_and_nothing_else(seed):
    case = Case(seed)
    order = case.random.permutation(len(case.weight))
    before, after = case.measured(), case.measured(weight=case.weight[order], bias=case.bias[order])
    assert_allclose(after.distance, before.distance, rtol=1e-12)
    assert_array_equal(order[after.pair], before.pair)


@given(SEEDS)
def test_the_distance_is_at_least_the_margin_over_the_widest_pair(seed):
    """And at most the quotient of the pair (k-th, next), which need not be the nearest."""
    case = Case(seed)
    logits = case.logits(case.y)
    gap = margin(logits, case.k)
    rows = row_distances(case.weight, case.bias)
    order = top_k(logits, case.k + 1)
    pair = rows.inverse[order[:, -2], order[:, -1]]
    distance = case.measured().distance
    assert (gap * rows.smallest.min() * (1 - 1e-12) - 1e-15 < distance).all()
    assert (distance < gap * pair * (1 + 1e-12) + 1e-15).all()
