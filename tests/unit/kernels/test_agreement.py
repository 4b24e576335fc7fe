"""Disagreements with the recorded choices: counted by outcome, the first of them listed."""

from __future__ import annotations

import numpy as np

from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.reductions.choices import BEYOND, EQUAL, NEAR_TIE, NUM_LISTED

REDUCTION = REDUCTIONS["agreement"]


def folded(matches, margin, bound=None, group_margin=None):
    tokens = len(matches)
    zeros = np.zeros(tokens, np.int32)
    accumulator = REDUCTION.start(Extent(1, 4, 1))
    quantities = TokenBatch(
        token=np.arange(tokens),
        population=zeros,
        block=zeros,
        chosen=np.zeros((tokens, 1), np.int32),
        margin=np.asarray(margin, np.float64),
        group_margin=group_margin,
        float_bound=bound,
        matches_recording=np.asarray(matches),
    )
    accumulator.fold(quantities, {})
    return accumulator.state()


def counted(state):
    return REDUCTION.select(REDUCTION.settle(state), None, None)[[EQUAL, NEAR_TIE, BEYOND]]


def test_a_difference_within_the_float_bound_is_a_near_tie():
    state = folded([True, False, False], [0.0, 0.1, 0.1], np.array([1.0, 0.1, 0.05]))
    np.testing.assert_array_equal(counted(state), [1, 1, 1])


def test_without_a_bound_only_an_exact_tie_is_near():
    np.testing.assert_array_equal(counted(folded([False, False], [0.0, 1e-300])), [0, 1, 1])


def test_half_the_group_margin_counts_like_a_margin():
    state = folded([False], [5.0], np.array([0.1]), np.array([0.2]))
    np.testing.assert_array_equal(counted(state), [0, 1, 0])
    np.testing.assert_array_equal(state["margin"], [0.1])


def test_the_first_differing_tokens_are_listed_with_their_margins():
    margin = np.arange(200.0)
    matches = np.arange(200) % 2 == 0
    state = folded(matches, margin)
    np.testing.assert_array_equal(state["token"], np.arange(1, 2 * NUM_LISTED, 2))
    np.testing.assert_array_equal(state["margin"], margin[state["token"]])
