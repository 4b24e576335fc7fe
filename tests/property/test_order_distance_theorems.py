"""The distance of order n is a distance, grows with n, and brackets of a short search hold it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

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
        rows = self.random.uniform(0.3, 2.0, (experts, 1))
        self.weight = rows * self.random.standard_normal((experts, hidden))
        self.bias = self.random.standard_normal(experts)
        self.y = 2.0 * self.random.standard_normal(hidden)

    @property
    def z(self):
        return self.weight @ self.y + self.bias

    def nearest(self, order=None, y=None, most_nodes=20_000):
        z = self.weight @ (self.y if y is None else y) + self.bias
        order = self.order if order is None else order
        return order_distance(z, row_coordinates(self.weight), self.k, order, most_nodes)


SEEDS = st.integers(0, 2**32 - 1)
short = settings(max_examples=40)


@short
@given(SEEDS)
def test_order_1_is_the_boundary_and_no_higher_order_is_nearer(seed):
    case = Case(seed)
    z, rows = case.z[None], row_distances(case.weight, case.bias)
    expected = boundary_distance(z, top_k(z, case.k), rows).distance[0]
    ties = [case.nearest(order) for order in range(1, len(case.weight))]
    assert ties[0].is_exact
    assert_allclose(ties[0].upper, expected, rtol=1e-8)
    for nearer, farther in pairwise(ties):
        assert nearer.upper <= farther.upper * (1.0 + 1e-8)


@short
@given(SEEDS)
def test_the_distance_is_one_lipschitz(seed):
    case = Case(seed)
    other = case.y + case.random.standard_normal(len(case.y)) * 0.3
    before, after = case.nearest().upper, case.nearest(y=other).upper
    step = np.linalg.norm(other - case.y)
    assert np.isinf([before, after]).all() or abs(before - after) <= step * (1.0 + 1e-7)


@short
@given(SEEDS)
def test_relabelling_experts_relabels_the_ties_and_nothing_else(seed):
    case = Case(seed)
    before = case.nearest()
    order = case.random.permutation(len(case.weight))
    case.weight, case.bias = case.weight[order], case.bias[order]
    after = case.nearest()
    assert_allclose(after.upper, before.upper, rtol=1e-8)
    # the tie need not be the only one at its distance: it must be as near
    if after.tied:
        flat = flat_distance(case.z, row_coordinates(case.weight), after.tied)
        assert flat <= before.upper * (1.0 + 1e-8)


@short
@given(SEEDS, st.sampled_from([2.0**-20, 0.5, 2.0**20]))
def test_scales_and_common_rows_change_no_distance(seed, factor):
    case = Case(seed)
    before = case.nearest()
    case.weight = (case.weight + case.random.standard_normal(len(case.y))) * factor
    case.bias = (case.bias + 3.0) * factor
    assert_allclose(case.nearest().upper, before.upper, rtol=1e-7)


@short
@given(SEEDS, st.integers(0, 30))
def test_a_search_cut_short_still_brackets_the_distance(seed, most_nodes):
    case = Case(seed)
    whole, part = case.nearest(), case.nearest(most_nodes=most_nodes)
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
    nearest = case.nearest()
    if nearest.tied:
        assert len(nearest.tied) == case.order + 1
        flat = flat_distance(case.z, row_coordinates(case.weight), nearest.tied)
        assert_allclose(flat, nearest.upper, rtol=1e-8)


def test_cuts_leave_some_brackets_open():
    cut = [Case(seed).nearest(most_nodes=3) for seed in range(60)]
    assert 5 < sum(not bracket.is_exact for bracket in cut) < 60


def test_a_move_within_the_logit_distance_makes_no_tie():
    """Every logit moves by at most |w| |x|, so the two distances bound each other."""
    for case in map(Case, range(6)):
        longest = np.linalg.norm(case.weight, axis=1).max()
        logit = logit_distance(case.z, case.weight, case.k, case.order).upper
        assert logit <= case.nearest().upper * longest * (1.0 + 1e-5)
