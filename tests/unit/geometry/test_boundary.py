"""Boundary distance, ties of several experts and reachability at the corners; shares of a ball near
ties and boundaries, by directions, draws, closed forms and mpmath.
"""

import itertools
import math

import mpmath
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry import border_shares as border
from moegeom.geometry.boundary import orders as ties
from moegeom.geometry.boundary.linear import NO_BOUNDARY, boundary_distance, row_distances
from moegeom.geometry.boundary.reachability import Proof, num_decided, reachability
from moegeom.geometry.gram import effective_rows, symmetric_root
from moegeom.geometry.selection import route, top_k
from tests.oracle import helpers

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


# ------------------------------------------------------------------------- ties of several experts
def test_ties_of_the_fan_are_in_the_origin_and_permanent_ones_everywhere():
    nearest = ties.order_distance(FAN @ [2.0, 0.5], FAN, 1, 2)
    assert_allclose(nearest.upper, np.hypot(2.0, 0.5), rtol=1e-12)
    assert (nearest.is_exact, nearest.tied) == (True, (0, 1, 2))
    here = ties.order_distance(np.zeros(3), FAN, 2, 2)
    assert (here.lower, here.upper) == (0.0, 0.0)
    for k, order in ((3, 1), (1, 3), (1, 0), (2, 9)):
        nowhere = ties.order_distance(FAN @ np.ones(2), FAN, k, order)
        assert (nowhere.lower, nowhere.upper, nowhere.tied) == (INF, INF, ())
    # equal rows and biases; the chosen set holds one of them wherever the input is
    weight = np.vstack([np.tile([[1.0, 2.0]], (3, 1)), [[-1.0, 0.0]]])
    z = weight @ np.array([0.7, 0.1])
    assert ties.order_distance(z, weight, 1, 2).upper == 0.0
    # ranked last they are no tie at the border of the first: the fourth must join or pass
    assert ties.order_distance(-z, -weight, 1, 1).upper > 0.1
    zeros = np.zeros((4, 3))
    assert ties.order_distance(np.zeros(4), zeros, 2, 3).upper == 0.0
    assert ties.order_distance(np.arange(4.0), zeros, 2, 2).upper == INF
    weight, bias = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]]), np.array([0.0, 0.0, -1.0])
    z = weight @ np.array([0.2, 5.0])
    nowhere = ties.order_distance(z + bias, weight, 1, 2)
    assert (nowhere.lower, nowhere.upper, nowhere.tied) == (INF, INF, ())
    assert_allclose(ties.order_distance(z, weight, 1, 2).upper, 0.2, rtol=1e-12)


def test_coordinates_keep_distances_and_a_real_shape_is_solved_within_few_steps():
    weight = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32) + 7.0
    rows = ties.row_coordinates(weight)
    assert rows.shape == (5, 5)
    for i, j in [(0, 1), (2, 4)]:
        expected = np.linalg.norm(weight[i].astype(float) - weight[j])
        assert_allclose(np.linalg.norm(rows[i] - rows[j]), expected, rtol=1e-12)
    # 128 experts, 8 chosen: crossing costs prune ties far from the border
    random = np.random.default_rng(1)
    weight = random.uniform(0.5, 1.5, (128, 1)) * random.standard_normal((128, 256))
    rows, z = ties.row_coordinates(weight), weight @ random.standard_normal(256)
    nearest = [ties.order_distance(z, rows, 8, order, most_nodes=1500) for order in (1, 2, 3)]
    assert all(tie.is_exact for tie in nearest)
    assert nearest[0].upper <= nearest[1].upper <= nearest[2].upper


@pytest.mark.parametrize("seed", range(30))
def test_a_threshold_leaves_both_ends_on_the_side_of_the_distance(seed):
    random = np.random.default_rng(seed)
    experts, hidden = int(random.integers(4, 9)), int(random.integers(2, 6))
    weight = random.standard_normal((experts, hidden))
    z = weight @ random.standard_normal(hidden) * 2
    k, order = int(random.integers(1, experts)), int(random.integers(1, 4))
    exact = ties.order_distance(z, weight, k, min(order, experts - 1))
    assert exact.is_exact
    for ratio in (0.0, 0.3, 0.9, 1.0 + 1e-7, 1.1, 4.0):
        threshold = ratio * exact.upper if exact.upper < INF else 1.0 + ratio
        ends = ties.order_distance(z, weight, k, min(order, experts - 1), threshold=threshold)
        assert ends.lower <= exact.upper <= ends.upper
        assert (ends.lower <= threshold) == (ends.upper <= threshold) == (exact.upper <= threshold)


def test_without_the_solver_the_bracket_stays_open_and_true(monkeypatch):
    """A rare case where costs alone do not rule out a nearer flat whose own point is no tie."""
    random = np.random.default_rng(508)
    experts, hidden = int(random.integers(4, 8)), int(random.integers(2, 6))
    weight = random.standard_normal((experts, hidden))
    z = weight @ random.standard_normal(hidden) * 2
    k, order = int(random.integers(1, experts)), int(random.integers(2, experts))
    exact = ties.order_distance(z, weight, k, order)
    assert exact.is_exact

    def give_up(*args, **kwargs):
        raise RuntimeError("too many rounds")

    monkeypatch.setattr("scipy.optimize.nnls", give_up)
    bracket = ties.order_distance(z, weight, k, order)
    assert not bracket.is_exact
    assert 0.0 < bracket.lower < exact.upper <= bracket.upper


@pytest.mark.parametrize("slope", [1e-3, 1e-5, 1e-7, 1e-8, 1e-9])
def test_a_far_corner_between_nearly_opposite_boundaries_is_not_lost_in_rounding(slope):
    """The boundaries of (1, 0) and (-1, slope) meet at (1, 1 / slope), far from the origin."""
    corner = ties.least_distance(np.array([[1.0, 0.0], [-1.0, slope]]), np.array([1.0, 0.0]), 0.0)
    assert_allclose([corner.bound * slope, corner.point[1] * slope], 1.0, rtol=1e-2)


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


def points(dimension: int, number: int, seed: int = 0) -> np.ndarray:
    """Uniform in the unit ball."""
    random = np.random.default_rng(seed)
    inside = random.standard_normal((number, dimension))
    inside /= np.linalg.norm(inside, axis=1, keepdims=True)
    return inside * random.random((number, 1)) ** (1.0 / dimension)


# ----------------------------------------------------------------------------------- borders of ties
def test_borders_of_orthonormal_rows_and_without_any_no_share():
    shapes = ((8, 3, 1), (8, 3, 2), (64, 8, 1), (4, 2, 3))
    shares = [helpers.orthonormal_border_share(*shape) for shape in shapes]
    assert_allclose(shares, [0.1739947, 0.4093402, 0.0113547, 1.0], atol=1e-7)
    assert border.log_leading_share(border.TieSums(2, 0, 0.0, 0.0), 8, 0.1) == -math.inf


@pytest.mark.parametrize("order", [1, 2, 3])
def test_orthonormal_rows_are_a_case_of_any_rows(order):
    sums = border.tie_sums(np.eye(8), 3, order, 4000, 1000, np.random.default_rng(0))
    flats = math.comb(8, order + 1)
    assert sums.flats == flats
    expected = flats * helpers.orthonormal_border_share(8, 3, order)
    assert abs(sums.borders - expected) < 4 * sums.borders_error
    assert sums.borders_error < 0.01 * expected


@pytest.mark.parametrize("tied", [(0, 1), (2, 5), (0, 3, 4), (1, 2, 4, 5)])
def test_borders_are_those_of_directions_on_the_flat(tied):
    random = np.random.default_rng(3)
    rows, k = random.standard_normal((7, 10)), 3
    gram = rows @ rows.T
    share = border.border_shares(
        gram, border.direction_logits(gram, 40_000, random), k, np.array([tied])
    ).mean()
    away = rows[list(tied[1:])] - rows[tied[0]]
    flat = np.linalg.svd(away)[2][len(away) :]
    logits = random.standard_normal((40_000, len(flat))) @ flat @ rows.T
    above = (np.delete(logits, tied, axis=1) > logits[:, [tied[0]]]).sum(axis=1)
    direct = ((above >= k - (len(tied) - 1)) & (above <= k - 1)).mean()
    assert share == pytest.approx(direct, abs=0.012)


def test_a_sample_of_ties_is_scaled_and_knows_its_error():
    random = np.random.default_rng(4)
    rows = random.standard_normal((12, 20)) * np.linspace(0.5, 2.0, 12)[:, None]
    gram = rows @ rows.T
    whole = border.tie_sums(gram, 4, 2, 4000, 1000, random)
    parts = [
        border.tie_sums(gram, 4, 2, 800, 60, np.random.default_rng(seed)) for seed in range(40)
    ]
    away = [(part.borders - whole.borders) / part.borders_error for part in parts]
    assert 0.6 < np.std(away) < 1.5
    assert abs(np.mean(away)) < 0.6
    assert all(part.flats == whole.flats == 220 for part in parts)


def test_dependent_rows_leave_no_flat():
    draw = np.random.default_rng(0)
    for rows in (np.ones((3, 2)), np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])):
        gram = rows @ rows.T
        logits = border.direction_logits(gram, 80, draw)
        assert np.isnan(border.border_shares(gram, logits, 1, np.array([[0, 1, 2]]))).all()
        assert border.tie_sums(gram, 1, 2, 80, 10, draw).borders == 0.0
    assert border.tie_sums(np.eye(3), 1, 3, 80, 10, draw).flats == 0


# ------------------------------------------------------------------------------------ leading terms
def test_leading_shares_are_what_lies_near_ties_that_all_meet_in_the_middle():
    rows, width = np.random.default_rng(6).standard_normal((4, 6)), 0.004
    logits = points(6, 400_000, 6) @ rows.T
    least = np.full(len(logits), np.inf)
    order = np.sort(logits, axis=1)
    for i, j in itertools.combinations(range(4), 2):
        # two tie at the border of two where one of the others is above both and one below
        middle = (logits[:, [i]] + logits[:, [j]]) / 2
        num_above = (order > middle).sum(axis=1) - (logits[:, [i, j]] > middle).sum(axis=1)
        away = np.abs(logits[:, i] - logits[:, j]) / np.linalg.norm(rows[i] - rows[j])
        least = np.minimum(least, np.where(num_above == 1, away, np.inf))
    sums = border.tie_sums(rows @ rows.T, 2, 1, 40_000, 100, np.random.default_rng(6))
    expected = math.exp(border.log_leading_share(sums, 6, width))
    assert (least < width).mean() == pytest.approx(expected, rel=0.05)


def test_conventions_of_a_width_are_told_apart_by_draws_in_three_dimensions():
    eps, inside, near = 0.02, points(3, 2_000_000, 7), {}
    for order in (1, 2):
        spread = helpers.tie_spread(inside, 1, order)
        widths = (("half_spread", spread / 2.0), ("spread", spread))
        near[order] = {name: (away < eps).mean() for name, away in widths}
    assert near[2]["half_spread"] / near[1]["half_spread"] == pytest.approx(0.0205, abs=0.001)
    random, factor = np.random.default_rng(7), {1: 2**-0.5, 2: 3**-0.5}
    sums = {n: border.tie_sums(np.eye(3), 1, n, 40_000, 9, random) for n in (2, 1)}
    totals = [one.borders * factor[n] for n, one in sums.items()]
    for name in ("half_spread", "spread"):
        expected = math.exp(helpers.log_order_ratio(totals, (2, 1), 3, eps, name))
        assert near[2][name] / near[1][name] == pytest.approx(expected, rel=0.06), name
    base = math.exp(helpers.log_order_ratio(totals, (2, 1), 3, eps, "base"))
    assert base == pytest.approx(0.01386, abs=1e-4)


# --------------------------------------------------------------------------------- slabs and tubes
@pytest.mark.parametrize(("dimension", "order"), [(3, 1), (6, 4), (7168, 1), (7168, 3)])
def test_half_binomials_are_quotients_of_gammas(dimension, order):
    with mpmath.workdps(40):
        half = mpmath.mpf(dimension) / 2
        expected = mpmath.log(mpmath.binomial(half, mpmath.mpf(order) / 2))
    assert border.log_half_binomial(dimension, order) == pytest.approx(float(expected), rel=1e-12)


def test_a_bound_of_orders_is_never_below_what_is_near():
    bounds = [border.log_order_bound(64, n, 4096, 0.01 / 64) / math.log(10.0) for n in (1, 2, 3, 4)]
    assert_allclose(bounds, [1.2065, 0.3187, -0.7722, -2.0211], atol=1e-4)
    assert border.log_order_bound(3, 3, 8, 0.1) == -math.inf
    rows, inside = np.random.default_rng(1).standard_normal((5, 6)), points(6, 20_000)
    least = np.full(len(inside), np.inf)
    for i, j in itertools.combinations(range(5), 2):
        away = rows[i] - rows[j]
        least = np.minimum(least, np.abs(inside @ away) / np.linalg.norm(away))
    for width in (0.01, 0.05, 0.1):
        assert (least < width).mean() <= math.exp(border.log_order_bound(5, 1, 6, width))


@pytest.mark.parametrize(("experts", "hidden"), [(12, 96), (12, 7)])
def test_logits_of_a_ball_are_those_of_its_points(experts, hidden):
    random = np.random.default_rng(2)
    rows, bias = random.standard_normal((experts, hidden)), random.standard_normal(experts)
    root = symmetric_root(rows @ rows.T) if experts < hidden else rows
    drawn = border.BallLaw(root, bias, 1.7, hidden).draw(100_000, random)
    direct = 1.7 * points(hidden, 100_000, 5) @ rows.T + bias
    size = direct.std(axis=0)
    assert_allclose((drawn.mean(axis=0) - direct.mean(axis=0)) / size, 0.0, atol=0.02)
    scale = np.outer(size, size)
    assert_allclose(np.cov(drawn.T) / scale, np.cov(direct.T) / scale, atol=0.03)
    # and what is near a boundary of the first two
    away = np.linalg.norm(rows[0] - rows[1])
    for width in (0.05, 0.3):
        near = [(np.abs(z[:, 0] - z[:, 1]) < width * away).mean() for z in (drawn, direct)]
        assert_allclose(*near, rtol=0.0, atol=0.006)


def test_experts_of_one_logit_are_above_and_below_none_of_each_other():
    """Three times 0.1, divided by 3, is more than 0.1: a mean of the tied ones would be above."""
    logits = np.full(6, 0.1)
    search = ties._Search(ties._Euclidean.at(logits, np.eye(6), ties.rows_apart(np.eye(6))), 3, 2)
    assert not np.any(search._sides(logits, (0, 1, 2)))
