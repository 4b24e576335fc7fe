"""Figures of load: by hand, by serving tokens one at a time, by sets of tokens, at the corners; the
pull of the mean input, and what random rows make of it.
"""

import math
from decimal import ROUND_CEILING, Decimal
from itertools import combinations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_equal

from moegeom.checks.catalogue.tokens import MOST_PULL
from moegeom.checks.measured import MeanPull
from moegeom.geometry import load
from moegeom.geometry.space import BlockedScores, blocked_moments, input_pull, pull_of_random_rows

COUNTS = np.array([8, 4, 2, 2])
NOTHING = np.zeros(4, dtype=np.int64)

#: Figure -> its value of even loads of 8 experts, and of one of 4 that takes all.
ENDS = {
    load.load_cv: (0.0, np.sqrt(3.0)),
    load.max_vio: (0.0, 3.0),
    load.min_vio: (0.0, -1.0),
    load.gini: (0.0, 0.75),
    load.load_entropy_nats: (np.log(8), 0.0),
    load.dead_share: (0.0, 0.75),
    load.underused_share: (0.0, 0.75),
}


# ------------------------------------------------------------------------------------------- loads
@pytest.mark.parametrize("figure", ENDS)
def test_a_figure_runs_from_balance_to_one_that_takes_all_and_is_nan_of_nothing(figure):
    one_takes_all = np.array([0, 0, 12, 0])
    ends = [figure(np.full(8, 5)), figure(one_takes_all)]
    assert_allclose(ends, ENDS[figure], rtol=1e-15, atol=1e-15)
    assert_equal(float(figure(NOTHING)), np.nan)
    assert_array_equal(figure(np.stack([NOTHING, one_takes_all]))[0], np.nan)
    counts = np.random.default_rng(0).poisson(4.0, (2, 3, 6))
    each = [[figure(counts[i, j]) for j in range(3)] for i in range(2)]
    assert_array_equal(figure(counts), each)


def test_shares_are_in_units_of_the_fair_one_and_full_experts_drop_slots():
    assert_array_equal(load.load_share(COUNTS), [2.0, 1.0, 0.5, 0.5])
    assert_array_equal(load.load_share(NOTHING), np.full(4, np.nan))
    # fair is 10: 1 is exactly a tenth
    assert_array_equal(load.underused_share(np.array([1, 0, 19, 20])), 0.25)
    assert_equal([load.load_cv_floor(0, 8, 2), load.load_cv_floor(100, 8, 8)], [np.nan, 0.0])
    # capacity 4 of loads 8, 4, 2, 2: four of sixteen slots too many
    shares = [load.dropped_slot_share(COUNTS, load.expert_capacity(8, 4, 2, 1.0))]
    assert_equal([*shares, load.dropped_slot_share(0 * COUNTS, 3)], [0.25, np.nan])


# ---------------------------------------------------------------------------------------- capacity
def test_capacity_is_the_fair_load_times_the_factor_as_it_is_written_rounded_up():
    for factor in (0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.7, 2.3, 1e-3):
        for tokens in (0, 1, 10, 160, 700, 1000, 4096, 12_345, 10**15 + 1):
            exact = Decimal(str(factor)) * tokens * 4 / 64  # 64 is a power of two: no rounding
            expected = int(exact.to_integral_value(ROUND_CEILING))
            assert load.expert_capacity(tokens, 64, 4, factor) == expected, (factor, tokens)


def test_imbalance_by_hand():
    """Ranks (8, 4) and (2, 2): 12 and 4 of a mean of 8; the order between ranks matters."""
    imbalances = [load.rank_imbalance(COUNTS, ranks) for ranks in (2, 4, 1, 3, 8)]
    assert_equal(imbalances, [1.5, 2.0, 1.0, np.nan, np.nan])
    orders = ([4, 8, 2, 2], [8, 2, 2, 4], [0, 0, 0, 0])
    assert_equal([load.rank_imbalance(np.array(o), 2) for o in orders], [1.5, 1.25, np.nan])


# ----------------------------------------------------------------------------- experts seen together
def drawn(tokens, experts, k):
    """Sets drawn evenly."""
    return np.argsort(np.random.default_rng(0).random((tokens, experts)), axis=1)[:, :k]


def pair_counts(chosen, experts):
    inside = np.zeros((len(chosen), experts), dtype=np.int64)
    np.put_along_axis(inside, chosen, 1, axis=1)
    return inside.T @ inside


@pytest.mark.parametrize("shape", [(40, 7, 2), (30, 12, 4), (200, 5, 3), (9, 30, 2)], ids=str)
def test_overlap_and_pairs_are_those_of_sets_of_tokens(shape):
    tokens, experts, k = shape
    chosen = drawn(*shape)
    counts = pair_counts(chosen, experts)
    sets = [{t for t, row in enumerate(chosen.tolist()) if e in row} for e in range(experts)]
    pairs = list(combinations(sets, 2))
    jaccard = [len(a & b) / len(a | b) for a, b in pairs if a | b]
    assert_allclose(load.jaccard_mean(counts), np.mean(jaccard), rtol=1e-14)
    assert load.num_pairs_seen(counts) == sum(1 for a, b in pairs if a & b)
    ratio = load.coactivation_over_chance(counts, tokens, k)
    every = list(combinations(range(experts), k))
    chance = sum(1 for experts_of in every if {0, 1} <= set(experts_of)) / len(every)
    above = np.triu_indices(experts, 1)
    assert_allclose(ratio[above], [len(a & b) / tokens / chance for a, b in pairs], rtol=1e-13)
    assert_array_equal(ratio[above], ratio.T[above])
    # every token has k (k - 1) / 2 pairs, whatever the loads
    assert_allclose(ratio[above].mean(), 1.0, rtol=1e-13)
    order = np.random.default_rng(1).permutation(experts)
    moved = counts[np.ix_(order, order)]
    assert_allclose(load.jaccard_mean(moved), load.jaccard_mean(counts), rtol=1e-14)
    assert load.num_pairs_seen(moved) == load.num_pairs_seen(counts)


@pytest.mark.parametrize(("experts", "k"), [(4, 2), (6, 3), (5, 4), (16, 2), (7, 1), (3, 3)])
def test_chance_is_the_overlap_of_sets_drawn_evenly_and_when_each_occurs_once(experts, k):
    every = np.array(list(combinations(range(experts), k)))
    counts = pair_counts(every, experts)
    assert_allclose(load.jaccard_mean(counts), load.jaccard_chance(experts, k), rtol=1e-14)
    overlap = load.jaccard_mean(pair_counts(drawn(10_000, experts, k), experts))
    assert_allclose(load.jaccard_chance(experts, k), overlap, rtol=0.02, atol=1e-15)
    if k > 1:
        upper = load.coactivation_over_chance(counts, len(every), k)[np.triu_indices(experts, 1)]
        assert_allclose(upper, 1.0, rtol=1e-14)


def test_pairs_and_expert_sets_at_their_corners():
    """Experts 0 and 1 always together, 2 and 3 dead: one pair of 1, four of 0."""
    counts = np.zeros((4, 4), dtype=np.int64)
    assert_equal([load.jaccard_mean(counts), load.num_pairs_seen(counts)], [np.nan, 0])
    assert np.isnan(load.coactivation_over_chance(counts, 0, 2)).all()
    counts[:2, :2] = 10
    assert_allclose(load.jaccard_mean(counts), 1 / 5, rtol=1e-15)
    assert load.num_pairs_seen(counts) == 1
    alone, one = np.diag([3, 4, 5]), np.array([[7]])
    assert_equal([load.jaccard_mean(alone), load.jaccard_chance(3, 1)], [0.0, 0.0])
    assert np.isnan(load.coactivation_over_chance(alone, 12, 1)).all()
    assert_equal([load.jaccard_mean(one), load.jaccard_chance(1, 1)], [np.nan] * 2)
    assert load.num_pairs_seen(one) == 0
    none, singles, seen_twice = (np.array(n, dtype=np.int64) for n in ([], [1, 1, 1], [2, 9]))
    coverage = [load.good_turing_coverage(sets) for sets in (none, singles, seen_twice)]
    assert_equal(coverage, [np.nan, 0.0, 1.0])
    entropies = [load.expert_set_entropy_nats(sets) for sets in (none, np.array([17]))]
    assert_equal(entropies, [np.nan, 0.0])
    # without any doubleton it is finite
    numbers = [load.chao1(sets) for sets in (none, seen_twice, np.array([1, 1, 1, 5]))]
    assert_equal(numbers, [0.0, 2.0, 4 + 3 * 2 / 2])


def participation(inputs: np.ndarray) -> float:
    moments = blocked_moments(inputs, np.zeros(len(inputs), np.int32), 1)
    return moments.of_blocks(np.ones(1, bool)).participation_ratio


def rows_of(random, lengths: np.ndarray, hidden: int) -> np.ndarray:
    """In random directions."""
    rows = random.standard_normal((len(lengths), hidden))
    return rows * (lengths / np.linalg.norm(rows, axis=1))[:, None]


def test_the_pull_is_mean_over_rest_also_at_its_corners():
    # experts 0 and 1 favoured by +1 and -1, tokens apart by +2 and -2 the same way round
    assert input_pull(np.array([[3.0, -3.0], [-1.0, 1.0]])) == pytest.approx(0.5)
    random = np.random.default_rng(1)
    scores = random.standard_normal((500, 12))
    scores -= scores.mean(axis=0)
    lean = random.standard_normal(12)
    assert input_pull(scores) < 1e-14
    assert_allclose(input_pull(scores + 7.0 * lean), 7.0 * input_pull(scores + lean), rtol=1e-12)
    random = np.random.default_rng(2)
    scores = random.standard_normal((200, 9)) + random.standard_normal(9)
    common, order = random.standard_normal((200, 1)), random.permutation(9)
    for other in (scores + common, 3.0 * scores, scores[:, order], scores[::-1]):
        assert_allclose(input_pull(other), input_pull(scores), rtol=1e-12)
    alike = np.tile([1.0, 0.0], (5, 1))
    scores = (np.zeros((0, 4)), np.ones((5, 1)), np.ones((5, 4)), alike)
    assert_equal([input_pull(s) for s in scores], [math.nan] * 3 + [math.inf])
    only = BlockedScores.of(np.eye(4), np.zeros(4, np.int64), 2).without(0)
    one_less = BlockedScores.of(alike, np.arange(5), 5).without(3)
    assert_equal([only.pull(), one_less.pull()], [math.nan, math.inf])
    ones, both = np.ones(4), np.concatenate([np.eye(3), -np.eye(3)])
    for inputs, ratio, lengths in (
        (np.ones((1, 3)), 1.0, ones),
        (np.ones((5, 3)), math.nan, ones),
        (np.eye(3), 2.0, np.zeros(4)),
    ):
        assert math.isnan(pull_of_random_rows(inputs, ratio, lengths)[0])
    assert pull_of_random_rows(both, 3.0, ones) == (0.0, 0.0)


@pytest.mark.parametrize("lean", [0.0, 1.0, 1e4])
def test_without_a_block_it_is_that_of_the_tokens_that_are_left(lean):
    random = np.random.default_rng(4)
    scores = random.standard_normal((300, 9)) + lean * random.standard_normal(9)
    bias, block = random.standard_normal(9).astype(np.float32), random.integers(0, 5, 300)
    scores[block == 2] += random.standard_normal(9)
    blocked = BlockedScores.of(scores, block, 6)
    for left_out in (None, 0, 2, 5):
        left = scores[block != left_out] if left_out is not None else scores
        rest = blocked.without(left_out)
        assert_allclose(rest.pull(), input_pull(left), rtol=1e-11)
        assert_allclose(rest.pull(bias), input_pull(left + bias), rtol=1e-11)


@pytest.mark.parametrize(("experts", "lean"), [(16, 0.3), (64, 1.0)])
def test_the_range_of_random_rows_is_that_of_draws(experts, lean):
    random = np.random.default_rng(3)
    hidden = 48
    spread = np.geomspace(2.0, 0.2, hidden)
    inputs = random.standard_normal((300, hidden)) * spread + lean * random.standard_normal(hidden)
    lengths = random.uniform(0.5, 2.0, experts)
    drawn = [input_pull(inputs @ rows_of(random, lengths, hidden).T) for _ in range(2000)]
    mean, deviation = pull_of_random_rows(inputs, participation(inputs), lengths)
    assert mean == pytest.approx(np.mean(drawn), rel=0.03)
    assert deviation == pytest.approx(np.std(drawn), rel=0.15)


def test_of_200_random_routers_at_most_one_is_called_pulled():
    """As MGG302 does: inputs of any spectrum and any lean, rows in random directions."""
    alarms = strong = 0
    for number in range(200):
        random = np.random.default_rng([302, number])
        experts, hidden = (int(2.0 ** random.uniform(*ends)) for ends in ((2, 8), (5, 9)))
        spread = np.geomspace(1.0, 10.0 ** -random.uniform(0, 2), hidden)
        lean = random.uniform(0, 3) * random.standard_normal(hidden) * spread
        inputs = random.standard_normal((400, hidden)) * spread + lean
        inputs /= np.sqrt((inputs**2).mean(axis=1, keepdims=True))
        lengths = random.uniform(0.5, 2.0, experts)
        here = input_pull(inputs @ rows_of(random, lengths, hidden).T)
        pull = MeanPull(here, *pull_of_random_rows(inputs, participation(inputs), lengths))
        alarms += pull.is_above(MOST_PULL)
        strong += here > MOST_PULL
    assert alarms <= 1  # three deviations are passed by one in some hundreds
    assert strong > 100
