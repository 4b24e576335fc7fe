"""Every float lands in the bin that its edges say; shares are exact, quantiles within a bin.

The oracle is NumPy on the values themselves.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

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


def histogram(values: np.ndarray) -> np.ndarray:
    return np.bincount(bin_index(values), minlength=NUM_BINS)


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
