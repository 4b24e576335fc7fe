"""The distance of order n is a distance, grows with n, and brackets of a short search hold it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.boundary.order_distance import flat_distance, order_distance, row_coordinates
from moegeom.geometry.boundary.orders import logit_distance
from moegeom.geometry.selection import top_k


class Case:
    """A random affine router and one input."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        experts, hidden = int(self.random.integers(3, 9)), int(self.random.integers(1, 9))
        self.k = int(self.random.integers(1, experts))
        self.order = int(self.random.integers(1, experts))
        self.weight = self.random.uniform(0.3, 2.0, (experts, 1)) * self.random.standard_normal(
            (experts, hidden)
        )
        self.bias = self.random.standard_normal(experts)
        self.y = 2.0 * self.random.standard_normal(hidden)

    def found(self, order=None, y=None, most_nodes=20_000):
        z = self.weight @ (self.y if y is None else y) + self.bias
        order = self.order if order is None else order
        return order_distance(z, row_coordinates(self.weight), self.k, order, most_nodes)


SEEDS = st.integers(0, 2**32 - 1)
short = settings(max_examples=40)


@short
@given(SEEDS)
def test_order_1_is_the_boundary(seed):
    case = Case(seed)
    z = (case.weight @ case.y + case.bias)[None]
    rows = row_distances(case.weight, case.bias)
    expected = boundary_distance(z, top_k(z, case.k), rows).distance[0]
    found = case.found(order=1)
    assert found.is_exact
    np.testing.assert_allclose(found.upper, expected, rtol=1e-8)


@short
@given(SEEDS)
def test_the_distance_does_not_decrease_with_the_order(seed):
    case = Case(seed)
    found = [case.found(order).upper for order in range(1, len(case.weight))]
    for nearer, farther in pairwise(found):
        assert nearer <= farther * (1.0 + 1e-8)


@short
@given(SEEDS)
def test_the_distance_is_one_lipschitz(seed):
    case = Case(seed)
    other = case.y + case.random.standard_normal(len(case.y)) * 0.3
    before, after = case.found().upper, case.found(y=other).upper
    step = np.linalg.norm(other - case.y)
    assert np.isinf([before, after]).all() or abs(before - after) <= step * (1.0 + 1e-7)


@short
@given(SEEDS)
def test_relabelling_experts_relabels_the_ties_and_nothing_else(seed):
    case = Case(seed)
    before = case.found()
    order = case.random.permutation(len(case.weight))
    case.weight, case.bias = case.weight[order], case.bias[order]
    after = case.found()
    np.testing.assert_allclose(after.upper, before.upper, rtol=1e-8)
    z = case.weight @ case.y + case.bias
    # the tie need not be the only one at its distance: it must be as near
    if after.tied:
        flat = flat_distance(z, row_coordinates(case.weight), after.tied)
        assert flat <= before.upper * (1.0 + 1e-8)


@short
@given(SEEDS, st.sampled_from([2.0**-20, 0.5, 2.0**20]))
def test_scales_and_common_rows_change_no_distance(seed, factor):
    case = Case(seed)
    before = case.found()
    case.weight = (case.weight + case.random.standard_normal(len(case.y))) * factor
    case.bias = (case.bias + 3.0) * factor
    np.testing.assert_allclose(case.found().upper, before.upper, rtol=1e-7)


@short
@given(SEEDS, st.integers(0, 30))
def test_a_search_cut_short_still_brackets_the_distance(seed, most_nodes):
    case = Case(seed)
    whole, part = case.found(), case.found(most_nodes=most_nodes)
    assert whole.is_exact
    assert part.lower <= whole.upper * (1.0 + 1e-8)
    assert part.upper >= whole.upper * (1.0 - 1e-8)


@short
@given(SEEDS)
def test_the_nearest_tie_is_the_nearest_point_of_its_own_flat(seed):
    """Around a point with more ties, those of order n leave in directions that span all around.

    So one of them comes nearer, unless the point is the nearest of its flat already.
    """
    case = Case(seed)
    found = case.found()
    z = case.weight @ case.y + case.bias
    if found.tied:
        assert len(found.tied) == case.order + 1
        flat = flat_distance(z, row_coordinates(case.weight), found.tied)
        np.testing.assert_allclose(flat, found.upper, rtol=1e-8)


def test_cuts_leave_some_brackets_open():
    cut = [Case(seed).found(most_nodes=3) for seed in range(60)]
    assert 5 < sum(not found.is_exact for found in cut) < 60


@pytest.mark.parametrize("seed", range(6))
def test_a_move_within_the_logit_distance_makes_no_tie(seed):
    """Every logit moves by at most |w| |x|, so the two distances bound each other."""
    case = Case(seed)
    z = case.weight @ case.y + case.bias
    longest = np.linalg.norm(case.weight, axis=1).max()
    logit = logit_distance(z, case.weight, case.k, case.order).upper
    assert logit <= case.found().upper * longest * (1.0 + 1e-5)
