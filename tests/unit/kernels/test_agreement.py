"""Disagreements with the recorded choices: counted by outcome, the first of them listed."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions.choices import BEYOND, EQUAL, NEAR_TIE, NUM_LISTED
from tests.unit.kernels.batches import batch_of

REDUCTION = REDUCTIONS["agreement"]


def folded(matches, margin, bound=None, group_margin=None):
    accumulator = REDUCTION.start(Extent(1, 4, 1))
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
    return REDUCTION.select(REDUCTION.settle(state), None, None)[[EQUAL, NEAR_TIE, BEYOND]]


def test_a_difference_within_the_float_bound_is_a_near_tie():
    state = folded([True, False, False], [0.0, 0.1, 0.1], np.array([1.0, 0.1, 0.05]))
    np.testing.assert_array_equal(counted(state), [1, 1, 1])
    # without a bound only an exact tie
    np.testing.assert_array_equal(counted(folded([False, False], [0.0, 1e-300])), [0, 1, 1])
    # half the group margin counts like a margin
    state = folded([False], [5.0], np.array([0.1]), np.array([0.2]))
    np.testing.assert_array_equal(counted(state), [0, 1, 0])
    np.testing.assert_array_equal(state["margin"], [0.1])


def test_the_first_differing_tokens_are_listed_with_their_margins():
    margin = np.arange(200.0)
    matches = np.arange(200) % 2 == 0
    state = folded(matches, margin)
    np.testing.assert_array_equal(state["token"], np.arange(1, 2 * NUM_LISTED, 2))
    np.testing.assert_array_equal(state["margin"], margin[state["token"]])
