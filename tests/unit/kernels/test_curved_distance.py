"""Distances of curved and grouped rules at the corners, by hand."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit

from moegeom.core.errors import RouterRuleError
from moegeom.core.router import GroupMask, LogitMap, Rule
from moegeom.geometry.boundary.curved import curved_rows, group_slopes
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance
from tests.unit.scan.made import SOFTMAX as SCORES


def measured(weight, y, rule, bias, logit_bias=None):
    weight = np.array(weight, dtype=np.float64)
    logits = np.array(y) @ weight.T + (0.0 if logit_bias is None else logit_bias)
    bias = np.array(bias, dtype=np.float64)
    chosen = route(logits, rule, bias).chosen
    return *curved_distance(logits, chosen, curved_rows(weight, rule, logit_bias, bias)), chosen


UNIT, TIED = np.eye(2), math.log(0.6 / 0.4)


def boundary(score, logits, rows, delta, cap=math.inf):
    """Lower and upper bound of the distance at which expert 1 takes the place of expert 0."""
    rule = Rule(1, score, SCORES, True, logit_map=LogitMap(1.0, cap))
    made = curved_rows(np.array(rows), rule, None, np.array([delta, 0.0]))
    lower, upper, _ = curved_distance(np.array([logits]), np.zeros((1, 1), np.int32), made)
    return lower[0], upper[0]


def opposite_gap(t: float) -> float:
    return expit(1 - t) + 0.1 - expit(t)


def gap_of_twice(t: float) -> float:
    return expit(t) + 0.1 - expit(2 * t)


@pytest.mark.parametrize(
    ("logits", "rows", "delta", "distance"),
    [
        ((1.0, 0.0), UNIT, 0.1, 1.007672),  # docs/theory.md E1
        ((1.0, 0.0), UNIT, 0.0, math.sqrt(0.5)),
        # beyond the range of the score
        ((0.0, 0.0), UNIT, 1.0, math.inf),
        ((0.0, 0.0), UNIT, 1.5, math.inf),
        # on the boundary, and behind it
        ((TIED, 0.0), UNIT, 0.5 - expit(TIED), 0.0),
        ((TIED, 0.0), UNIT, 0.5 - expit(TIED) - 0.1, 0.0),
        # the other expert has to come to sigmoid^-1(0.6) by itself, along a row of length 2
        ((0.0, -1.0), [[0.0, 0.0], [2.0, 0.0]], 0.1, (TIED + 1.0) / 2.0),
        ((1.0, 0.0), [[2.0, 0.0], [0.0, 0.0]], 0.1, (1.0 + TIED) / 2.0),
        # a root in one variable, and the nearer one of two
        ((1.0, 0.0), [[1.0, 0.0], [-1.0, 0.0]], 0.1, brentq(opposite_gap, 0.0, 5.0)),
        ((0.0, 0.0), [[1.0, 0.0], [2.0, 0.0]], 0.1, brentq(gap_of_twice, 0.0, 1.0)),
    ],
)
def test_distances_to_one_boundary_are_those_by_hand(logits, rows, delta, distance):
    np.testing.assert_allclose(boundary("sigmoid", logits, rows, delta), distance, rtol=2e-6)


def test_scores_without_a_bound_saturated_or_capped_have_a_distance():
    """sqrt softplus(u) + 3 = sqrt softplus(v): the nearest point by its u, on a fine grid."""
    u = np.linspace(-12.0, 3.0, 200001)
    v = np.log(np.expm1((np.sqrt(np.logaddexp(0.0, u)) + 3.0) ** 2))
    bounds = boundary("sqrt_softplus", (0.0, 0.0), UNIT, 3.0)
    np.testing.assert_allclose(bounds, np.hypot(u, v).min(), rtol=1.1e-6)
    # Logits capped at 2: the scores lie between 0.1192 and 0.8808, 0.7616 apart.
    for score, cap in (("sigmoid", math.inf), ("sigmoid", 5.0), ("sqrt_softplus", math.inf)):
        lower, upper = boundary(score, (30.0, -30.0), UNIT, 0.05, cap)
        assert 0.0 < lower <= upper < 100.0
    assert boundary("sigmoid", (0.0, 0.0), UNIT, 0.762, 2.0)[1] == math.inf
    assert boundary("sigmoid", (0.0, 0.0), UNIT, 0.761, 2.0)[1] < math.inf


def sigmoid_rule(k, groups=None):
    return Rule(k, "sigmoid", SCORES, True, groups=groups)


def test_equal_rows_tie_permanently_and_choosing_all_leaves_no_boundary():
    """A selection bias or a logit bias: then there is no boundary."""
    weight, y = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0]]
    lower, upper, pair, _ = measured(weight, y, sigmoid_rule(1), [0.1, 0.1, 0.0])
    np.testing.assert_array_equal([lower, upper], 0.0)
    np.testing.assert_array_equal(pair, [[0, 1]])
    for bias, logit_bias in (([0.1, 0.0], None), ([0.1, 0.1], np.array([0.5, 0.0]))):
        lower, upper, _, _ = measured(weight[:2], y, sigmoid_rule(1), bias, logit_bias)
        np.testing.assert_array_equal([lower, upper], np.inf)
    lower, upper, pair, _ = measured(np.eye(3), [[1.0, 0.0, 2.0]], sigmoid_rule(3), [0.1, 0.0, 0.2])
    np.testing.assert_array_equal([lower, upper], np.inf)
    np.testing.assert_array_equal(pair, [[-1, -1]])


def test_a_multiplier_is_a_factor_of_the_rows_and_softmax_of_capped_logits_is_refused():
    rule = Rule(1, "sigmoid", SCORES, True, logit_map=LogitMap(4.0))
    _, scaled, _, _ = measured(np.eye(2), [[0.25, 0.0]], rule, [0.1, 0.0])
    np.testing.assert_allclose(scaled, [1.0076719 / 4.0], rtol=1e-6)
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


def two_groups(k: int, kind: str, fill: float, score: str = "identity"):
    return Rule(k, score, SCORES, False, groups=GroupMask(2, 1, kind, fill))


FILLED = [5.0, 0.3, -0.4, -2.0, -3.0, -4.0]


@pytest.mark.parametrize(
    ("rule", "logits", "chosen", "distance"),
    [
        # groups by 3 and 2: the group changes where the first logits meet
        (two_groups(1, "max", 0.0, "softmax"), [3.0, 1.0, 2.0, 0.0], [0], np.sqrt(0.5)),
        # 3 + 1 against 2 + 1.5: half apart, a normal of length 2
        (two_groups(1, "top2_sum", -np.inf), [3.0, 1.0, 2.0, 1.5], [0], 0.25),
        # of the dropped group one was chosen: it leaves where a kept score rises to 0
        (two_groups(2, "max", 0.0), [5.0, -0.25, -2.0, -3.0], [0, 2], 0.25),
        # kept 5, 0.3: the second choice leaves at 0, or where it meets -0.4
        (two_groups(2, "max", 0.0), FILLED, [0, 1], 0.3),
        (two_groups(2, "max", -np.inf), FILLED, [0, 1], 0.7 / np.sqrt(2.0)),
    ],
    ids=["softmax", "sums", "a masked expert", "filled with 0", "filled with -inf"],
)
def test_groups_of_orthonormal_rows_have_linear_boundaries(rule, logits, chosen, distance):
    experts = len(logits)
    lower, upper, _, by_rule = measured(np.eye(experts), [logits], rule, np.zeros(experts))
    np.testing.assert_array_equal(by_rule, [chosen])
    np.testing.assert_allclose([lower, upper], distance, rtol=1e-8)


def test_behind_a_soft_cap_a_score_rises_to_zero_where_its_logit_says_so():
    """Expert 1 has sigmoid(tanh(-1)) - 1/2, which is 0 at a logit of 0: a distance of 1."""
    groups, cap = GroupMask(2, 1, "max", 0.0), LogitMap(1.0, 1.0)
    rule = Rule(2, "sigmoid", SCORES, True, groups=groups, logit_map=cap)
    bias = [0.0, -0.5, -0.9, -0.9]
    lower, upper, _, chosen = measured(np.eye(4), [[2.0, -1.0, 0.0, 0.0]], rule, bias)
    np.testing.assert_array_equal(chosen, [[0, 2]])
    np.testing.assert_allclose([lower, upper], 1.0, rtol=1e-8)


def test_a_choice_that_the_rule_does_not_make_is_a_tie_and_no_token_has_a_distance():
    rows = curved_rows(np.eye(4), sigmoid_rule(1, GroupMask(2, 1, "max", -np.inf)))
    wrong = np.array([[3]], dtype=np.int32)
    lower, upper, _ = curved_distance(np.array([[3.0, 1.0, 2.0, 0.0]]), wrong, rows)
    np.testing.assert_array_equal([lower, upper], 0.0)
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
