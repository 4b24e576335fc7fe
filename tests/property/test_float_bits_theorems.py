"""Every float lands in the bin that its edges say; shares are exact, quantiles within a bin.

The oracle is NumPy on the values themselves.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moegeom.geometry.histogram import (
    BINS_PER_OCTAVE,
    NUM_BINS,
    bin_edges,
    bin_index,
    quantile,
    share_below,
)

FLOATS = st.floats(min_value=0.0, allow_nan=False, allow_infinity=True)
INSIDE = st.floats(min_value=2.0**-40, max_value=2.0**23)


@given(arrays(np.float64, st.integers(1, 50), elements=FLOATS))
def test_every_float_lies_between_the_edges_of_its_bin(values):
    index, edges = bin_index(values), bin_edges()
    np.testing.assert_array_equal(edges[index] <= values, True)
    is_below = (values < edges[index + 1]) | (index == NUM_BINS - 1)
    np.testing.assert_array_equal(is_below, True)


@given(arrays(np.float64, st.integers(1, 50), elements=FLOATS))
def test_bins_are_those_of_a_search_among_the_edges(values):
    expected = np.minimum(np.searchsorted(bin_edges(), values, side="right") - 1, NUM_BINS - 1)
    np.testing.assert_array_equal(bin_index(values), expected)


@given(arrays(np.float64, st.integers(1, 200), elements=FLOATS), st.integers(-40, 24))
def test_the_share_below_a_power_of_two_is_that_of_the_values(values, exponent):
    counts = np.bincount(bin_index(values), minlength=NUM_BINS)
    found = share_below(counts, np.array([2.0**exponent]))
    np.testing.assert_array_equal(found, [(values < 2.0**exponent).mean()])


@given(arrays(np.float64, st.integers(1, 200), elements=INSIDE), st.floats(0.001, 0.999))
def test_quantiles_are_within_a_sixteenth_of_those_of_the_values(values, probability):
    counts = np.bincount(bin_index(values), minlength=NUM_BINS)
    found = quantile(counts, np.array([probability]))
    expected = np.quantile(values, probability, method="inverted_cdf")
    np.testing.assert_allclose(found, [expected], rtol=1 / BINS_PER_OCTAVE + 1e-12)


@given(arrays(np.float64, st.integers(1, 100), elements=INSIDE))
def test_quantiles_ascend_with_the_probability(values):
    counts = np.bincount(bin_index(values), minlength=NUM_BINS)
    found = quantile(counts, np.linspace(0.01, 0.99, 25))
    np.testing.assert_array_equal(np.diff(found) >= 0.0, True)
