"""Orders and spreads of near-ties: monotone, consistent with each other, and with brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moegeom.geometry.boundary.orders import extra_experts, order_eps, tie_spread
from moegeom.geometry.selection import margin

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
    windows = [
        ordered[a] - ordered[a + order]
        for a in range(len(scores) - order)
        if a <= k - 1 and a + order >= k
    ]
    return min(windows, default=np.inf) if k < len(scores) else np.inf


@given(SCORES)
def test_spreads_are_the_least_of_all_windows_and_ascend_from_the_margin(drawn):
    scores, k = drawn
    z, orders = np.array([scores]), range(1, 10)
    spreads = [tie_spread(z, k, order)[0] for order in orders]
    assert spreads == [spread_by_brute_force(scores, k, order) for order in orders]
    assert spreads[0] == margin(z, k)[0]
    assert spreads == sorted(spreads)


@given(SCORES, EPS, EPS)
def test_the_order_is_the_largest_whose_spread_fits_and_ascends_with_eps(drawn, eps, more):
    scores, k = drawn
    z = np.array([scores])
    fitting = [n for n in range(1, len(scores)) if tie_spread(z, k, n)[0] <= eps]
    order = order_eps(z, k, eps)[0]
    assert order == max(fitting, default=0)
    assert order <= order_eps(z, k, eps + more)[0]
    renamed = np.random.default_rng(0).permutation(len(scores))
    assert order_eps(z[:, renamed], k, eps)[0] == order


@given(SCORES)
def test_the_exact_order_counts_ties_at_the_border_only(drawn):
    scores, k = drawn
    ordered = sorted(scores, reverse=True)
    tied = ordered.count(ordered[k - 1]) - 1
    expected = tied if k < len(scores) and ordered[k] == ordered[k - 1] else 0
    assert order_eps(np.array([scores]), k, 0.0)[0] == expected


@given(SCORES, EPS)
def test_there_are_no_more_extra_experts_than_the_order(drawn, eps):
    scores, k = drawn
    extras = extra_experts(np.array([scores]), k, eps)[0]
    assert extras <= order_eps(np.array([scores]), k, eps)[0]
    ordered = sorted(scores, reverse=True)
    assert extras == sum(ordered[k - 1] - z < eps for z in ordered[k:])
