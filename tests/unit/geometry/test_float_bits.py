"""Histogram bins at their edges."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.histogram import NUM_BINS, bin_edges, bin_index, quantile, share_below

POWERS = 2.0 ** np.arange(-40, 25)


def histogram(values):
    return np.bincount(bin_index(np.asarray(values, dtype=np.float64)), minlength=NUM_BINS)


def test_every_power_of_two_is_an_edge():
    np.testing.assert_array_equal(np.isin(POWERS, bin_edges()), True)


def test_edges_ascend_from_zero_to_infinity_by_sixteenths_of_an_octave():
    edges = bin_edges()
    np.testing.assert_array_equal(edges[[0, 1, -2, -1]], [0.0, 2.0**-40, 2.0**24, np.inf])
    np.testing.assert_array_equal(len(edges), NUM_BINS + 1)
    ratio = edges[2:-1] / edges[1:-2]
    np.testing.assert_array_less(ratio, 1 + 1 / 16 + 1e-15)
    np.testing.assert_array_less(1 + 1 / 32, ratio)


def test_an_edge_belongs_to_the_bin_above_and_its_neighbour_to_the_bin_below():
    edges = bin_edges()[1:-1]
    numbers = np.arange(1, NUM_BINS)
    np.testing.assert_array_equal(bin_index(edges), numbers)
    np.testing.assert_array_equal(bin_index(np.nextafter(edges, 0.0)), numbers - 1)


@pytest.mark.parametrize(
    ("value", "index"),
    [
        (0.0, 0),
        (-0.0, 0),
        (5e-324, 0),
        (2.0**-41, 0),
        (2.0**-40, 1),
        (2.0**24, NUM_BINS - 1),
        (1.7e308, NUM_BINS - 1),
        (np.inf, NUM_BINS - 1),
    ],
)
def test_the_first_bin_takes_the_small_and_the_last_the_large(value, index):
    np.testing.assert_array_equal(bin_index(np.array([value])), [index])


def test_shares_are_strictly_below_the_threshold():
    counts = histogram([0.5, 1.0, 1.0, 2.0])
    np.testing.assert_array_equal(
        share_below(counts, np.array([0.5, 1.0, 2.0, 4.0])), [0, 0.25, 0.75, 1]
    )


def test_a_threshold_that_is_no_edge_is_refused():
    for threshold in (0.3, 2.0**25, -1.0, np.nan):
        with pytest.raises(ValueError, match="bin edges"):
            share_below(histogram([1.0]), np.array([threshold]))


def test_an_empty_histogram_has_no_share_and_no_quantile():
    empty = np.zeros((2, NUM_BINS), dtype=np.int64)
    np.testing.assert_array_equal(share_below(empty, np.array([1.0])), np.full((2, 1), np.nan))
    np.testing.assert_array_equal(quantile(empty, np.array([0.5])), np.full((2, 1), np.nan))


def test_a_quantile_in_the_last_bin_is_infinite_and_in_the_first_zero():
    np.testing.assert_array_equal(quantile(histogram([np.inf, np.inf]), np.array([0.5])), [np.inf])
    np.testing.assert_array_equal(quantile(histogram([0.0, 1e-20]), np.array([0.5])), [0.0])


def test_a_quantile_that_falls_between_two_values_takes_the_lower():
    found = quantile(histogram([1.0, 1.0, 100.0, 100.0]), np.array([0.5, 0.51]))
    np.testing.assert_allclose(found, [1.0, 100.0], rtol=1 / 16)


def test_leading_axes_are_separate_histograms():
    one, two = histogram([1.0, 3.0]), histogram([0.1])
    both = np.stack([[one], [two]])
    ladder, middle = np.array([0.5, 2.0]), np.array([0.25, 0.75])
    np.testing.assert_array_equal(share_below(both, ladder)[0, 0], share_below(one, ladder))
    np.testing.assert_array_equal(quantile(both, middle)[1, 0], quantile(two, middle))
