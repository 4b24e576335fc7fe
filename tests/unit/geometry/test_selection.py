"""Scores, masks, picks and weights by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry.selection import (
    LARGEST_SLOPE,
    SCORES,
    fill_decides,
    group_margin,
    group_mask,
    group_scores,
    kept_groups,
    margin,
    route,
    selection_scores,
    top_k,
)

INF = np.inf


def test_ties_go_to_the_lowest_index():
    z = np.array([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 0.0, -0.0, -1.0]])
    np.testing.assert_array_equal(top_k(z, 2), [[1, 2], [0, 1]])


def test_chosen_experts_come_in_descending_order():
    np.testing.assert_array_equal(top_k(np.array([[0.5, 3.0, -1.0, 2.0]]), 3), [[1, 3, 0]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_order_of_ties_is_lexicographic_whatever_the_values(dtype):
    random = np.random.default_rng(0)
    z = random.integers(-2, 3, (300, 12)).astype(dtype)
    expected = [sorted(range(12), key=lambda i, row=row: (-row[i], i))[:5] for row in z.tolist()]
    np.testing.assert_array_equal(top_k(z, 5), expected)


@pytest.mark.parametrize(
    ("z", "k", "expected"),
    [
        ([3.0, 1.0, 2.0], 1, 1.0),
        ([3.0, 1.0, 2.0], 3, INF),
        ([1.0, 1.0, 0.0], 2, 1.0),  # a tie inside the chosen set is no tie
        ([1.0, 1.0, 0.0], 1, 0.0),
        ([1.0, 0.5, -INF], 2, INF),  # the only one left out was not allowed
        ([1.0, -INF, -INF], 2, INF),  # two masked scores do not compete
    ],
)
def test_the_margin_is_the_gap_across_the_border_of_the_chosen_set(z, k, expected):
    np.testing.assert_array_equal(margin(np.array([z]), k), [expected])


def test_group_scores_are_the_maximum_or_the_sum_of_two():
    q = np.array([[0.9, 0.1, 0.2, 0.5, 0.6, 0.55]])
    by_max = GroupMask(3, 2, "max", -INF)
    by_sum = GroupMask(3, 2, "top2_sum", -INF)
    np.testing.assert_allclose(group_scores(q, by_max), [[0.9, 0.5, 0.6]], rtol=1e-15)
    np.testing.assert_allclose(group_scores(q, by_sum), [[1.0, 0.7, 1.15]], rtol=1e-15)


def test_a_group_of_one_has_its_own_score():
    q = np.array([[0.3, 0.7]])
    np.testing.assert_array_equal(group_scores(q, GroupMask(2, 1, "top2_sum", 0.0)), q)


def test_equal_groups_are_kept_from_the_lowest():
    kept = kept_groups(np.array([[1.0, 2.0, 1.0, 1.0]]), 2)
    np.testing.assert_array_equal(kept, [[True, True, False, False]])


def test_without_a_dropped_group_the_group_margin_is_infinite():
    np.testing.assert_array_equal(
        group_margin(np.ones((2, 4)), GroupMask(2, 2, "max", 0.0)), [INF] * 2
    )


def test_fill_zero_chooses_otherwise_than_fill_minus_infinity_once_a_kept_score_is_negative():
    q = np.array([[0.5, -0.2, 0.1, 0.05]])
    logits = q  # identity scores
    chosen = {}
    for fill in (0.0, -INF):
        rule = Rule(2, "identity", Weights("scores"), groups=GroupMask(2, 1, "max", fill))
        chosen[fill] = route(logits, rule).chosen
    np.testing.assert_array_equal(chosen[0.0], [[0, 2]])
    np.testing.assert_array_equal(chosen[-INF], [[0, 1]])


def test_the_mask_leaves_kept_scores_untouched():
    q = np.array([[0.1, 0.4, 0.3, 0.2]])
    np.testing.assert_array_equal(
        group_mask(q, GroupMask(2, 1, "max", -INF)), [[0.1, 0.4, -INF, -INF]]
    )


def test_a_bias_changes_the_choice_and_not_the_weights():
    logits = np.array([[2.0, 1.0, 0.0]])
    rule = Rule(1, "sigmoid", Weights("scores"), has_selection_bias=True)
    found = route(logits, rule, np.array([0.0, 0.0, 0.9]))
    np.testing.assert_array_equal(found.chosen, [[2]])
    np.testing.assert_array_equal(found.weights, [[0.5]])


def test_an_affine_rule_compares_logits_and_not_scores():
    """Softmax rounds 0 and -745 to one float; the logits tell them apart."""
    logits = np.array([[800.0, 20.0, 19.0]])
    rule = Rule(2, "softmax", Weights("scores"))
    np.testing.assert_array_equal(route(logits, rule).chosen, [[0, 1]])
    np.testing.assert_array_equal(route(logits, rule).margin, [1.0])
    np.testing.assert_array_equal(selection_scores(logits, rule), logits)


def test_weights_are_renormalised_and_scaled():
    logits = np.log(np.array([[4.0, 2.0, 1.0, 1.0]]))
    plain = Rule(2, "softmax", Weights("scores"))
    full = Rule(2, "softmax", Weights("scores", renormalise=True, epsilon=0.25, scale=3.0))
    np.testing.assert_allclose(route(logits, plain).weights, [[0.5, 0.25]], rtol=1e-14)
    np.testing.assert_allclose(route(logits, full).weights, [[1.5, 0.75]], rtol=1e-14)


@pytest.mark.parametrize("name", SCORES)
def test_no_score_has_a_larger_slope_than_stated(name):
    """|s_i(z') - s_i(z)| <= slope max |z' - z|, and there are logits where it is nearly so."""
    random = np.random.default_rng(2)
    z = random.standard_normal((20000, 2)) * random.choice([0.1, 1.0, 4.0], (20000, 1))
    z[0] = 0.0
    step = 1e-4 * random.choice([-1.0, 1.0], z.shape)
    step[0] = [1e-4, -1e-4]
    change = np.abs(SCORES[name](z + step) - SCORES[name](z)).max(axis=1)
    slope = change / np.abs(step).max(axis=1)
    np.testing.assert_allclose(slope.max(), LARGEST_SLOPE[name], rtol=2e-3)


@pytest.mark.parametrize("fill", [0.0, -INF])
@pytest.mark.parametrize("shift", [-1.0, -0.3, 0.0])
def test_the_fill_decides_where_the_other_fill_chooses_another_set(fill, shift):
    rule = Rule(3, "sigmoid", Weights("scores"), True, groups=GroupMask(4, 2, "top2_sum", fill))
    other = replace(rule, groups=GroupMask(4, 2, "top2_sum", -INF if fill == 0.0 else 0.0))
    random = np.random.default_rng(3)
    logits, bias = random.normal(size=(500, 16)), random.normal(0.0, 0.3, 16) + shift
    mine, theirs = (np.sort(route(logits, r, bias).chosen, axis=1) for r in (rule, other))
    assert rule.groups is not None
    masked = group_mask(selection_scores(logits, rule, bias), rule.groups)
    last = -np.sort(-masked, axis=1)[:, 2]
    np.testing.assert_array_equal(fill_decides(last, fill), (mine != theirs).any(axis=1))
