"""Distances of curved and grouped rules at the corners, by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moegeom.core.errors import RouterRuleError
from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows, group_slopes
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance

SCORES = Weights("scores")


def measured(weight, y, rule, bias, logit_bias=None):
    """Lower and upper bound, the pair, and the experts that were chosen."""
    weight = np.array(weight, dtype=np.float64)
    logits = np.array(y) @ weight.T + (0.0 if logit_bias is None else logit_bias)
    bias = np.array(bias, dtype=np.float64)
    chosen = route(logits, rule, bias).chosen
    return *curved_distance(logits, chosen, curved_rows(weight, rule, logit_bias, bias)), chosen


def sigmoid_rule(k, groups=None):
    return Rule(k, "sigmoid", SCORES, True, groups=groups)


def test_the_worked_pair_of_experts():
    _, upper, pair, _ = measured(np.eye(2), [[1.0, 0.0]], sigmoid_rule(1), [0.1, 0.0])
    np.testing.assert_allclose(upper, [1.007672], atol=1e-6)
    np.testing.assert_array_equal(pair, [[0, 1]])


def test_choosing_every_expert_leaves_no_boundary():
    lower, upper, pair, _ = measured(np.eye(3), [[1.0, 0.0, 2.0]], sigmoid_rule(3), [0.1, 0.0, 0.2])
    np.testing.assert_array_equal([lower, upper], np.inf)
    np.testing.assert_array_equal(pair, [[-1, -1]])


def test_equal_rows_and_biases_tie_permanently():
    weight = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    lower, upper, pair, _ = measured(weight, [[2.0, 0.0]], sigmoid_rule(1), [0.1, 0.1, 0.0])
    np.testing.assert_array_equal([lower, upper], 0.0)
    np.testing.assert_array_equal(pair, [[0, 1]])


def test_equal_rows_told_apart_by_a_bias_are_no_boundary():
    """Neither by a selection bias nor by a logit bias."""
    weight = [[1.0, 0.0], [1.0, 0.0]]
    for bias, logit_bias in (([0.1, 0.0], None), ([0.1, 0.1], np.array([0.5, 0.0]))):
        lower, upper, _, _ = measured(weight, [[2.0, 0.0]], sigmoid_rule(1), bias, logit_bias)
        np.testing.assert_array_equal([lower, upper], np.inf)


def test_a_multiplier_is_a_factor_of_the_rows():
    rule = Rule(1, "sigmoid", SCORES, True, logit_map=LogitMap(4.0))
    _, scaled, _, _ = measured(np.eye(2), [[0.25, 0.0]], rule, [0.1, 0.0])
    np.testing.assert_allclose(scaled, [1.0076719 / 4.0], rtol=1e-6)


def test_softmax_of_capped_logits_with_a_bias_is_refused():
    rule = Rule(1, "softmax", SCORES, True, logit_map=LogitMap(1.0, 30.0))
    with pytest.raises(RouterRuleError, match=r"soft-capped logits"):
        curved_rows(np.eye(2), rule, None, np.array([0.1, 0.0]))


def test_two_probabilities_are_sigmoids_of_the_difference():
    """p_0 - p_1 = tanh(d/2) with d = z_0 - z_1, so that the boundary is where tanh(d/2) = -0.2."""
    rule = Rule(1, "softmax", SCORES, True)
    lower, upper, _, _ = measured(np.eye(2), [[1.0, 0.0]], rule, [0.2, 0.0])
    exact = (1.0 - 2.0 * np.arctanh(-0.2)) / np.sqrt(2.0)
    assert lower[0] <= exact <= upper[0]
    np.testing.assert_allclose(upper, exact, rtol=1.1e-3)


def test_softmax_group_maxima_without_a_bias_have_linear_boundaries():
    """Groups (0, 1) and (2, 3) by logits 3, 1 | 2, 0: the group changes where z_0 = z_2."""
    rule = Rule(1, "softmax", SCORES, False, groups=GroupMask(2, 1, "max", 0.0))
    lower, upper, _, _ = measured(np.eye(4), [[3.0, 1.0, 2.0, 0.0]], rule, np.zeros(4))
    np.testing.assert_allclose([lower, upper], np.sqrt(0.5), rtol=1e-8)


def test_sums_of_two_logits_change_groups_at_a_plane():
    """3 + 1 against 2 + 1.5 with four orthonormal rows: half apart, a normal of length 2."""
    rule = Rule(1, "identity", SCORES, False, groups=GroupMask(2, 1, "top2_sum", -np.inf))
    lower, upper, _, _ = measured(np.eye(4), [[3.0, 1.0, 2.0, 1.5]], rule, np.zeros(4))
    np.testing.assert_allclose([lower, upper], 0.25, rtol=1e-8)


@pytest.mark.parametrize(("fill", "distance"), [(0.0, 0.3), (-np.inf, 0.7 / np.sqrt(2.0))])
def test_a_fill_of_zero_is_a_boundary_that_minus_infinity_is_not(fill, distance):
    """Kept 5, 0.3 | dropped: the second choice, 0.3, leaves at 0, or where it meets -0.4."""
    rule = Rule(2, "identity", SCORES, False, groups=GroupMask(2, 1, "max", fill))
    weight = np.eye(6)
    y = [[5.0, 0.3, -0.4, -2.0, -3.0, -4.0]]
    lower, upper, _, chosen = measured(weight, y, rule, np.zeros(6))
    np.testing.assert_array_equal(chosen, [[0, 1]])
    np.testing.assert_allclose([lower, upper], distance, rtol=1e-8)


def test_a_mrequested_expert_that_was_chosen_leaves_where_a_kept_score_rises_to_zero():
    rule = Rule(2, "identity", SCORES, False, groups=GroupMask(2, 1, "max", 0.0))
    lower, upper, _, chosen = measured(np.eye(4), [[5.0, -0.25, -2.0, -3.0]], rule, np.zeros(4))
    np.testing.assert_array_equal(chosen, [[0, 2]])
    np.testing.assert_allclose([lower, upper], 0.25, rtol=1e-8)


def test_behind_a_soft_cap_a_score_rises_to_zero_where_its_logit_says_so():
    """Expert 1 has sigmoid(tanh(-1)) - 1/2, which is 0 at a logit of 0: a distance of 1."""
    groups, cap = GroupMask(2, 1, "max", 0.0), LogitMap(1.0, 1.0)
    rule = Rule(2, "sigmoid", SCORES, True, groups=groups, logit_map=cap)
    bias = [0.0, -0.5, -0.9, -0.9]
    lower, upper, _, chosen = measured(np.eye(4), [[2.0, -1.0, 0.0, 0.0]], rule, bias)
    np.testing.assert_array_equal(chosen, [[0, 2]])
    np.testing.assert_allclose([lower, upper], 1.0, rtol=1e-8)


def test_a_choice_that_the_rule_does_not_make_is_a_tie():
    rows = curved_rows(np.eye(4), sigmoid_rule(1, GroupMask(2, 1, "max", -np.inf)))
    wrong = np.array([[3]], dtype=np.int32)
    lower, upper, _ = curved_distance(np.array([[3.0, 1.0, 2.0, 0.0]]), wrong, rows)
    np.testing.assert_array_equal([lower, upper], 0.0)


def test_no_token_gives_no_distance():
    for rule in (sigmoid_rule(1), sigmoid_rule(1, GroupMask(2, 1, "max", 0.0))):
        lower, upper, pair, _ = measured(np.eye(4), np.empty((0, 4)), rule, np.zeros(4))
        assert lower.shape == upper.shape == (0,)
        assert pair.shape == (0, 2)


@pytest.mark.parametrize("kind", ["max", "top2_sum"])
def test_the_slope_of_a_group_score_is_largest_at_a_vertex(kind):
    random = np.random.default_rng(3)
    weight = random.standard_normal((9, 5))
    found = group_slopes(weight @ weight.T, GroupMask(3, 1, kind, 0.0), 0.25, 1.0)
    most = 2 if kind == "top2_sum" else 1
    sets = [s for n in range(most + 1) for s in itertools.combinations(range(3), n)]
    for g, h in itertools.combinations(range(3), 2):
        lengths = [
            np.linalg.norm(
                weight[3 * g + np.array(p, int)].sum(0) - weight[3 * h + np.array(q, int)].sum(0)
            )
            for p, q in itertools.product(sets, sets)
        ]
        np.testing.assert_allclose(found[g, h], 0.25 * max(lengths), rtol=1e-12)


def test_large_groups_get_a_coarser_slope_that_is_no_smaller():
    random = np.random.default_rng(4)
    weight = random.standard_normal((140, 5))
    gram, groups = weight @ weight.T, GroupMask(2, 1, "top2_sum", 0.0)
    apart = np.linalg.norm(weight[:, None] - weight[None], axis=2).max()
    coarse = group_slopes(gram, groups, 0.25, apart)[0, 1]
    pairs = np.array(list(itertools.combinations(range(70), 2)))
    sums = [weight[part + pairs].sum(axis=1) for part in (0, 70)]
    drawn = [s[random.integers(0, len(s), 20000)] for s in sums]
    np.testing.assert_array_less(0.25 * np.linalg.norm(drawn[0] - drawn[1], axis=1), coarse)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_the_lower_bound_is_the_same_without_rays(score):
    random = np.random.default_rng(5)
    weight, y = random.standard_normal((16, 8)), random.standard_normal((64, 8))
    rule = Rule(3, score, SCORES, True, groups=GroupMask(4, 2, "top2_sum", 0.0))
    bias, logits = 0.5 * random.standard_normal(16), y @ weight.T
    chosen, rows = route(logits, rule, bias).chosen, curved_rows(weight, rule, None, bias)
    lower, upper, _ = curved_distance(logits, chosen, rows)
    without, farther, _ = curved_distance(logits, chosen, rows, on_rays=False)
    np.testing.assert_array_equal(without, lower)
    assert (farther >= upper).all()
    assert (farther > upper).any()
