"""Scores, masks, picks, weights, quotas, thresholds, smoothed gates and Sinkhorn scaling: by hand,
by counting, token by token. Smoothed gates have a largest slope; weight that lies elsewhere is a
distance of mixtures.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal
from scipy.spatial.distance import cityblock

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry import selection as choice
from moegeom.geometry import whatif
from moegeom.geometry.load import dropped_slot_share
from moegeom.geometry.noise import weight_moved
from moegeom.geometry.selection import routing_weights, softmax, top_k
from moegeom.geometry.whatif import dense_weights, same_sets, weight_distance
from tests.oracle.helpers import extra_experts

INF = np.inf


def scores_of(tokens: int = 60, experts: int = 6) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.standard_normal((tokens, experts)) + random.standard_normal(experts)


# ------------------------------------------------------------------------------------------- quotas
def test_every_expert_takes_its_quota_and_of_equals_the_earlier_token():
    scores = scores_of()
    for capacity in (0, 1, 60, 99):
        assert_array_equal(whatif.expert_choice(scores, capacity).sum(axis=0), min(capacity, 60))
    # of equal scores the earlier token is taken, and one that is masked by nobody
    assert_array_equal(whatif.expert_choice(np.zeros((5, 2)), 2).sum(axis=1), [2, 2, 0, 0, 0])
    masked = whatif.expert_choice(np.array([[1.0, -INF], [-INF, -INF], [0.0, -INF]]), 3)
    assert_array_equal(masked, [[True, False], [False, False], [True, False]])
    assert whatif.batch_capacity(2048, 64, 2, 1.25) == 80
    assert whatif.batch_capacity(100, 10, 1, 1.1) == 11
    assert whatif.batch_capacity(10, 4, 2, INF) == whatif.batch_capacity(10, 4, 2, 1.9) == 10


def served(chosen, num_experts, capacity, order):
    """Tokens one at a time, in an order."""
    left, is_served = [capacity] * num_experts, np.zeros(chosen.shape, dtype=bool)
    for token, slot in order:
        expert = int(chosen[token, slot])
        is_served[token, slot] = left[expert] > 0
        left[expert] -= 1
    return is_served


def test_the_first_tokens_are_served_or_the_best_and_the_earlier_of_equals():
    scores = np.round(scores_of(), 1)
    chosen = top_k(scores, 2)
    wishes = [(token, slot) for token in range(60) for slot in range(2)]
    by_score = sorted(wishes, key=lambda wish: -scores[wish[0], chosen[wish]])
    counts = np.bincount(chosen.ravel(), minlength=6)
    for order, priority in ((wishes, None), (by_score, scores)):
        for capacity in (0, 1, 12, 20, 60, 99):
            within = whatif.kept_within_capacity(chosen, 6, capacity, priority)
            assert_array_equal(within, served(chosen, 6, capacity, order))
            dropped = dropped_slot_share(counts, capacity)
            assert_allclose(1.0 - within.mean(), dropped, rtol=1e-13)
    slots = np.array([[0, -1], [-1, -1]], dtype=np.int32)  # an empty slot is not served
    assert_array_equal(whatif.kept_within_capacity(slots, 2, 5), slots >= 0)


# --------------------------------------------------------------------------------------- thresholds
def test_the_threshold_gives_the_mean_and_is_crossed_at_its_distance():
    logits = scores_of(500)
    for experts in (0.0, 0.002, 1.0, 2.5, 5.998, 6.0):
        gate = whatif.relu_gate(logits, whatif.threshold_for(logits, experts))
        assert_allclose((gate > 0).sum() / 500, experts, rtol=1e-12)
    assert whatif.threshold_for(np.array([[0.0, 1.0], [4.0, 2.0]]), 1.0) == 1.5
    for experts in (-0.1, 6.1):
        with pytest.raises(ValueError, match="of 6 experts"):
            whatif.threshold_for(logits, experts)
    random = np.random.default_rng(1)
    rows, bias = random.standard_normal((5, 7)), random.standard_normal(5)
    inputs, theta = random.standard_normal((40, 7)), 0.3
    logits, norms = inputs @ rows.T + bias, np.linalg.norm(rows, axis=1)
    distance = whatif.threshold_distance(logits, norms, theta)
    units = np.concatenate([rows / norms[:, None], -rows / norms[:, None]])
    for step, is_same in ((0.999, True), (1.001, False)):
        moved = inputs[:, None] + step * distance[:, None, None] * units
        same = ((moved @ rows.T + bias > theta) == (logits > theta)[:, None]).all(axis=(1, 2))
        assert_array_equal(same, is_same)
    # rows of zeros have none to cross
    logits = np.array([[1.0, 0.0], [3.0, 0.0]])
    for norms, expected in (([2.0, 0.0], [0.5, 1.5]), ([0.0, 0.0], [INF, INF])):
        assert_array_equal(whatif.threshold_distance(logits, np.array(norms), 0.0), expected)


# -------------------------------------------------------------------------------- smoothed gates
SELECTED = Weights("softmax_of_selected_logits")


def some_logits(tokens: int = 200, experts: int = 12) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((tokens, experts))


def test_the_activation_is_its_formula_in_fractions():
    for u in (Fraction(1, 100), Fraction(1, 18), Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)):
        for a, b in ((1, 50), (2, 3), (1, 1)):
            exact = u**a / (u**a + (1 - u) ** b)
            assert_allclose(whatif.activation(np.array([float(u)]), a, b), float(exact), rtol=1e-13)
    ends = whatif.activation(np.array([-INF, -1.0, 0.0, 1.0, 2.0, INF, np.nan]))
    assert_array_equal(ends, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, np.nan])
    # half of it is reached in the first eighteenth of the strip
    assert_allclose(whatif.activation(np.array([0.0560134, 0.0546])), [0.5, 0.474930], atol=1e-6)
    assert_allclose(whatif.largest_slope(), 17.756, atol=5e-4)
    assert whatif.largest_slope(0.5, 50.0) == INF


def test_what_fades_still_runs_a_masked_expert_never_and_equal_ones_alike():
    # one that fades to less than any number still runs, a masked one never
    fading = np.array([[1.0, 1.0 - 0.5 * (1 - 1e-9)]])
    assert whatif.smooth_activations(fading, 1, 0.5, a=60.0)[0, 1] > 0.0
    masked = np.array([[2.0, 1.0, -INF, 0.5, -INF]])
    assert_array_equal(whatif.smooth_activations(masked, 2, 100.0) > 0, np.isfinite(masked))
    assert_array_equal(whatif.gaps(masked, 2), [[0.5, INF, INF]])
    logits = np.array([[2.0, 1.0, 1.0, 0.0]])
    gate = whatif.smooth_gate(logits, logits, logits, 2, SELECTED, 1e-6)
    hard = whatif.smooth_gate(logits, logits, logits, 2, SELECTED, 0.0)
    assert gate[0, 1] == gate[0, 2] > 0.0
    assert hard[0, 1] > 0.0 == hard[0, 2]


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
    logits, k = some_logits(), 3
    scores, chosen = softmax(logits), top_k(logits, k)
    hard = routing_weights(logits, scores, chosen, weights)
    for eps in (0.0, 0.05):
        gate = whatif.smooth_gate(logits, scores, logits, k, weights, eps)
        alone = extra_experts(logits, k, eps) == 0
        assert alone.sum() > 100
        picked = np.take_along_axis(gate, chosen.astype(np.int64), axis=1)
        assert_array_equal(picked[alone], hard[alone])
        assert_array_equal((gate[alone] > 0).sum(axis=1), k)


def test_set_weights_of_full_sets_are_those_of_the_rule_and_of_no_expert_none():
    logits = some_logits()
    scores, chosen = softmax(logits), top_k(logits, 4)
    full, shared = np.zeros(logits.shape), np.full(len(logits), 0.3)
    np.put_along_axis(full, chosen.astype(np.int64), 1.0, axis=1)
    for weights in (SELECTED, Weights("scores", renormalise=True, power=2.0, floor=0.1)):
        of_rule = routing_weights(logits, scores, chosen, weights, shared)
        of_sets = whatif.set_weights(logits, scores, full, weights, shared)
        picked = np.take_along_axis(of_sets, chosen.astype(np.int64), axis=1)
        assert_allclose(picked, of_rule, rtol=1e-13)
        assert_array_equal((of_sets > 0).sum(axis=1), 4)
    for weights in (SELECTED, Weights("scores", renormalise=True)):
        assert_array_equal(whatif.set_weights(logits, scores, 0.0 * full, weights), 0.0)
    with pytest.raises(ValueError, match="sparsemixer"):  # they depend on the order of picks
        whatif.set_weights(logits, logits, full, Weights("sparsemixer"))


def test_slots_are_filled_in_descending_score_and_the_budget_is_not_passed():
    for extra in (0.0, 1e-9):
        assert whatif.smoothing_budget(whatif.gaps(some_logits(), 3), extra).eps == 0.0
    tied = whatif.smoothing_budget(np.full((10, 3), 0.25), 1.0)
    assert (tied.eps, tied.extra) == (0.25, 0.0)
    masked = np.array([[0.1, INF], [0.2, INF]])
    assert whatif.smoothing_budget(masked, 1.0).extra == 1.0
    for pool, extra, message in (
        (np.ones((5, 3)), 4, "4 extra experts of 3"),
        (masked, 1.5, r"1\.5 extra experts of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            whatif.smoothing_budget(pool, extra)
    mask = np.array([[True, False, True, True], [False, False, False, False], [True] * 4])
    scores = np.array([[1.0, 9.0, -INF, 2.0], [0.0] * 4, [5.0, 5.0, 7.0, 5.0]])
    assert_array_equal(whatif.packed(mask, scores), [[3, 0, 2, -1], [-1, -1, -1, -1], [2, 0, 1, 3]])
    assert whatif.packed(mask[1:2], scores[1:2], 3).shape == (1, 3)


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


# ----------------------------------------------------------------------------- slopes and distances
#: Few distinct values, so that exact ties are common; all are exact in binary.
BATCH = st.tuples(st.integers(1, 5), st.integers(1, 7)).flatmap(
    lambda shape: st.tuples(
        arrays(np.int64, shape, elements=st.integers(-8, 8)).map(lambda logits: logits / 4),
        st.integers(1, shape[1]),
    )
)
EPS = st.integers(0, 20).map(lambda n: n / 8)
OF_SELECTED = Weights("softmax_of_selected_logits")


@given(BATCH, EPS)
def test_as_many_run_as_are_chosen_and_extra(drawn, eps):
    logits, k = drawn
    gate = whatif.smooth_gate(logits, logits, logits, k, OF_SELECTED, eps)
    assert_array_equal((gate > 0).sum(axis=1), k + extra_experts(logits, k, eps))
    assert_allclose(gate.sum(axis=1), 1.0, rtol=1e-12)
    assert (gate[whatif.hard_set(logits, k)] > 0).all()


@given(BATCH, EPS, st.integers(0, 2**32 - 1))
def test_no_activation_changes_faster_than_the_largest_slope(drawn, eps, seed):
    """Of the difference to the k-th score, which a change of scores moves by twice itself."""
    logits, k = drawn
    eps = eps + 0.125
    step = np.random.default_rng(seed).uniform(-1e-3, 1e-3, logits.shape)
    # at a tie of the border the hard set is one of two, and both have activation 1
    before, after = (whatif.smooth_activations(z, k, eps) for z in (logits, logits + step))
    largest = 17.756 / eps * 2.0 * np.abs(step).max(axis=1, keepdims=True)
    assert (np.abs(after - before) <= largest + 1e-12).all()


def test_the_largest_slope_is_reached():
    eps, at = 0.4, 0.0545
    logits = np.array([[1.0, 1.0 - eps * (1 - at)]])
    moved = logits + np.array([[0.0, 1e-6]])
    before, after = (whatif.smooth_activations(z, 1, eps)[0, 1] for z in (logits, moved))
    assert_allclose((after - before) / 1e-6, 17.756 / eps, rtol=1e-4)


@given(BATCH, st.floats(0.0, 1.0))
def test_a_budget_is_never_exceeded_and_the_next_gap_would(drawn, share):
    logits, k = drawn
    extra = share * (logits.shape[1] - k)
    most = round(len(logits) * extra) / len(logits)
    budget = whatif.smoothing_budget(whatif.gaps(logits, k), extra)
    assert_allclose(budget.extra, extra_experts(logits, k, budget.eps).mean(), rtol=1e-12)
    assert budget.extra <= most + 1e-12
    wider = extra_experts(logits, k, np.nextafter(budget.eps, np.inf)).mean()
    assert wider >= most - 1e-12 or budget.eps == 0.0


# ----------------------------------------------------------------------- weight that lies elsewhere
EXPERTS = 5

#: Routing weights of one token by expert, many of them 0; all are exact in binary.
WEIGHTS = arrays(np.int64, EXPERTS, elements=st.integers(0, 8)).map(lambda eighths: eighths / 8)
SOME = WEIGHTS.filter(np.any)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(weight_distance(first[None], second[None])[0])


@given(SOME, SOME, st.sampled_from([0.125, 3.0, 1e6]))
def test_it_is_half_the_city_block_distance_of_shares_and_at_least_what_leaves(a, b, scale):
    expected = cityblock(a / a.sum(), b / b.sum()) / 2.0
    assert_allclose([distance(a, b), distance(scale * a, b)], expected, atol=1e-15)
    chosen, other = (np.flatnonzero(w).astype(np.int32)[None] for w in (a, b))
    assert distance(a, b) >= weight_moved(a[chosen], chosen, other)[0] - 1e-12


@given(WEIGHTS, WEIGHTS, WEIGHTS)
def test_it_is_a_metric_of_mixtures_from_0_to_1(a, b, c):
    assert distance(a, a) == 0.0
    assert 0.0 <= distance(a, b) == distance(b, a) <= 1.0
    assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-15
    are_equal = np.array_equal(a * b.sum(), b * a.sum()) and a.any() == b.any()
    assert (distance(a, b) < 1e-9) == are_equal
    assert (distance(a, b) > 1.0 - 1e-9) == (not (a * b).any() and (a.any() or b.any()))


@given(st.permutations(range(EXPERTS)), st.integers(0, EXPERTS), st.data())
def test_dense_weights_and_sets_know_no_order_and_no_empty_slots(order, size, data):
    weights = np.array(data.draw(st.lists(st.floats(0.1, 1.0), min_size=size, max_size=size)))
    chosen = np.array(order[:size], np.int32)
    place = np.array(data.draw(st.permutations(range(size))), int)
    padded = np.concatenate([chosen[place], [-1, -1]]).astype(np.int32)
    assert same_sets(chosen[None], padded[None])[0]
    moved = np.concatenate([weights[place], [0.0, 0.0]])
    slots = ((chosen, weights), (padded, moved))
    dense = [dense_weights(c[None], w[None], EXPERTS) for c, w in slots]
    assert_array_equal(*dense)
    assert_array_equal(np.flatnonzero(dense[0]), np.sort(chosen))
