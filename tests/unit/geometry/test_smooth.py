"""The smoothed gate: activation, sets, weights and budget, by hand and by counting."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from moegeom.core.router import Weights
from moegeom.geometry.boundary.orders import extra_experts
from moegeom.geometry.selection import routing_weights, softmax, top_k
from moegeom.geometry.whatif.smooth import (
    activation,
    gaps,
    largest_slope,
    packed,
    set_weights,
    smooth_activations,
    smooth_gate,
    smoothing_budget,
)

SELECTED = Weights("softmax_of_selected_logits")


def some_logits(tokens: int = 200, experts: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, experts))


def test_the_activation_is_its_formula_in_fractions():
    for u in (Fraction(1, 100), Fraction(1, 18), Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)):
        for a, b in ((1, 50), (2, 3), (1, 1)):
            exact = u**a / (u**a + (1 - u) ** b)
            found = activation(np.array([float(u)]), a, b)
            np.testing.assert_allclose(found, float(exact), rtol=1e-13)


def test_the_activation_is_0_below_and_1_above():
    found = activation(np.array([-np.inf, -1.0, 0.0, 1.0, 2.0, np.inf, np.nan]))
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, np.nan])


def test_half_of_the_activation_is_reached_in_the_first_eighteenth_of_the_strip():
    np.testing.assert_allclose(activation(np.array([0.0560134])), 0.5, atol=1e-6)
    np.testing.assert_allclose(activation(np.array([0.0546])), 0.474930, atol=1e-6)


def test_the_largest_slope_is_that_of_finite_differences():
    u = np.linspace(0.0, 1.0, 1_000_001)
    steepest = (np.diff(activation(u)) / np.diff(u)).max()
    np.testing.assert_allclose(largest_slope(), steepest, rtol=1e-5)
    np.testing.assert_allclose(largest_slope(), 17.756, atol=5e-4)
    assert largest_slope(0.5, 50.0) == np.inf


def test_as_many_experts_run_as_the_rule_chooses_and_the_extra_ones():
    logits = some_logits()
    logits[:20] = np.round(logits[:20], 1)  # exact ties, and gaps that are eps itself
    for k, eps in ((1, 0.1), (3, 0.25), (3, 0.5), (8, 2.0), (12, 1.0), (4, 0.0)):
        runs = (smooth_activations(logits, k, eps) > 0.0).sum(axis=1)
        np.testing.assert_array_equal(runs, k + extra_experts(logits, k, eps))


def test_an_expert_that_fades_to_less_than_any_number_still_runs():
    logits = np.array([[1.0, 1.0 - 0.5 * (1 - 1e-9)]])
    assert smooth_activations(logits, 1, 0.5, a=60.0)[0, 1] > 0.0


def test_masked_experts_never_run():
    selection = np.array([[2.0, 1.0, -np.inf, 0.5, -np.inf]])
    np.testing.assert_array_equal(
        smooth_activations(selection, 2, 100.0) > 0, [[True, True, False, True, False]]
    )
    np.testing.assert_array_equal(gaps(selection, 2), [[0.5, np.inf, np.inf]])


@pytest.mark.parametrize(
    "weights",
    [
        SELECTED,
        Weights("scores"),
        Weights("scores", renormalise=True, epsilon=1e-20, scale=2.5),
        Weights("sigmoid_of_selected_logits", renormalise=True),
    ],
)
def test_tokens_without_extra_experts_have_the_weights_of_the_rule_bit_for_bit(weights):
    logits = some_logits()
    scores, k = softmax(logits), 3
    chosen = top_k(logits, k)
    hard = routing_weights(logits, scores, chosen, weights)
    for eps in (0.0, 0.05):
        gate = smooth_gate(logits, scores, logits, k, weights, eps)
        alone = extra_experts(logits, k, eps) == 0
        assert alone.sum() > 100
        found = np.take_along_axis(gate, chosen.astype(np.int64), axis=1)
        np.testing.assert_array_equal(found[alone], hard[alone])
        np.testing.assert_array_equal((gate[alone] > 0).sum(axis=1), k)


def test_of_two_equal_experts_at_the_border_the_smooth_gate_runs_both_alike():
    logits = np.array([[2.0, 1.0, 1.0, 0.0]])
    gate = smooth_gate(logits, logits, logits, 2, SELECTED, 1e-6)
    assert gate[0, 1] == gate[0, 2] > 0.0
    hard = smooth_gate(logits, logits, logits, 2, SELECTED, 0.0)
    assert hard[0, 1] > 0.0 == hard[0, 2]


def test_set_weights_of_full_sets_are_those_of_the_rule():
    logits = some_logits()
    scores = softmax(logits)
    chosen = top_k(logits, 4)
    full = np.zeros(logits.shape)
    np.put_along_axis(full, chosen.astype(np.int64), 1.0, axis=1)
    shared = np.full(len(logits), 0.3)
    for weights in (SELECTED, Weights("scores", renormalise=True, power=2.0, floor=0.1)):
        of_rule = routing_weights(logits, scores, chosen, weights, shared)
        found = set_weights(logits, scores, full, weights, shared)
        picked = np.take_along_axis(found, chosen.astype(np.int64), axis=1)
        np.testing.assert_allclose(picked, of_rule, rtol=1e-13)
        np.testing.assert_array_equal((found > 0).sum(axis=1), 4)


def test_a_token_without_experts_has_no_weight():
    logits = some_logits(2, 3)
    for weights in (SELECTED, Weights("scores", renormalise=True)):
        found = set_weights(logits, softmax(logits), np.zeros((2, 3)), weights)
        np.testing.assert_array_equal(found, 0.0)


def test_weights_that_depend_on_the_order_of_picks_are_refused():
    logits = some_logits(2, 3)
    with pytest.raises(ValueError, match="sparsemixer"):
        set_weights(logits, logits, np.ones((2, 3)), Weights("sparsemixer"))


# ------------------------------------------------------------------------------------------- budget
def test_the_budget_is_met_exactly_where_gaps_differ():
    logits = some_logits(400)
    for k, extra in ((3, 0.5), (3, 1.0), (1, 2.25), (11, 0.125), (4, 8.0)):
        found = smoothing_budget(gaps(logits, k), extra)
        assert found.extra == extra_experts(logits, k, found.eps).mean() == extra


def test_no_budget_is_no_smoothing():
    assert smoothing_budget(gaps(some_logits(), 3), 0.0).eps == 0.0
    assert smoothing_budget(gaps(some_logits(), 3), 1e-9).eps == 0.0


def test_of_equal_gaps_none_is_counted_that_the_budget_does_not_reach():
    tied = np.full((10, 3), 0.25)
    found = smoothing_budget(tied, 1.0)
    assert (found.eps, found.extra) == (0.25, 0.0)


def test_more_extra_experts_than_there_are_is_refused():
    with pytest.raises(ValueError, match="4 extra experts of 3"):
        smoothing_budget(np.ones((5, 3)), 4)
    masked = np.array([[0.1, np.inf], [0.2, np.inf]])
    assert smoothing_budget(masked, 1.0).extra == 1.0
    with pytest.raises(ValueError, match=r"1\.5 extra experts of 1"):
        smoothing_budget(masked, 1.5)


# -------------------------------------------------------------------------------------------- slots
def test_slots_are_filled_from_the_left_in_descending_score():
    mask = np.array([[True, False, True, True], [False, False, False, False], [True] * 4])
    scores = np.array([[1.0, 9.0, -np.inf, 2.0], [0.0] * 4, [5.0, 5.0, 7.0, 5.0]])
    np.testing.assert_array_equal(
        packed(mask, scores), [[3, 0, 2, -1], [-1, -1, -1, -1], [2, 0, 1, 3]]
    )
    assert packed(mask[1:2], scores[1:2], 3).shape == (1, 3)
