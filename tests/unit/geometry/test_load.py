"""Figures of load: by hand, by serving tokens one at a time, by sets of tokens, at the corners; the
pull of the mean input, and what random rows make of it. Histograms: bins at their edges; shares,
quantiles and ranks are those of the values themselves. Series: alternation, return and agreement of
ranks against their definitions, and at the corners.
"""

import itertools
import math
from decimal import ROUND_CEILING, Decimal
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from scipy import stats
from scipy.stats import rankdata

from moegeom.checks.catalogue.tokens import MOST_PULL
from moegeom.checks.measured import MeanPull
from moegeom.geometry import load, series
from moegeom.geometry.histogram import (
    BINS_PER_OCTAVE,
    NUM_BINS,
    bin_edges,
    bin_index,
    mean_rank,
    quantile,
    share_among_least,
    share_below,
)
from moegeom.geometry.space import BlockedScores, blocked_moments, input_pull, pull_of_random_rows
from moegeom.geometry.statistics import rank_correlation

COUNTS = np.array([8, 4, 2, 2])
NOTHING = np.zeros(4, dtype=np.int64)

#: Figure -> its value of even loads of 8 experts, and of one of 4 that takes all.
ENDS = {
    load.load_cv: (0.0, np.sqrt(3.0)),
    load.max_vio: (0.0, 3.0),
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
    assert_equal(load.jaccard_mean(counts), np.nan)
    assert np.isnan(load.coactivation_over_chance(counts, 0, 2)).all()
    counts[:2, :2] = 10
    assert_allclose(load.jaccard_mean(counts), 1 / 5, rtol=1e-15)
    alone, one = np.diag([3, 4, 5]), np.array([[7]])
    assert_equal([load.jaccard_mean(alone), load.jaccard_chance(3, 1)], [0.0, 0.0])
    assert np.isnan(load.coactivation_over_chance(alone, 12, 1)).all()
    assert_equal([load.jaccard_mean(one), load.jaccard_chance(1, 1)], [np.nan] * 2)
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


# --------------------------------------------------------------------------------------- histograms
def histogram(values):
    return np.bincount(bin_index(np.asarray(values, dtype=np.float64)), minlength=NUM_BINS)


def test_edges_ascend_by_sixteenths_of_an_octave_and_the_last_bins_take_all_beyond():
    edges = bin_edges()
    assert_array_equal(np.isin(2.0 ** np.arange(-40, 25), edges), True)
    assert_array_equal(edges[[0, 1, -2, -1]], [0.0, 2.0**-40, 2.0**24, np.inf])
    assert len(edges) == NUM_BINS + 1
    ratio = edges[2:-1] / edges[1:-2]
    assert 1 + 1 / 32 < ratio.min() <= ratio.max() < 1 + 1 / 16 + 1e-15
    # an edge belongs to the bin above and its neighbour to the bin below
    numbers = np.arange(1, NUM_BINS)
    assert_array_equal(bin_index(edges[1:-1]), numbers)
    assert_array_equal(bin_index(np.nextafter(edges[1:-1], 0.0)), numbers - 1)
    small, large = [0.0, -0.0, 5e-324, 2.0**-41], [2.0**24, 1.7e308, np.inf]
    last = NUM_BINS - 1
    assert_array_equal(bin_index(np.array([*small, 2.0**-40, *large])), [0] * 4 + [1] + [last] * 3)


def test_shares_are_below_an_edge_quantiles_the_lower_of_two_and_cut_bins_in_part():
    counts = histogram([0.5, 1.0, 1.0, 2.0])
    assert_array_equal(share_below(counts, np.array([0.5, 1.0, 2.0, 4.0])), [0, 0.25, 0.75, 1])
    for threshold in (0.3, 2.0**25, -1.0, np.nan):
        with pytest.raises(ValueError, match="bin edges"):
            share_below(counts, np.array([threshold]))
    middle = np.array([0.5])
    assert_array_equal(quantile(histogram([np.inf, np.inf]), middle), [np.inf])
    assert_array_equal(quantile(histogram([0.0, 1e-20]), middle), [0.0])
    values = quantile(histogram([1.0, 1.0, 100.0, 100.0]), np.array([0.5, 0.51]))
    assert_allclose(values, [1.0, 100.0], rtol=1 / 16)
    empty = np.zeros((2, NUM_BINS), dtype=np.int64)
    assert_array_equal(share_below(empty, np.array([1.0])), np.full((2, 1), np.nan))
    assert_array_equal(quantile(empty, middle), np.full((2, 1), np.nan))
    one, two = histogram([1.0, 3.0]), histogram([0.1])
    both = np.stack([[one], [two]])
    ladder, middle = np.array([0.5, 2.0]), np.array([0.25, 0.75])
    assert_array_equal(share_below(both, ladder)[0, 0], share_below(one, ladder))
    assert_array_equal(quantile(both, middle)[1, 0], quantile(two, middle))
    whole, some = np.array([5, 10, 85]), np.array([1, 4, 5])
    shares = [share_among_least(some, whole, share) for share in (0.05, 0.10, 0.15)]
    assert_allclose(shares, [0.1, 0.3, 0.5])
    assert mean_rank(some, whole) == pytest.approx((2.5 + 4 * 10 + 5 * 57.5) / 1000)


FLOATS = st.floats(min_value=0.0, allow_nan=False, allow_infinity=True)
INSIDE = st.floats(min_value=2.0**-40, max_value=2.0**23)


@given(arrays(np.float64, st.integers(1, 200), elements=FLOATS), st.integers(-40, 24))
def test_bins_are_those_of_a_search_among_edges_and_shares_those_of_values(values, exponent):
    expected = np.minimum(np.searchsorted(bin_edges(), values, side="right") - 1, NUM_BINS - 1)
    assert_array_equal(bin_index(values), expected)
    share = share_below(histogram(values), np.array([2.0**exponent]))
    assert_array_equal(share, [(values < 2.0**exponent).mean()])


@given(arrays(np.float64, st.integers(1, 200), elements=INSIDE), st.floats(0.001, 0.999))
def test_quantiles_ascend_and_are_within_a_sixteenth_of_those_of_the_values(values, probability):
    counts = histogram(values)
    expected = np.quantile(values, probability, method="inverted_cdf")
    of_counts = quantile(counts, np.array([probability]))
    assert_allclose(of_counts, [expected], rtol=1 / BINS_PER_OCTAVE + 1e-12)
    assert (np.diff(quantile(counts, np.linspace(0.01, 0.99, 25))) >= 0.0).all()


# ------------------------------------------------------------------------------------------- ranks
BINNED = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12).map(
    lambda pairs: np.array(pairs, np.int64).T
)


@given(BINNED, st.floats(0.0, 1.0))
def test_the_mean_rank_is_that_of_scipy_and_shares_among_the_least_are_bounded(counts, share):
    some, whole = counts[0], counts.sum(axis=0)
    rank, among_least = mean_rank(some, whole), share_among_least(some, whole, share)
    if not some.any():
        assert np.isnan([rank, among_least]).all()
        return
    values = np.repeat(np.arange(len(whole)), whole)
    mean_of_bin = [rankdata(values)[values == b].mean() if n else 0.0 for b, n in enumerate(whole)]
    # the first of n ranks is 1; here the middle of the first of n parts
    expected = (np.average(mean_of_bin, weights=some) - 0.5) / len(values)
    assert_allclose(rank, expected, rtol=1e-12)
    assert 0.0 <= among_least <= min(1.0, share * whole.sum() / some.sum()) + 1e-12
    assert_allclose(share_among_least(some, whole, 1.0), 1.0)
    assert_allclose(share_among_least(whole, whole, share), share, atol=1e-12)


# ---------------------------------------------------------------------------------- series of ranks
def num_runs(signs: np.ndarray) -> int:
    return 1 + int((signs[1:] != signs[:-1]).sum())


@pytest.mark.parametrize(("steps", "above"), [(5, 2), (7, 3), (9, 4), (8, 1), (6, 6)])
def test_runs_have_the_probability_that_all_orders_give_them(steps, above):
    every = itertools.combinations(range(steps), above)
    orders = [np.isin(np.arange(steps), places) for places in every]
    runs = np.array([num_runs(signs) for signs in orders])
    for signs in orders[:: max(1, len(orders) // 7)]:
        expected = float((runs >= num_runs(signs)).mean())
        assert_allclose(series.alternation_p_value(signs), expected, rtol=1e-12)


def test_no_series_is_less_likely_than_one_that_alternates_throughout():
    for steps in (4, 7, 8):
        every = itertools.product([False, True], repeat=steps)
        least = min(series.alternation_p_value(np.array(signs)) for signs in every)
        assert_allclose(least, series.least_alternation_p_value(steps), rtol=1e-12)


def test_main_scores_follow_the_steps_and_changes_are_relative():
    generator = np.random.default_rng(0)
    states = generator.standard_normal((9, 5))
    order = generator.permutation(9)
    one, other = series.main_scores(states), series.main_scores(states[order])
    assert_allclose(np.abs(other), np.abs(one[order]), atol=1e-12)
    assert_allclose(np.linalg.norm(one), np.linalg.norm(states - states.mean(0), 2), rtol=1e-12)
    assert_allclose(series.main_scores(np.ones((4, 3))), 0.0)
    rows = np.array([[3.0, 4.0]])
    assert_allclose(
        series.changes([rows, rows * 1.1, rows], ["a", "b", "b"]), [0.1, 0.0], rtol=1e-12
    )
    assert_allclose(series.changes([0 * rows, rows, rows], ["", "", ""]), [np.inf, 0.0])


def grams(states: np.ndarray) -> np.ndarray:
    """Of (steps, experts, width)."""
    centred = states - states.mean(axis=0)
    return np.einsum("tew,sew->ets", centred, centred)


def test_a_walk_undoes_nothing_scatter_a_half_and_a_return_all():
    generator = np.random.default_rng(1)
    noise = generator.standard_normal((4, 16, 400))
    walk = np.cumsum(noise, axis=0)
    walked, scattered = series.undone(grams(walk), 1, 2, 3), series.undone(grams(noise), 1, 2, 3)
    walk[3] = walk[1] + noise[3]
    back = series.undone(grams(walk), 1, 2, 3)
    assert_allclose([walked.share, scattered.share, back.share], [0.0, 0.5, 1.0], atol=0.05)
    assert_allclose([scattered.nearness, back.nearness], [1.0, 0.5], atol=0.05)
    assert 0.0 < back.error < 0.05
    # nan where nothing happened
    alone = generator.standard_normal((3, 1, 5))
    still = series.undone(grams(np.ones((3, 4, 5))), 0, 1, 2)
    assert_equal([still.share, series.undone(grams(alone), 0, 1, 2).error], [np.nan, np.nan])


def test_the_agreement_of_one_step_is_spearmans_and_ties_bound_its_p_value():
    generator = np.random.default_rng(2)
    one, other = generator.standard_normal((2, 1, 12))
    agreement = series.rank_agreement(one, one + other)
    expected = stats.spearmanr(one[0], (one + other)[0], alternative="greater")
    correlation, p_value = (np.asarray(value) for value in expected)
    assert_allclose(agreement.correlation, correlation, rtol=1e-12)
    assert_allclose(agreement.p_value, p_value, rtol=0.25)
    flat, rising = np.zeros((2, 8)), np.tile(np.arange(8.0), (2, 1))
    assert series.rank_agreement(flat, rising).p_value == 1.0
    halves = (rising >= 4.0).astype(np.float64)
    # 4! 4! of the 8! numberings exchange experts that are tied
    assert_allclose(series.rank_agreement(halves, rising).p_value, 1 / 70, rtol=1e-9)


@pytest.mark.parametrize("experts", [5, 6])
def test_its_p_value_is_that_of_all_numberings(experts):
    generator = np.random.default_rng(0)
    one, other = generator.standard_normal((2, 3, experts))
    other += 0.6 * one
    agreement = series.rank_agreement(one, other)
    orders = itertools.permutations(range(experts))
    every = [series.rank_agreement(one, other[:, order]).correlation for order in orders]
    as_large = np.mean(np.array(every) >= agreement.correlation - 1e-9)
    assert_allclose(agreement.p_value, as_large, rtol=1e-9)
    assert_allclose(agreement.by_chance, 1.96 * np.std(every), rtol=1e-9)


def test_with_more_experts_its_p_value_is_near_that_of_many_numberings():
    generator = np.random.default_rng(7)
    one, other = generator.standard_normal((2, 3, 16))
    other += 0.35 * one
    agreement = series.rank_agreement(one, other)
    orders = [generator.permutation(16) for _ in range(2000)]
    every = [series.rank_agreement(one, other[:, order]).correlation for order in orders]
    share = float(np.mean(np.array(every) >= agreement.correlation))
    assert 0.001 < share < 0.2
    assert_allclose(agreement.p_value, share, rtol=0.35, atol=2e-3)


def test_a_rank_correlation_is_that_of_scipy_and_missing_of_a_constant():
    one, other = np.random.default_rng(1).integers(0, 9, (2, 40))  # with ties
    assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)
    assert rank_correlation(one, np.ones(40)) is None
