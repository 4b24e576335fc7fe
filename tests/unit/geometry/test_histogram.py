"""Histogram bins at their edges; shares, quantiles and ranks are those of the values themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import rankdata

from moegeom.geometry.histogram import (
    BINS_PER_OCTAVE,
    NUM_BINS,
    bin_edges,
    bin_index,
    mean_rank,
    quantile,
    share_among_least,
    share_below,
)


def histogram(values):
    return np.bincount(bin_index(np.asarray(values, dtype=np.float64)), minlength=NUM_BINS)


def test_edges_ascend_by_sixteenths_of_an_octave_and_the_last_bins_take_all_beyond():
    edges = bin_edges()
    assert_array_equal(np.isin(2.0 ** np.arange(-40, 25), edges), True)
    assert_array_equal(edges[[0, 1, -2, -1]], [0.0, 2.0**-40, 2.0**24, np.inf])
    assert len(edges) == NUM_BINS + 1
    ratio = edges[2:-1] / edges[1:-2]
    assert 1 + 1 / 32 < ratio.min() <= ratio.max() < 1 + 1 / 16 + 1e-15
    # an edge belongs to the bin above and its neighbour to the bin below
    numbers = np.arange(1, NUM_BINS)
    assert_array_equal(bin_index(edges[1:-1]), numbers)
    assert_array_equal(bin_index(np.nextafter(edges[1:-1], 0.0)), numbers - 1)
    small, large = [0.0, -0.0, 5e-324, 2.0**-41], [2.0**24, 1.7e308, np.inf]
    last = NUM_BINS - 1
    assert_array_equal(bin_index(np.array([*small, 2.0**-40, *large])), [0] * 4 + [1] + [last] * 3)


def test_shares_are_below_an_edge_quantiles_the_lower_of_two_and_cut_bins_in_part():
    counts = histogram([0.5, 1.0, 1.0, 2.0])
    assert_array_equal(share_below(counts, np.array([0.5, 1.0, 2.0, 4.0])), [0, 0.25, 0.75, 1])
    for threshold in (0.3, 2.0**25, -1.0, np.nan):
        with pytest.raises(ValueError, match="bin edges"):
            share_below(counts, np.array([threshold]))
    middle = np.array([0.5])
    assert_array_equal(quantile(histogram([np.inf, np.inf]), middle), [np.inf])
    assert_array_equal(quantile(histogram([0.0, 1e-20]), middle), [0.0])
    values = quantile(histogram([1.0, 1.0, 100.0, 100.0]), np.array([0.5, 0.51]))
    assert_allclose(values, [1.0, 100.0], rtol=1 / 16)
    empty = np.zeros((2, NUM_BINS), dtype=np.int64)
    assert_array_equal(share_below(empty, np.array([1.0])), np.full((2, 1), np.nan))
    assert_array_equal(quantile(empty, middle), np.full((2, 1), np.nan))
    one, two = histogram([1.0, 3.0]), histogram([0.1])
    both = np.stack([[one], [two]])
    ladder, middle = np.array([0.5, 2.0]), np.array([0.25, 0.75])
    assert_array_equal(share_below(both, ladder)[0, 0], share_below(one, ladder))
    assert_array_equal(quantile(both, middle)[1, 0], quantile(two, middle))
    whole, some = np.array([5, 10, 85]), np.array([1, 4, 5])
    shares = [share_among_least(some, whole, share) for share in (0.05, 0.10, 0.15)]
    assert_allclose(shares, [0.1, 0.3, 0.5])
    assert mean_rank(some, whole) == pytest.approx((2.5 + 4 * 10 + 5 * 57.5) / 1000)


FLOATS = st.floats(min_value=0.0, allow_nan=False, allow_infinity=True)
INSIDE = st.floats(min_value=2.0**-40, max_value=2.0**23)


@given(arrays(np.float64, st.integers(1, 200), elements=FLOATS), st.integers(-40, 24))
def test_bins_are_those_of_a_search_among_the_edges_and_shares_those_of_the_values(
    values, exponent
):
    expected = np.minimum(np.searchsorted(bin_edges(), values, side="right") - 1, NUM_BINS - 1)
    assert_array_equal(bin_index(values), expected)
    share = share_below(histogram(values), np.array([2.0**exponent]))
    assert_array_equal(share, [(values < 2.0**exponent).mean()])


@given(arrays(np.float64, st.integers(1, 200), elements=INSIDE), st.floats(0.001, 0.999))
def test_quantiles_ascend_and_are_within_a_sixteenth_of_those_of_the_values(values, probability):
    counts = histogram(values)
    expected = np.quantile(values, probability, method="inverted_cdf")
    of_counts = quantile(counts, np.array([probability]))
    assert_allclose(of_counts, [expected], rtol=1 / BINS_PER_OCTAVE + 1e-12)
    assert (np.diff(quantile(counts, np.linspace(0.01, 0.99, 25))) >= 0.0).all()


# ------------------------------------------------------------------------------------------- ranks
COUNTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12).map(
    lambda pairs: np.array(pairs, np.int64).T
)


@given(COUNTS, st.floats(0.0, 1.0))
def test_the_mean_rank_is_that_of_scipy_and_shares_among_the_least_are_bounded(counts, share):
    some, whole = counts[0], counts.sum(axis=0)
    rank, among_least = mean_rank(some, whole), share_among_least(some, whole, share)
    if not some.any():
        assert np.isnan([rank, among_least]).all()
        return
    values = np.repeat(np.arange(len(whole)), whole)
    mean_of_bin = [rankdata(values)[values == b].mean() if n else 0.0 for b, n in enumerate(whole)]
    # the first of n ranks is 1; here the middle of the first of n parts
    expected = (np.average(mean_of_bin, weights=some) - 0.5) / len(values)
    assert_allclose(rank, expected, rtol=1e-12)
    assert 0.0 <= among_least <= min(1.0, share * whole.sum() / some.sum()) + 1e-12
    assert_allclose(share_among_least(some, whole, 1.0), 1.0)
    assert_allclose(share_among_least(whole, whole, share), share, atol=1e-12)
