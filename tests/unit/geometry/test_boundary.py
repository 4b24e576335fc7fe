"""Boundary distance and reachability at the corners."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry.boundary.linear import NO_BOUNDARY, boundary_distance, row_distances
from moegeom.geometry.boundary.reachability import Proof, num_decided, reachability
from moegeom.geometry.gram import effective_rows
from moegeom.geometry.selection import route, top_k

INF = np.inf

#: Three rows of the plane at which all tie only in the origin.
FAN = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])


def measured(weight, y, k, bias=None):
    logits = y @ weight.T + (0.0 if bias is None else bias)
    return boundary_distance(logits, top_k(logits, k), row_distances(weight, bias))


#: Rows, inputs, how many are chosen, bias -> distance and pair of each token.
CORNERS = {
    "the worked triangle": (FAN, [[2.0, 0.5]], 1, None, [1.5 / np.sqrt(2)], [[0, 1]]),
    "all chosen": (FAN, np.ones((5, 2)), 3, None, [INF] * 5, [[-1, -1]] * 5),
    "equal rows with biases": (
        *(np.ones((2, 3)), [[1.0, 2.0, 3.0]], 1, np.array([0.25, 0.0])),
        *([INF], [[-1, -1]]),
    ),
    "zero rows": (np.zeros((3, 2)), [[1.0, -1.0]], 1, None, [0.0], [[0, 1]]),
    "on a boundary the first pair": (np.eye(3), [[1.0, 1.0, 1.0]], 1, None, [0.0], [[0, 1]]),
    # (0, 2) and (1, 3) are both at distance 1; the second chosen expert is asked first
    "equal quotients": (np.vstack([np.eye(2), -np.eye(2)]), [[1.0, 1.0]], 2, None, [1.0], [[1, 3]]),
    "no token": (np.eye(3), np.empty((0, 3)), 1, None, [], np.empty((0, 2))),
}


@pytest.mark.parametrize(
    ("weight", "y", "k", "bias", "distance", "pair"), CORNERS.values(), ids=CORNERS
)
def test_distance_and_pair_at_a_corner(weight, y, k, bias, distance, pair):
    boundary = measured(weight, np.asarray(y), k, bias)
    assert_allclose(boundary.distance, distance, rtol=1e-15)
    assert_array_equal(boundary.pair, pair)


def test_a_permanent_tie_is_at_distance_zero_wherever_it_decides():
    random = np.random.default_rng(7)
    weight, y = random.standard_normal((5, 4)), random.standard_normal((200, 4))
    weight[3] = weight[1]
    boundary = measured(weight, y, 2)
    decides = np.isin(top_k(y @ weight.T, 2), [1, 3]).sum(axis=1) == 1
    assert_array_equal(boundary.distance == 0.0, decides)
    assert_array_equal(boundary.pair[decides], np.tile([1, 3], (decides.sum(), 1)))
    assert_array_equal(row_distances(weight).permanent_ties, [[1, 3]])
    assert_array_equal(row_distances(np.zeros((3, 2))).permanent_ties, [[0, 1], [0, 2], [1, 2]])
    # a bias tells duplicates apart
    rows = row_distances(weight, np.array([0.0, 0.5, 0.0, -0.5, 0.0]))
    assert rows.permanent_ties.shape == (0, 2)
    assert rows.inverse[1, 3] == NO_BOUNDARY


# ------------------------------------------------------------------------------------- reachability
POINT, BEATEN, OPEN = Proof.point, Proof.beaten, Proof.open


def rule(k, score="softmax", has_bias=False, groups=None):
    return Rule(k, score, Weights("scores"), has_selection_bias=has_bias, groups=groups)


def proofs(weight, k, radius, logit_bias=None, selection_bias=None, score="softmax", groups=None):
    rows = effective_rows(np.asarray(weight, np.float64), None)
    bias = None if logit_bias is None else np.asarray(logit_bias, np.float64)
    extra = None if selection_bias is None else np.asarray(selection_bias, np.float64)
    made = rule(k, score, extra is not None, groups)
    certificates = reachability(rows, made, radius, bias, extra)
    decided = (certificates.proofs.count(BEATEN), int(certificates.is_certain.sum()))
    assert num_decided(rows, made, radius, bias, extra) == decided
    return certificates


def beaten_by(certificates):
    return [others.tolist() for others in certificates.beaten_by]


@pytest.fixture
def random():
    return np.random.default_rng(6)


def test_as_many_experts_as_are_chosen_have_to_beat_one_by_more_than_the_radius():
    """|w_0 - w_1| = 5: on the ball of radius 2 a bias of 10 decides, one of 9.9 does not."""
    weight = [[3.0, 0.0], [0.0, 4.0]]
    certificates = proofs(weight, 1, 2.0, [10.001, 0.0])
    assert certificates.proofs == (POINT, BEATEN)
    assert beaten_by(certificates) == [[], [0]]
    assert BEATEN not in proofs(weight, 1, 2.0, [9.999, 0.0]).proofs
    biases = [50.0, 40.0, 0.0, 0.0]
    assert proofs(np.eye(4), 2, 1.0, biases).proofs[2:] == (BEATEN, BEATEN)
    certificates = proofs(np.eye(4), 3, 1.0, biases)
    assert certificates.proofs == (POINT,) * 4
    assert beaten_by(certificates)[3] == [0, 1]  # listed, and not enough
    for weight in (np.eye(3), np.zeros((3, 2)), np.full((3, 2), 0.1)):
        assert proofs(weight, 3, 1.0, [0.0, 9.0, -9.0]).proofs == (POINT,) * 3
    for score in ("softmax", "sigmoid"):
        assert proofs([[1.0, 2.0]], 1, INF, [0.5], score=score).proofs == (POINT,)


def test_independent_rows_are_reached_and_one_between_others_only_off_their_line(random):
    weight = random.standard_normal((5, 9)) + 10.0 * random.standard_normal(9)
    bent = [[-1.0, 0.0, 0.0], [0.0, 1e-3, 0.0], [1.0, 0.0, 0.0]]
    for certificates in (proofs(weight, 2, INF), proofs(bent, 1, 3.0)):
        assert not {OPEN, BEATEN} & set(certificates.proofs)
    line = [[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    assert proofs(line, 1, 3.0).proofs == (POINT, OPEN, POINT)


def test_equal_rows_stay_open_or_ordered_and_nearly_equal_ones_are_not_equal(random):
    assert proofs(np.full((3, 2), 0.1), 1, 5.0).proofs == (OPEN,) * 3
    assert proofs(np.zeros((3, 2)), 1, INF).proofs == (OPEN,) * 3
    weight = np.tile(random.standard_normal(4), (3, 1))
    for radius in (0.5, 100.0, INF):
        certificates = proofs(weight, 1, radius, [0.1, 0.3, 0.2])
        assert (certificates.proofs[0], certificates.proofs[2]) == (BEATEN, BEATEN)
        assert beaten_by(certificates)[::2] == [[1, 2], [1]]
    for score in ("softmax", "identity", "sigmoid", "sqrt_softplus"):
        certificates = proofs(np.zeros((3, 4)), 2, INF, None, [9.0, 1.0, 5.0], score)
        assert certificates.proofs[1] == BEATEN, score
        assert beaten_by(certificates)[1] == [0, 2]
    # a Gram matrix in float64 does not tell them apart; far out, or with a small bias, they do
    weight = np.zeros((4, 64), np.float32)
    weight[:, 0] = [1.0, 1.0, 1.0, -1.0]
    weight[1, 1], weight[2, 1] = 1e-9, -1e-9
    bias = [1e-8, 0.0, 0.0, 0.0]
    assert BEATEN not in proofs(weight, 1, INF, bias).proofs
    assert BEATEN not in proofs(weight, 1, 64.0, bias).proofs
    assert proofs(weight, 1, 4.0, bias).proofs[1:3] == (BEATEN, BEATEN)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_nothing_is_proved_from_numbers_that_are_not_finite(bad, score):
    weight = np.eye(4)
    weight[2, 1] = bad
    certificates = proofs(weight, 1, 2.0, None, [9.0, 0, 0, 0], score)
    assert certificates.proofs == (OPEN,) * 4
    assert beaten_by(certificates) == [[]] * 4
    for biases in (([bad, 0, 0, 0], None), (None, [0, 0, -bad, 0])):
        assert proofs(np.eye(4), 1, 2.0, *biases, score).proofs == (OPEN,) * 4


def test_a_bias_beyond_the_range_of_a_bounded_score_beats_at_any_radius():
    certificates = proofs(np.eye(3), 1, INF, None, [0.0, 1.01, 0.5], "sigmoid")
    assert certificates.proofs[:2] == (BEATEN, POINT)
    assert beaten_by(certificates)[0] == [1]
    assert proofs(np.eye(3), 1, INF, None, [0.0, 0.99, 0.5], "sigmoid").proofs[0] != BEATEN
    # |x| <= 0.1 and rows of length 1: sigmoids stay within .5 -+ .025
    width = 1.0 / (1.0 + np.exp(-0.1)) - 1.0 / (1.0 + np.exp(0.1))
    more, less = [0.0, width + 1e-6], [0.0, width - 1e-6]
    assert proofs(np.eye(2), 1, 0.1, None, more, "sigmoid").proofs == (BEATEN, POINT)
    assert proofs(np.eye(2), 1, 0.1, None, less, "sigmoid").proofs[0] != BEATEN


def test_a_bias_on_raw_logits_is_one_of_logits_and_only_the_own_group_counts(random):
    weight, bias = random.standard_normal((6, 3)), 3.0 * random.standard_normal(6)
    one = proofs(weight, 2, 0.7, bias, score="identity")
    other = proofs(weight, 2, 0.7, None, bias, score="identity")
    assert one.proofs == other.proofs
    assert BEATEN in one.proofs
    groups = GroupMask(2, 1, "max", -INF)
    certificates = proofs(np.eye(4), 1, 1.0, None, [0.0, 5.0, 0.0, 9.0], "sigmoid", groups)
    # the group of 1 is never chosen: true, and not something that is proved
    assert certificates.proofs[:3] == (BEATEN, OPEN, BEATEN)
    assert beaten_by(certificates)[:3:2] == [[1], [3]]


def test_fills_that_overtake_and_ties_between_groups_prove_nothing():
    """With fill 0 the masked group is chosen from: its lower expert, although it is beaten."""
    groups, bias = GroupMask(2, 1, "max", 0.0), np.array([-9.0, -7.0, -4.0, -4.0])
    chosen = route(np.zeros((1, 4)), rule(1, "sigmoid", True, groups), bias).chosen
    assert_array_equal(chosen, [[0]])
    assert BEATEN not in proofs(np.eye(4), 1, 1.0, None, bias, "sigmoid", groups).proofs
    # nobody falls below 0: the fill is last, as -inf would be
    assert proofs(np.eye(4), 1, 1.0, None, bias + 9.0, "sigmoid", groups).proofs[0] == BEATEN
    groups = GroupMask(2, 1, "top2_sum", -INF)
    tied = proofs(np.zeros((4, 3)), 2, INF, None, np.zeros(4), "sigmoid", groups)
    assert tied.proofs == (OPEN,) * 4
    # two centred rows are opposite; their sum is rounding, not a direction
    weight, one = [[0.1, 0.7, 0.3], [0.2, -0.4, 0.9]], GroupMask(1, 1, "max", -INF)
    assert proofs(weight, 1, 0.5, None, [0.0, 1.5], "sigmoid", one).proofs == (BEATEN, POINT)


def test_renaming_experts_renames_proofs(random):
    order = np.array([4, 0, 3, 5, 1, 2])
    weight, bias = random.standard_normal((6, 3)), 2.0 * random.standard_normal(6)
    first, renamed = proofs(weight, 2, 1.0, bias), proofs(weight[order], 2, 1.0, bias[order])
    assert renamed.proofs == tuple(first.proofs[i] for i in order)
    for new, old in enumerate(order):
        assert sorted(order[renamed.beaten_by[new]]) == first.beaten_by[old].tolist()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_larger_ball_beats_fewer(score, random):
    weight, bias = random.standard_normal((12, 5)), 2.0 * random.standard_normal(12)
    biases = (None, bias) if score == "sigmoid" else (bias, None)
    numbers = [
        proofs(weight, 3, radius, *biases, score).proofs.count(BEATEN)
        for radius in (0.01, 0.1, 0.3, 1.0, 3.0, 30.0)
    ]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] < numbers[0]
