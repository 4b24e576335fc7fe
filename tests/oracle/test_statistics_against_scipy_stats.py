"""Oracles: scipy.stats and its fits, brute force, and simulation for what is promised; for agreement of
choices all pairs of tokens, Python's sets, all permutations and scikit-learn.
"""

import itertools
import math
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less
from scipy import optimize, stats

from moegeom.checks import statistics
from moegeom.geometry import load
from moegeom.geometry import statistics as errors_of
from moegeom.geometry.load import chao1, expert_set_entropy_nats, good_turing_coverage
from moegeom.metrics import METRICS

FREEDOMS = [1, 2, 7, 15, 200]


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_p_values_are_the_tails_of_students_t(freedom):
    t, error = np.array([-40.0, -3.0, -0.1, 0.0, 0.4, 2.0, 12.0, 300.0]), 0.3
    found = [statistics.p_above(2.0 + x * error, 2.0, error, freedom) for x in t.tolist()]
    assert_allclose(found, stats.t.sf(t, freedom), rtol=1e-10)
    both = [statistics.p_differs(x * error, error, freedom) for x in t.tolist()]
    assert_allclose(both, 2.0 * stats.t.sf(abs(t), freedom), rtol=1e-10)


def test_errors_of_samples_are_scipys_and_tests_are_exact_at_the_corners():
    assert [statistics.p_above(v, 1.0, 0.0, 5) for v in (0.9, 1.0, 1.1)] == [1.0, 1.0, 0.0]
    assert [statistics.p_differs(v, 0.0, 5) for v in (-1.0, 0.0, 1e-300)] == [0.0, 1.0, 0.0]
    assert [statistics.p_above(v, 1.0, 0.1, 5) for v in (np.inf, -np.inf)] == [0.0, 1.0]
    assert statistics.p_above(3.0, np.inf, 0.1, 5) == 1.0
    assert statistics.welch_freedom((0.0, 0.0), (15, 7)) == 7
    assert_allclose(statistics.welch_freedom((0.3, 0.0), (15, 7)), 15.0)
    # Wikipedia's example: .01 and .005 are rejected at .05, .03 ends it although .04 < .05.
    assert statistics.holm_rejects([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    plain = statistics.detectable_shift(1.0, 15, 0.05, 1)
    assert_allclose(statistics.detectable_shift(2.5, 15, 0.05, 1), 2.5 * plain)
    more = [statistics.detectable_shift(1.0, 15, 0.05, count) for count in (1, 10, 100)]
    assert_array_less(0.0, np.diff(more))
    values = np.random.default_rng(0).normal(size=(16, 3))
    left = (values.sum(axis=0) - values) / 15
    assert_allclose(errors_of.jackknife_error(left), stats.sem(values, axis=0), rtol=1e-12)
    values = np.random.default_rng(0).normal(size=(12, 50)) + np.arange(12)[:, None]
    cluster = np.repeat(np.arange(12)[::-1] * 7, 50)
    influence = (values - values.mean()).ravel() / values.size
    found = errors_of.clustered_error(influence, cluster)
    assert found == pytest.approx(stats.sem(values.mean(axis=1)), rel=1e-12)
    assert errors_of.clustered_error(np.array([0.5, -0.5]), np.zeros(2, np.int64)) is None
    assert_array_equal(errors_of.jackknife_error(np.ones((1, 2))), [np.nan, np.nan])
    errors = errors_of.jackknife_error(np.array([[1.0, np.inf], [1.0, 2.0], [1.0, 3.0]]))
    assert_array_equal(errors, [0.0, np.nan])
    rng = np.random.default_rng(1)
    found, errors = [], []
    for _ in range(400):
        cluster = np.repeat(np.arange(40), rng.integers(5, 60, 40))
        values = rng.normal(size=40)[cluster] + rng.normal(size=len(cluster))
        found.append(values.mean())
        errors.append(
            errors_of.clustered_error((values - values.mean()) / len(values), cluster) or 0.0
        )
    assert 0.9 < np.mean(errors) / np.std(found) < 1.1


@pytest.mark.parametrize(("first", "second"), [(16, 16), (16, 5), (3, 40), (2, 2)])
def test_degrees_of_freedom_are_those_of_scipys_welch_test(first, second):
    random = np.random.default_rng([first, second])
    a, b = random.normal(0, 1, first), random.normal(0, 3, second)
    errors = [float(v.std(ddof=1) / np.sqrt(len(v))) for v in (a, b)]
    expected = stats.ttest_ind(a, b, equal_var=False)
    found = statistics.welch_freedom(errors, (first - 1, second - 1))
    assert_allclose(found, expected.df, rtol=1e-12)
    difference = float(a.mean() - b.mean())
    p_value = statistics.p_differs(difference, float(np.hypot(*errors)), found)
    assert_allclose(p_value, expected.pvalue, rtol=1e-10)


def adjusted(p_values) -> np.ndarray:
    """Holm's adjusted p-values: the running maximum of (m - i + 1) p_(i), at most 1."""
    p_values = np.asarray(p_values)
    order = np.argsort(p_values, kind="stable")
    steps = (len(p_values) - np.arange(len(p_values))) * p_values[order]
    found = np.empty(len(p_values))
    found[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_holm_rejects_where_the_adjusted_p_value_is_at_most_the_level(count):
    random = np.random.default_rng(count)
    for _ in range(200):
        p_values = random.random(count) ** random.uniform(1, 12)
        if count > 3:
            p_values[1] = p_values[2]
        level = float(random.choice([0.01, 0.05, 0.3]))
        expected = adjusted(p_values) <= level
        assert statistics.holm_rejects(p_values.tolist(), level) == expected.tolist()


@pytest.mark.parametrize("correlation", [0.0, 0.7, 1.0, -1.0])
def test_the_error_of_the_whole_run_stays_below_the_level(correlation):
    """40 hypotheses, 30 true, with dependent figures: some true one is rejected in at most 5 %."""
    random, runs, level = np.random.default_rng(3), 4000, 0.05
    common = random.standard_normal((runs, 1))
    sign = np.where(np.arange(40) % 2, np.sign(correlation) or 1.0, 1.0)
    share = abs(correlation)
    drawn = np.sqrt(1 - share) * random.standard_normal((runs, 40)) + np.sqrt(share) * common * sign
    drawn[:, 30:] += 4.0
    p_values = stats.norm.sf(drawn)
    false_alarms = [any(statistics.holm_rejects(row, level)[:30]) for row in p_values.tolist()]
    # three standard errors of the simulation
    assert_array_less(np.mean(false_alarms), level + 3 * np.sqrt(level / runs))
    if correlation == 0.0:  # and it is no empty promise
        assert_array_less(level / 2, np.mean(false_alarms))


@pytest.mark.parametrize(("freedom", "num_tests"), [(15, 8), (30, 1), (200, 100)])
def test_the_detectable_shift_is_found_with_the_stated_power(freedom, num_tests):
    random, runs, level = np.random.default_rng(4), 5000, 0.05
    shift = statistics.detectable_shift(1.0, freedom, level, num_tests)
    figure = shift + random.standard_normal(runs)
    error = np.sqrt(random.chisquare(freedom, runs) / freedom)
    found = [
        statistics.p_above(float(value), 0.0, float(se), freedom) <= level / num_tests
        for value, se in zip(figure, error, strict=True)
    ]
    assert_allclose(np.mean(found), statistics.POWER, atol=0.02)


# -------------------------------------------------------------------------------- trends and onsets
STEPS = np.array([100.0, 300.0, 600.0, 1000.0, 1500.0, 2200.0])


def series(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    error = generator.uniform(0.02, 0.4, len(STEPS))
    return 0.3 + 4e-4 * STEPS + error * generator.standard_normal(len(STEPS)), error


def fitted(value: np.ndarray, error: np.ndarray, is_absolute: bool) -> tuple[float, float]:
    found, covariance = optimize.curve_fit(
        lambda x, a, b: a + b * x / 1000.0, STEPS, value, sigma=error, absolute_sigma=is_absolute
    )
    return found[1] / 1000.0, np.sqrt(covariance[1, 1]) / 1000.0


@pytest.mark.parametrize("seed", range(4))
def test_slopes_are_those_of_linregress_and_with_errors_weighted(seed):
    value, _ = series(seed)
    found, expected = errors_of.slope(STEPS, value), stats.linregress(STEPS, value)
    assert_allclose(found.value, expected.slope, rtol=1e-12)
    wide = stats.t.ppf(0.975, len(STEPS) - 2) * expected.stderr
    assert_allclose(found.half_width, wide, rtol=1e-10)
    error = series(seed)[1]
    found = errors_of.slope(STEPS, value, error)
    expected, scatter = fitted(value, error, is_absolute=False)
    _, documents = fitted(value, error, is_absolute=True)
    wide = max(stats.t.ppf(0.975, len(STEPS) - 2) * scatter, stats.norm.ppf(0.975) * documents)
    assert_allclose(found.value, expected, rtol=1e-6)
    assert_allclose(found.half_width, wide, rtol=1e-5)


def test_departures_are_the_least_of_all_pairs_and_few_steps_have_no_onset():
    value, error = series(3)
    expected = np.ones(len(value))
    for j in range(1, len(value)):
        pairs = list(itertools.product(range(j), range(j, len(value))))
        t = [(value[k] - value[i]) / np.sqrt(error[k] ** 2 + error[i] ** 2) for i, k in pairs]
        one_sided = min(max(stats.t.sf(x, 15) for x in t), max(stats.t.cdf(x, 15) for x in t))
        expected[j] = min(1.0, 2.0 * one_sided)
    assert_allclose(errors_of.departures(value, error, 15.0), expected, rtol=1e-10)
    generator = np.random.default_rng(5)
    error = np.full(len(STEPS), 0.1)
    steady = generator.normal(1.0, 0.1, (2000, len(STEPS)))
    onsets = [errors_of.onset(errors_of.departures(value, error, 15.0), 0.05) for value in steady]
    assert sum(index is not None for index in onsets) <= 0.05 * len(onsets)
    value = np.array([1.0, 1.0, 3.0, 3.0, 1.0, 1.0])
    assert errors_of.onset(errors_of.departures(value, np.full(6, 0.01), 15.0), 0.05) is None
    for number in range(errors_of.LEAST_STEPS):
        value = np.arange(number, dtype=np.float64)
        p_values = errors_of.departures(value, np.full(number, 1e-6), 15.0)
        assert_allclose(p_values, 1.0)
        assert errors_of.onset(p_values, 0.05) is None
    line = np.arange(5.0)
    for error in (np.zeros(5), np.array([0.1, np.nan, 0.1, 0.1, 0.1])):
        assert_allclose(errors_of.departures(line, error, 15.0), 1.0)
        assert_allclose(errors_of.slope(line, line, error).value, 1.0)  # unweighted
    assert np.isnan(errors_of.slope(np.array([3.0]), np.array([1.0])).value)
    assert np.isnan(errors_of.slope(np.array([3.0, 3.0]), np.array([1.0, 2.0])).value)
    two = errors_of.slope(np.array([0.0, 2.0]), np.array([1.0, 2.0]))
    assert_allclose(two.value, 0.5)
    assert np.isnan(two.half_width)
    gap = errors_of.slope(np.arange(4.0), np.array([0.0, np.nan, 2.0, 3.0]))
    assert_allclose(gap.value, 1.0)


@pytest.mark.parametrize("begin", range(1, len(STEPS)))
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_jump_is_found_at_the_step_where_it_happens(begin, sign):
    generator = np.random.default_rng(begin)
    error = np.full(len(STEPS), 0.01)
    value = 1.0 + error * generator.standard_normal(len(STEPS))
    value[begin:] += sign
    assert errors_of.onset(errors_of.departures(value, error, 15.0), 0.05) == begin


# --------------------------------------------------------------------------------------------- load
@pytest.fixture(params=range(4))
def counts(request):
    random = np.random.default_rng(request.param)
    experts = int(random.integers(2, 70))
    drawn = random.poisson(random.gamma(0.5, 40.0, experts))
    drawn[0] += 1
    return drawn


def test_figures_of_load_are_those_of_their_definitions(counts):
    for ddof in (0, 1):
        expected = stats.variation(counts, ddof=ddof)
        assert_allclose(load.load_cv(counts, ddof), expected, rtol=1e-13)
    expected = stats.entropy(counts)
    assert_allclose(load.load_entropy_nats(counts), expected, rtol=1e-12, atol=1e-14)
    difference = np.abs(counts[:, None] - counts[None, :]).mean()
    expected = difference / (2 * counts.mean())
    assert_allclose(load.gini(counts), expected, rtol=1e-12, atol=1e-14)
    mean = sum(counts.tolist()) / len(counts)
    assert_allclose(load.max_vio(counts), max(counts) / mean - 1, rtol=1e-13)
    fair = counts.sum() / len(counts)
    dead = sum(1 for c in counts if c == 0) / len(counts)
    underused = sum(1 for c in counts if c < 0.1 * fair) / len(counts)
    assert_allclose(load.dead_share(counts), dead, rtol=1e-15)
    assert_allclose(load.underused_share(counts), underused, rtol=1e-15)
    seen = counts[counts > 0]
    expected = stats.entropy(seen) + (len(seen) - 1) / (2 * seen.sum())
    assert_allclose(expert_set_entropy_nats(counts), expected, rtol=1e-12)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(512, 64, 8), (300, 16, 1), (200, 8, 6)])
def test_the_floor_is_the_cv_of_simulated_even_routing(tokens, experts, k):
    random = np.random.default_rng(3)
    squared = []
    for _ in range(300):
        order = random.random((tokens, experts)).argpartition(k - 1, axis=1)[:, :k]
        drawn = np.bincount(order.reshape(-1), minlength=experts)
        squared.append(float(load.load_cv(drawn)) ** 2)
    # the counts add up to kT, so their population variance has mean T (k/E) (1 - k/E) exactly
    error = 4 * np.std(squared) / np.sqrt(len(squared))
    found = load.load_cv_floor(tokens, experts, k) ** 2
    assert_allclose(found, np.mean(squared), rtol=0, atol=error)


#: Experts, k, sets in use (None: all of them, evenly) and the power by which their shares fall.
SET_LAWS = (
    (8, 2, None, 0.0),
    (16, 4, 300, 1.0),
    (64, 8, 50_000, 0.0),
    (128, 8, 100_000, 1.2),
    (256, 8, 1_000_000, 1.5),
    (512, 8, None, 0.0),
)


@pytest.mark.parametrize(("experts", "k", "used", "power"), SET_LAWS)
def test_estimates_of_expert_sets_are_the_truth_or_missing(experts, k, used, power):
    """Of 20,000 tokens in 16 blocks, whose errors tell how far the truth may be."""
    number = math.comb(experts, k) if used is None else used
    random, tokens = np.random.default_rng(experts), 20_000
    if number > 10**7:
        drawn, truths = random.permutation(tokens), dict.fromkeys(ESTIMATES, math.log(number))
    else:
        share = np.arange(1, number + 1) ** -power
        share /= share.sum()
        drawn = random.choice(number, tokens, p=share)
        collision = -math.log((share**2).sum())
        truths = dict(zip(ESTIMATES, (stats.entropy(share), collision), strict=True))
    parts = [drawn, *(drawn[np.arange(tokens) % 16 != block] for block in range(16))]
    whole, *without = [
        {"count": np.unique(part, return_counts=True)[1], "rate": 1.0} for part in parts
    ]
    members = {"members": np.zeros((len(drawn), k), int), "row": np.arange(len(whole["count"]))}
    rule = SimpleNamespace(num_chosen=k)
    facts = SimpleNamespace(router=SimpleNamespace(num_experts=experts, rule=rule))
    metric = METRICS["expert_sets"]
    values = metric.finish({"expert_sets": whole | members}, facts)["layers"]
    left = metric.without_each([{"expert_sets": part} for part in without], facts)["layers"]
    coverage = values["expert_set_coverage"]
    for name, truth in truths.items():
        if math.isnan(value := values[name] if values[name] is not None else math.nan):
            continue
        error = errors_of.jackknife_error(np.array(left[name]))
        # what a power law leaves unseen is the bias that the least coverage allows
        assert abs(value - truth) < 0.2 * (name == ESTIMATES[0]) + 4.0 * error
    is_seen = coverage >= load.LEAST_COVERAGE
    assert (values[ESTIMATES[0]] is not None) == is_seen
    assert math.isnan(values[ESTIMATES[1]]) == (number > tokens**2 / 20)
    is_new = random.choice(number, tokens, p=share) if number <= 10**7 else -np.ones(1)
    assert coverage == pytest.approx(np.isin(is_new, drawn).mean(), abs=0.02)


#: Columns of the entropies of Shannon and of Renyi.
ESTIMATES = ("expert_set_entropy_nats", "expert_set_collision_nats")


def test_pairs_of_tokens_have_the_overlap_of_their_sets():
    random = np.random.default_rng(8)
    chosen = random.random((50, 12)).argsort(axis=1)[:, :3]
    chosen[:20, 0], chosen[:20, 1:] = 0, [4, 5]  # equal sets among them
    sets = [*map(frozenset, chosen.tolist())]
    pairs = [*combinations(sets, 2)]
    counts = np.unique([str(sorted(one)) for one in sets], return_counts=True)[1]
    assert load.pairs_of_equals(counts) == (sum(a == b for a, b in pairs), len(pairs))
    expected = np.mean([len(a & b) / 3 for a, b in pairs])
    overlap = load.pair_overlap(np.bincount(chosen.ravel(), minlength=12), 3)
    assert_allclose(overlap, expected, rtol=1e-13)
    assert np.isnan(load.pair_overlap(np.bincount(chosen[0], minlength=12), 3))
    assert load.collision_entropy_nats(np.full(9, 1)) != load.collision_entropy_nats(np.full(9, 1))


def test_seen_tokens_tell_of_those_unseen():
    random = np.random.default_rng(5)
    population = random.dirichlet(np.full(400, 0.3))
    errors = []
    for _ in range(200):
        drawn = np.bincount(random.choice(400, 300, p=population), minlength=400)
        errors.append(good_turing_coverage(drawn[drawn > 0]) - population[drawn > 0].sum())
    limit = 4 * np.std(errors) / np.sqrt(200) + 1 / 300  # unbiased up to 1 / T
    assert_allclose(np.mean(errors), 0.0, atol=limit)
    random = np.random.default_rng(6)
    population = random.dirichlet(np.full(150, 0.6))
    found, seen = [], []
    for _ in range(100):
        drawn = np.bincount(random.choice(150, 250, p=population), minlength=150)
        found.append(chao1(drawn[drawn > 0]))
        seen.append((drawn > 0).sum())
    assert_array_less(seen, np.add(found, 1e-9))
    assert_array_less(np.mean(found), 150.0)


# ----------------------------------------------------------------------------- agreement of choices
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(60, 8, 2), (90, 6, 1), (25, 12, 5), (40, 7, 7)]
)
def test_overlap_is_that_of_pythons_sets_whatever_the_order_of_slots(tokens, experts, k):
    random = np.random.default_rng(9)
    first, second = np.argsort(random.random((2, tokens, experts)), axis=2)[:, :, :k]
    for t in range(tokens):
        a, b = set(first[t].tolist()), set(second[t].tolist())
        row = slice(t, t + 1)
        assert_array_equal(load.num_shared(first[row], second[row]), len(a & b))
        assert_allclose(load.overlap_share(first[row], second[row]), len(a & b) / len(a))
    assert_array_equal(load.overlap_share(first, first[:, ::-1]), 1.0)
