"""Smoothed gates: as many experts as counted, continuous, with a known largest slope."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.router import Weights
from moegeom.geometry.boundary.orders import extra_experts
from moegeom.geometry.whatif.smooth import (
    gaps,
    hard_set,
    smooth_activations,
    smooth_gate,
    smoothing_budget,
)

#: Few distinct values, so that exact ties are common; all are exact in binary.
BATCH = st.tuples(st.integers(1, 5), st.integers(1, 7)).flatmap(
    lambda shape: st.tuples(
        arrays(np.int64, shape, elements=st.integers(-8, 8)).map(lambda logits: logits / 4),
        st.integers(1, shape[1]),
    )
)
EPS = st.integers(0, 20).map(lambda n: n / 8)
SELECTED = Weights("softmax_of_selected_logits")


@given(BATCH, EPS)
def test_as_many_run_as_are_chosen_and_extra(drawn, eps):
    logits, k = drawn
    gate = smooth_gate(logits, logits, logits, k, SELECTED, eps)
    assert_array_equal((gate > 0).sum(axis=1), k + extra_experts(logits, k, eps))
    assert_allclose(gate.sum(axis=1), 1.0, rtol=1e-12)
    assert (gate[hard_set(logits, k)] > 0).all()


@given(BATCH, EPS, st.integers(0, 2**32 - 1))
def test_no_activation_changes_faster_than_the_largest_slope(drawn, eps, seed):
    """Of the difference to the k-th score, which a change of scores moves by twice itself."""
    logits, k = drawn
    eps = eps + 0.125
    step = np.random.default_rng(seed).uniform(-1e-3, 1e-3, logits.shape)
    # at a tie of the border the hard set is one of two, and both have activation 1
    before, after = (smooth_activations(z, k, eps) for z in (logits, logits + step))
    largest = 17.756 / eps * 2.0 * np.abs(step).max(axis=1, keepdims=True)
    assert (np.abs(after - before) <= largest + 1e-12).all()


def test_the_largest_slope_is_reached():
    eps, at = 0.4, 0.0545
    logits = np.array([[1.0, 1.0 - eps * (1 - at)]])
    moved = logits + np.array([[0.0, 1e-6]])
    before, after = (smooth_activations(z, 1, eps)[0, 1] for z in (logits, moved))
    assert_allclose((after - before) / 1e-6, 17.756 / eps, rtol=1e-4)


@given(BATCH, st.floats(0.0, 1.0))
def test_a_budget_is_never_exceeded_and_the_next_gap_would(drawn, share):
    logits, k = drawn
    extra = share * (logits.shape[1] - k)
    most = round(len(logits) * extra) / len(logits)
    budget = smoothing_budget(gaps(logits, k), extra)
    assert_allclose(budget.extra, extra_experts(logits, k, budget.eps).mean(), rtol=1e-12)
    assert budget.extra <= most + 1e-12
    wider = extra_experts(logits, k, np.nextafter(budget.eps, np.inf)).mean()
    assert wider >= most - 1e-12 or budget.eps == 0.0
