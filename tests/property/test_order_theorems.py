"""Orders and spreads of near-ties: monotone, consistent with each other, and with brute force."""

from __future__ import annotations

import numpy as np
import pytest
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


def one(scores) -> np.ndarray:
    return np.array([scores])


def spread_by_brute_force(scores, k, order):
    ordered = sorted(scores, reverse=True)
    windows = [
        ordered[a] - ordered[a + order]
        for a in range(len(scores) - order)
        if a <= k - 1 and a + order >= k
    ]
    return min(windows, default=np.inf) if k < len(scores) else np.inf


@given(SCORES, st.integers(1, 9))
def test_the_spread_is_the_least_of_all_windows(drawn, order):
    scores, k = drawn
    found = tie_spread(one(scores), k, order)
    np.testing.assert_array_equal(found, [spread_by_brute_force(scores, k, order)])


@given(SCORES)
def test_the_spread_of_order_1_is_the_margin(drawn):
    scores, k = drawn
    np.testing.assert_array_equal(tie_spread(one(scores), k, 1), margin(one(scores), k))


@given(SCORES)
def test_the_spread_does_not_decrease_with_the_order(drawn):
    scores, k = drawn
    spreads = [tie_spread(one(scores), k, order)[0] for order in range(1, len(scores) + 1)]
    assert spreads == sorted(spreads)


@given(SCORES, EPS)
def test_the_order_is_the_largest_whose_spread_fits(drawn, eps):
    scores, k = drawn
    fitting = [n for n in range(1, len(scores)) if tie_spread(one(scores), k, n)[0] <= eps]
    assert order_eps(one(scores), k, eps)[0] == max(fitting, default=0)


@given(SCORES, EPS, EPS)
def test_the_order_does_not_decrease_with_eps(drawn, eps, more):
    scores, k = drawn
    less, larger = sorted((eps, more))
    assert order_eps(one(scores), k, less)[0] <= order_eps(one(scores), k, larger)[0]


@given(SCORES)
def test_the_exact_order_counts_ties_at_the_border_only(drawn):
    scores, k = drawn
    ordered = sorted(scores, reverse=True)
    tied = ordered.count(ordered[k - 1]) - 1
    expected = tied if k < len(scores) and ordered[k] == ordered[k - 1] else 0
    assert order_eps(one(scores), k, 0.0)[0] == expected


@given(SCORES, EPS)
def test_there_are_no_more_extra_experts_than_the_order(drawn, eps):
    scores, k = drawn
    extras = extra_experts(one(scores), k, eps)[0]
    assert extras <= order_eps(one(scores), k, eps)[0]
    ordered = sorted(scores, reverse=True)
    assert extras == sum(ordered[k - 1] - z < eps for z in ordered[k:])


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_relabelling_experts_changes_no_order(eps):
    random = np.random.default_rng(0)
    scores = random.integers(-4, 4, (50, 7)) / 4
    permuted = scores[:, random.permutation(7)]
    np.testing.assert_array_equal(order_eps(scores, 3, eps), order_eps(permuted, 3, eps))
