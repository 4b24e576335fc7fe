"""Disagreements with recorded choices, and widths of brackets at the corners."""

import numpy as np

from moegeom.core.metric import RouterFacts
from moegeom.geometry.histogram import NUM_BINS, bin_index
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions.choices import BEYOND, EQUAL, NEAR_TIE, NUM_LISTED
from moegeom.kernels.table import load_kernels
from moegeom.metrics import METRICS
from moegeom.testing.metric_theorems import RULES, router
from tests.unit.kernels.batches import batch_of

AGREEMENT = REDUCTIONS["agreement"]


def folded_agreement(matches, margin, bound=None, group_margin=None):
    accumulator = AGREEMENT.start(Extent(1, 4, 1))
    batch = batch_of(
        len(matches),
        margin=np.asarray(margin, np.float64),
        group_margin=group_margin,
        float_bound=bound,
        matches_recording=np.asarray(matches),
    )
    accumulator.fold(batch, {})
    return accumulator.state()


def counted(state):
    return AGREEMENT.select(AGREEMENT.settle(state), None, None)[[EQUAL, NEAR_TIE, BEYOND]]


def test_differences_within_the_float_bound_are_near_ties_and_the_first_are_listed():
    state = folded_agreement([True, False, False], [0.0, 0.1, 0.1], np.array([1.0, 0.1, 0.05]))
    np.testing.assert_array_equal(counted(state), [1, 1, 1])
    # without a bound only an exact tie
    np.testing.assert_array_equal(
        counted(folded_agreement([False, False], [0.0, 1e-300])), [0, 1, 1]
    )
    # half the group margin counts like a margin
    state = folded_agreement([False], [5.0], np.array([0.1]), np.array([0.2]))
    np.testing.assert_array_equal(counted(state), [0, 1, 0])
    np.testing.assert_array_equal(state["margin"], [0.1])
    margin = np.arange(200.0)
    matches = np.arange(200) % 2 == 0
    state = folded_agreement(matches, margin)
    np.testing.assert_array_equal(state["token"], np.arange(1, 2 * NUM_LISTED, 2))
    np.testing.assert_array_equal(state["margin"], margin[state["token"]])


def histogram_of(lower, upper):
    ends = {"distance": np.array(lower), "distance_upper": np.array(upper)}
    batch = batch_of(len(lower), **ends)
    reduction = REDUCTIONS["bracket_histogram"]
    accumulator = reduction.start(Extent(1, 4, 1))
    accumulator.fold(batch, load_kernels("reference"))
    return reduction.select(reduction.settle(accumulator.state()), None, None)


def figures(lower, upper):
    histogram = histogram_of(lower, upper)
    facts = RouterFacts(router(RULES["softmax"]), len(lower))
    return METRICS["distance_bracket"].finish({"bracket_histogram": histogram}, facts)["layers"]


def test_the_first_bin_holds_exact_brackets_alone_and_figures_are_those_of_widths():
    exact = [0.0, 1.0, 1e-300, np.inf]
    np.testing.assert_array_equal(histogram_of(exact, exact)[0], 4)
    hardly = np.nextafter(exact[:3], np.inf)
    found = histogram_of(exact[:3], hardly)
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_array_equal(found[1], 2)  # 2^-52 wide, counted as 2^-40
    np.testing.assert_array_equal(found[-1], 1)  # from 0, as wide as can be
    bins = np.flatnonzero(histogram_of([2.0, 4.0], [3.0, 5.0]))
    np.testing.assert_array_equal(bins, bin_index(np.array([0.25, 0.5])))
    np.testing.assert_array_equal(histogram_of([2.0, 0.0], [np.inf, 3.0])[NUM_BINS - 1], 2)
    exact = figures([1.0, 2.0], [1.0, 2.0])
    np.testing.assert_equal(list(exact.values()), [1.0, None, 1.0])
    some = figures([1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 3.0, 5.0])
    np.testing.assert_equal(some["distance_exact_share"], 0.5)
    assert 1.25 <= some["distance_bracket_p50"] <= 1.25 * 1.0625
    assert 1.5 < some["distance_bracket_max"] <= 1.0 + 0.5 * 1.0625
    np.testing.assert_equal(figures([1.0], [np.inf])["distance_bracket_max"], None)  # the open bin
    np.testing.assert_equal(list(figures(np.empty(0), np.empty(0)).values()), [None, None, None])
