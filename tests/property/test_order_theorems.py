"""Ties of order n: spreads and orders of near-ties, and the distance to the nearest, which is one."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from moegeom.geometry.boundary import orders
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.selection import margin, top_k

#: Few distinct values, so that exact ties are common; all are exact in binary.
SCORES = st.integers(2, 9).flatmap(
    lambda experts: st.tuples(
        st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=experts, max_size=experts),
        st.integers(1, experts),
    )
)
EPS = st.integers(0, 20).map(lambda n: n / 8)


def spread_by_brute_force(scores, k, order):
    ordered = sorted(scores, reverse=True)
    starts = [a for a in range(len(scores) - order) if a <= k - 1 and a + order >= k]
    spreads = [ordered[a] - ordered[a + order] for a in starts]
    return min(spreads, default=np.inf) if k < len(scores) else np.inf


@given(SCORES)
def test_spreads_are_the_least_of_all_windows_and_ascend_from_the_margin(drawn):
    scores, k = drawn
    z, counts = np.array([scores]), range(1, 10)
    spreads = [orders.tie_spread(z, k, order)[0] for order in counts]
    assert spreads == [spread_by_brute_force(scores, k, order) for order in counts]
    assert spreads[0] == margin(z, k)[0]
    assert spreads == sorted(spreads)


@given(SCORES, EPS, EPS)
def test_the_order_is_the_largest_whose_spread_fits_and_ascends_with_eps(drawn, eps, more):
    scores, k = drawn
    z = np.array([scores])
    fitting = [n for n in range(1, len(scores)) if orders.tie_spread(z, k, n)[0] <= eps]
    order = orders.order_eps(z, k, eps)[0]
    assert order == max(fitting, default=0)
    assert order <= orders.order_eps(z, k, eps + more)[0]
    renamed = np.random.default_rng(0).permutation(len(scores))
    assert orders.order_eps(z[:, renamed], k, eps)[0] == order


@given(SCORES, EPS)
def test_there_are_no_more_extra_experts_than_the_order(drawn, eps):
    scores, k = drawn
    extras = orders.extra_experts(np.array([scores]), k, eps)[0]
    assert extras <= orders.order_eps(np.array([scores]), k, eps)[0]
    ordered = sorted(scores, reverse=True)
    assert extras == sum(ordered[k - 1] - z < eps for z in ordered[k:])


# ----------------------------------------------------------------------------- distances of order n
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

    def nearest(self, order=None, most_nodes=20_000):
        order = self.order if order is None else order
        return orders.order_distance(
            self.z, orders.row_coordinates(self.weight), self.k, order, most_nodes
        )


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
        flat = orders.flat_distance(case.z, orders.row_coordinates(case.weight), nearest.tied)
        assert_allclose(flat, nearest.upper, rtol=1e-8)


def test_cuts_leave_some_brackets_open():
    cut = [Case(seed).nearest(most_nodes=3) for seed in range(60)]
    assert 5 < sum(not bracket.is_exact for bracket in cut) < 60


def test_a_move_within_the_logit_distance_makes_no_tie():
    """Every logit moves by at most |w| |x|, so the two distances bound each other."""
    for case in map(Case, range(6)):
        longest = np.linalg.norm(case.weight, axis=1).max()
        logit = orders.logit_distance(case.z, case.weight, case.k, case.order).upper
        assert logit <= case.nearest().upper * longest * (1.0 + 1e-5)
