"""Scores, masks, picks and weights by hand."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry import selection as choice

INF = np.inf
PLAIN = Weights("scores")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_experts_come_in_descending_order_and_ties_by_their_numbers(dtype):
    z = np.array([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 0.0, -0.0, -1.0]], dtype)
    assert_array_equal(choice.top_k(z, 2), [[1, 2], [0, 1]])
    assert_array_equal(choice.top_k(np.array([[0.5, 3.0, -1.0, 2.0]], dtype), 3), [[1, 3, 0]])
    z = np.random.default_rng(0).integers(-2, 3, (300, 12)).astype(dtype)
    expected = [sorted(range(12), key=lambda i, row=row: (-row[i], i))[:5] for row in z.tolist()]
    assert_array_equal(choice.top_k(z, 5), expected)


def test_groups_and_margins_by_hand():
    q = np.array([[0.9, 0.1, 0.2, 0.5, 0.6, 0.55]])
    for score, expected in (("max", [[0.9, 0.5, 0.6]]), ("top2_sum", [[1.0, 0.7, 1.15]])):
        assert_allclose(choice.group_scores(q, GroupMask(3, 2, score, -INF)), expected, rtol=1e-15)
    of_three = choice.group_scores(q, GroupMask(2, 1, "top2_sum", -INF))
    assert_allclose(of_three, [[1.1, 1.15]], rtol=1e-15)
    pair = np.array([[0.3, 0.7]])  # a group of one has its own score
    assert_array_equal(choice.group_scores(pair, GroupMask(2, 1, "top2_sum", 0.0)), pair)
    equal = np.array([[1.0, 2.0, 1.0, 1.0]])  # equal groups are taken from the lowest
    assert_array_equal(choice.kept_groups(equal, 2), [[True, True, False, False]])
    # without a dropped group
    assert_array_equal(choice.group_margin(np.ones((2, 4)), GroupMask(2, 2, "max", 0.0)), [INF] * 2)
    scores = np.array([[0.1, 0.4, 0.3, 0.2]])
    masked = choice.group_mask(scores, GroupMask(2, 1, "max", -INF))
    assert_array_equal(masked, [[0.1, 0.4, -INF, -INF]])
    for z, k, expected in (
        ([3.0, 1.0, 2.0], 1, 1.0),
        ([3.0, 1.0, 2.0], 3, INF),
        ([1.0, 1.0, 0.0], 2, 1.0),  # a tie inside the chosen set is no tie
        ([1.0, 1.0, 0.0], 1, 0.0),
        ([1.0, 0.5, -INF], 2, INF),  # the only one left out was not allowed
        ([1.0, -INF, -INF], 2, INF),  # two masked scores do not compete
    ):
        assert_array_equal(choice.margin(np.array([z]), k), [expected], f"{z}, {k}")


def test_a_bias_changes_the_choice_alone_and_weights_are_renormalised_and_scaled():
    rule = Rule(1, "sigmoid", PLAIN, has_selection_bias=True)
    routed = choice.route(np.array([[2.0, 1.0, 0.0]]), rule, np.array([0.0, 0.0, 0.9]))
    assert_array_equal(routed.chosen, [[2]])
    assert_array_equal(routed.weights, [[0.5]])
    # softmax rounds 0 and -745 to one float; the logits tell them apart
    logits, rule = np.array([[800.0, 20.0, 19.0]]), Rule(2, "softmax", PLAIN)
    assert_array_equal(choice.route(logits, rule).chosen, [[0, 1]])
    assert_array_equal(choice.route(logits, rule).margin, [1.0])
    assert_array_equal(choice.selection_scores(logits, rule), logits)
    logits = np.log(np.array([[4.0, 2.0, 1.0, 1.0]]))
    full = Weights("scores", renormalise=True, epsilon=0.25, scale=3.0)
    for weights, expected in ((PLAIN, [[0.5, 0.25]]), (full, [[1.5, 0.75]])):
        assert_allclose(
            choice.route(logits, Rule(2, "softmax", weights)).weights, expected, rtol=1e-14
        )


@pytest.mark.parametrize("name", choice.SCORES)
def test_no_score_has_a_larger_slope_than_stated(name):
    """|s_i(z') - s_i(z)| <= slope max |z' - z|, and there are logits where it is nearly so."""
    random = np.random.default_rng(2)
    z = random.standard_normal((20000, 2)) * random.choice([0.1, 1.0, 4.0], (20000, 1))
    z[0] = 0.0
    step = 1e-4 * random.choice([-1.0, 1.0], z.shape)
    step[0] = [1e-4, -1e-4]
    change = np.abs(choice.SCORES[name](z + step) - choice.SCORES[name](z)).max(axis=1)
    slope = change / np.abs(step).max(axis=1)
    assert_allclose(slope.max(), choice.LARGEST_SLOPE[name], rtol=2e-3)


@pytest.mark.parametrize("fill", [0.0, -INF])
def test_the_fill_decides_where_the_other_fill_chooses_another_set(fill):
    for shift in (-1.0, -0.3, 0.0):
        groups = GroupMask(4, 2, "top2_sum", fill)
        rule = Rule(3, "sigmoid", PLAIN, True, groups=groups)
        other = replace(rule, groups=replace(groups, fill=-INF if fill == 0.0 else 0.0))
        random = np.random.default_rng(3)
        logits, bias = random.normal(size=(500, 16)), random.normal(0.0, 0.3, 16) + shift
        mine, theirs = (
            np.sort(choice.route(logits, r, bias).chosen, axis=1) for r in (rule, other)
        )
        masked = choice.group_mask(choice.selection_scores(logits, rule, bias), groups)
        last = -np.sort(-masked, axis=1)[:, 2]
        assert_array_equal(
            choice.fill_decides(last, fill), (mine != theirs).any(axis=1), f"{shift}"
        )
    # once a score of a group that stays is negative
    q, groups = np.array([[0.5, -0.2, 0.1, 0.05]]), GroupMask(2, 1, "max", fill)
    chosen = choice.route(q, Rule(2, "identity", PLAIN, groups=groups)).chosen
    assert_array_equal(chosen, [[0, 2] if fill == 0.0 else [0, 1]])
