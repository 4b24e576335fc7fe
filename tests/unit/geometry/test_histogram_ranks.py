"""Ranks and shares among the least from histograms are those of the values themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from moegeom.geometry.histogram import mean_rank, share_among_least

COUNTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12).map(
    lambda pairs: np.array(pairs, np.int64).T
)


@given(COUNTS)
def test_the_mean_rank_is_that_of_scipy(counts):
    some, rest = counts
    whole = some + rest
    rank = mean_rank(some, whole)
    if not some.any():
        assert np.isnan(rank)
        return
    values = np.repeat(np.arange(len(whole)), whole)
    mean_of_bin = [rankdata(values)[values == b].mean() if n else 0.0 for b, n in enumerate(whole)]
    # the first of n ranks is 1; here the middle of the first of n parts
    expected = (np.average(mean_of_bin, weights=some) - 0.5) / len(values)
    np.testing.assert_allclose(rank, expected, rtol=1e-12)


@given(COUNTS, st.floats(0.0, 1.0))
def test_the_share_among_the_least_is_bounded_and_all_of_them_hold_all(counts, share):
    some, rest = counts
    whole = some + rest
    if not some.any():
        assert np.isnan(share_among_least(some, whole, share))
        return
    found = share_among_least(some, whole, share)
    assert 0.0 <= found <= min(1.0, share * whole.sum() / some.sum()) + 1e-12
    np.testing.assert_allclose(share_among_least(some, whole, 1.0), 1.0)
    np.testing.assert_allclose(share_among_least(whole, whole, share), share, atol=1e-12)


def test_a_bin_that_is_cut_counts_in_proportion():
    whole = np.array([5, 10, 85])
    some = np.array([1, 4, 5])
    assert share_among_least(some, whole, 0.05) == pytest.approx(0.1)
    assert share_among_least(some, whole, 0.10) == pytest.approx(0.3)
    assert share_among_least(some, whole, 0.15) == pytest.approx(0.5)
    assert mean_rank(some, whole) == pytest.approx((2.5 + 4 * 10 + 5 * 57.5) / 1000)
