"""Oracle: HiGHS on the whole linear program, every choice of every token a variable."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_array

from moegeom.geometry.load import (
    cv_squared_reduction,
    max_vio,
    max_vio_floor,
    max_vio_limit,
    scatter,
    unit_counts,
)
from moegeom.geometry.selection import top_k as picked
from moegeom.studies.balance.program.bias import (
    balancing_bias,
    dual_value,
    duplicate_experts,
    score_spread,
)
from moegeom.studies.balance.program.dual import contenders, minimise_smoothed
from moegeom.studies.balance.program.passes import balance_by_updates, chosen_counts, chosen_mask

SHAPES = [(1, 4, 2), (7, 5, 2), (50, 8, 1), (97, 12, 11), (160, 16, 4), (250, 48, 8)]
KINDS = ["even", "uneven", "offset", "integers", "saturated", "repeated", "duplicates"]


def scores_of(kind: str, tokens: int, experts: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng([seed, tokens, experts])
    q = random.standard_normal((tokens, experts))
    if kind == "uneven":
        q += 2.0 * random.standard_normal(experts)
    if kind == "offset":
        q += 1e3
    if kind == "integers":
        q = random.integers(0, 4, (tokens, experts)).astype(np.float64)
    if kind == "saturated":  # one expert that every token scores 1, one that none wants
        q = 1.0 / (1.0 + np.exp(-q))
        q[:, 0], q[:, 1] = 1.0, 0.0
    if kind == "repeated":
        q = np.repeat(q[: -(-tokens // 2)], 2, axis=0)[:tokens]
    if kind == "duplicates":
        q[:, -1] = q[:, 0]
    return q


def program(q: np.ndarray, k: int) -> float:
    """The optimum of max sum x q over all shares x, quotas as equalities."""
    tokens, experts = q.shape
    number = np.arange(q.size)
    row = np.concatenate([number // experts, tokens + number % experts])
    table = csr_array((np.ones(2 * q.size), (row, np.tile(number, 2))))
    ends = np.concatenate([np.full(tokens, float(k)), np.full(experts, k * tokens / experts)])
    solved = linprog(-q.ravel(), A_eq=table, b_eq=ends, bounds=(0, 1), method="highs")
    assert solved.status == 0
    return -solved.fun


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
def test_the_value_is_that_of_the_whole_program(kind, tokens, experts, k):
    q = scores_of(kind, tokens, experts)
    found = balancing_bias(q, k)
    assert found.value is not None
    np.testing.assert_allclose(found.value, program(q, k), rtol=1e-9, atol=1e-9 * score_spread(q))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
def test_counts_miss_the_quota_by_no_more_than_the_tied_tokens(kind, tokens, experts, k):
    q = scores_of(kind, tokens, experts)
    found = balancing_bias(q, k)
    assert found.num_tied is not None
    quota = k * tokens / experts
    assert np.abs(found.counts - quota).max() <= found.num_tied + 1e-9
    np.testing.assert_array_equal(found.counts, np.bincount(picked(q + found.bias, k).ravel(),
                                                            minlength=experts))  # fmt: skip


@pytest.mark.parametrize("kind", ["even", "uneven", "offset", "saturated"])
def test_the_gap_is_the_dual_at_the_bias_less_the_optimum(kind):
    q = scores_of(kind, 160, 16)
    found = balancing_bias(q, 4)
    assert found.gap is not None
    by_hand = dual_value(q, found.bias, 4, 40.0) - program(q, 4)
    assert by_hand >= -1e-8
    np.testing.assert_allclose(found.gap * score_spread(q) * 4 * 160, by_hand, atol=1e-7)
    assert found.gap < 1e-3


def test_scores_without_ties_are_balanced_to_a_token():
    q = scores_of("uneven", 2000, 32)
    found = balancing_bias(q, 4)
    assert found.counts.max() <= 251
    assert found.counts.min() >= 249
    assert chosen_counts(q, 4).max() > 800


def test_any_bias_bounds_the_program_from_above():
    q = scores_of("uneven", 97, 12)
    random = np.random.default_rng(5)
    for _ in range(20):
        assert dual_value(q, random.standard_normal(12), 3, 97 * 3 / 12) >= program(q, 3) - 1e-9


def test_no_number_per_token_or_per_expert_changes_who_is_chosen():
    q = scores_of("uneven", 400, 16)
    random = np.random.default_rng(6)
    shifts = random.standard_normal(16)
    moved = q + random.standard_normal((400, 1)) + shifts
    first, second = balancing_bias(q, 4), balancing_bias(moved, 4)
    np.testing.assert_allclose(
        second.bias + shifts - shifts.mean(), first.bias, atol=0.05 * score_spread(q)
    )
    assert second.counts.max() == first.counts.max()


def test_experts_can_be_renumbered():
    q = scores_of("uneven", 300, 12)
    order = np.random.default_rng(7).permutation(12)
    first, second = balancing_bias(q, 3), balancing_bias(q[:, order], 3)
    assert first.value == pytest.approx(second.value, rel=1e-12)
    np.testing.assert_allclose(second.bias, first.bias[order], atol=0.05)


def test_a_start_does_not_change_the_value():
    q = scores_of("uneven", 300, 12)
    start = 3.0 * np.random.default_rng(8).standard_normal(12)
    cold, warm = balancing_bias(q, 3), balancing_bias(q, 3, start)
    assert cold.value == pytest.approx(warm.value, rel=1e-12)
    assert warm.counts.max() == cold.counts.max()


@pytest.mark.parametrize("value", [0.0, 1.0, -3e5])
def test_constant_scores_make_every_token_a_tie(value):
    found = balancing_bias(np.full((40, 6), value), 2)
    assert found.num_tied == 40
    np.testing.assert_array_equal(found.counts, [40, 40, 0, 0, 0, 0])
    np.testing.assert_allclose(found.value, 80 * value)


def test_equal_tokens_are_all_ties_however_their_experts_differ():
    row = np.random.default_rng(9).standard_normal(6)
    found = balancing_bias(np.tile(row, (40, 1)), 2)
    assert (found.num_tied, found.counts.max()) == (40, 40)
    np.testing.assert_allclose(found.value, 80 * row.mean(), rtol=1e-12)
    np.testing.assert_allclose(found.bias, row.mean() - row, atol=1e-15)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(9, 5, 5), (9, 1, 1), (0, 4, 2)])
def test_where_every_bias_does_the_same_it_is_zero(tokens, experts, k):
    found = balancing_bias(np.ones((tokens, experts), dtype=np.float32), k)
    np.testing.assert_array_equal(found.bias, np.zeros(experts))
    assert found.num_tied == 0
    if tokens:
        np.testing.assert_array_equal(found.counts, np.full(experts, tokens))


def test_dead_experts_with_saturated_scores_are_brought_back():
    random = np.random.default_rng(10)
    q = 1.0 / (1.0 + np.exp(-random.standard_normal((600, 8))))
    q[:, 2] = 0.0
    found = balancing_bias(q, 2)
    assert chosen_counts(q, 2)[2] == 0
    np.testing.assert_array_equal(found.counts, np.full(8, 150))


def test_duplicates_are_named_and_nobody_else():
    q = scores_of("even", 50, 8)
    q[:, 5] = q[:, 1] + 0.25
    q[:, 7] = q[:, 5]
    assert duplicate_experts(q) == [(1, 5, 7)]
    q[3, 7] += 1e-3
    assert duplicate_experts(q) == [(1, 5)]
    assert duplicate_experts(q[:1]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_that_of_sorted_picks(kind):
    q = scores_of(kind, 50, 8)
    for k in (1, 3, 8):
        mask = np.zeros(q.shape, dtype=bool)
        np.put_along_axis(mask, picked(q, k).astype(np.int64), True, axis=1)
        np.testing.assert_array_equal(chosen_mask(q, k), mask)


def test_the_smoothed_dual_has_the_minimum_that_scipy_finds():
    from scipy.optimize import minimize
    from scipy.special import expit

    q, k, eps = scores_of("uneven", 60, 6), 2, 0.3

    def smoothed(b):
        z = (q + b) / eps
        low, high = z.min(axis=1) - 40.0, z.max(axis=1) + 40.0
        for _ in range(80):
            middle = 0.5 * (low + high)
            above = expit(z - middle[:, None]).sum(axis=1) > k
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        value = eps * (np.logaddexp(0.0, z - low[:, None]).sum() + k * low.sum()) - 20.0 * b.sum()
        return value, expit(z - low[:, None]).sum(axis=0) - 20.0

    theirs = minimize(smoothed, np.zeros(6), jac=True, method="L-BFGS-B", tol=1e-14).x
    ours = minimise_smoothed(contenders(q, np.zeros(6), 6), np.zeros(6), k, 20.0, eps, 1e-9)
    np.testing.assert_allclose(ours - ours.mean(), theirs - theirs.mean(), atol=1e-5)


def test_updates_reach_what_the_program_reaches_without_groups():
    q = scores_of("uneven", 500, 10)
    bias = balance_by_updates(lambda b: chosen_counts(q + b, 3), [np.zeros(10)], 0.5)
    assert max_vio(chosen_counts(q + bias, 3)) < 0.05
    assert max_vio(chosen_counts(q, 3)) > 0.5


def even_choice(random: np.random.Generator, documents: int, own: float) -> np.ndarray:
    """Counts by document of 64 tokens that are even in expectation; documents have preferences."""
    experts, k, length = 32, 4, 64
    taste = own * random.standard_normal((documents, experts))
    draws = random.gumbel(size=(documents * length, experts)) + np.repeat(taste, length, axis=0)
    mask = chosen_mask(draws, k)
    return unit_counts(mask, np.arange(documents * length) // length)


@pytest.mark.parametrize("own", [0.0, 0.7])
def test_even_routing_stays_below_the_limit_as_often_as_it_says(own):
    """Monte Carlo with 48 documents: 10 % above, alone and for a bias made on other documents."""
    random = np.random.default_rng(11)
    above = np.zeros(2)
    for _ in range(80):
        first, second = (scatter(even_choice(random, 48, own)) for _ in range(2))
        above[0] += first.load.max() - 1.0 > max_vio_limit([first], 0.1)
        above[1] += (first.load - second.load).max() > max_vio_limit([first, second], 0.1)
    assert (above / 80 < 0.21).all()
    assert (above / 80 > 0.01).all()


def test_the_limit_of_independent_tokens_is_near_the_floor():
    first = scatter(even_choice(np.random.default_rng(12), 256, 0.0))
    floor = max_vio_floor(256 * 64, 32, 4)
    # the mean of the largest of 32 normal deviates is 2.07; the floor has sqrt(2 log 32) = 2.63
    assert 0.7 * floor < max_vio_limit([first], 0.5) < 0.9 * floor
    assert floor < max_vio_limit([first], 0.01) < 2.0 * floor


def test_one_document_says_nothing():
    lonely = scatter(even_choice(np.random.default_rng(13), 1, 0.0))
    assert max_vio_limit([lonely], 0.05) == np.inf
    assert cv_squared_reduction(lonely, lonely)[1] == 1.0


def test_a_reduction_of_even_loads_is_rarely_believed():
    """Before and after are both even: Monte Carlo, at most about 5 % of p values are below 5 %."""
    random = np.random.default_rng(14)
    draws = [[scatter(even_choice(random, 32, 0.5)) for _ in range(2)] for _ in range(150)]
    assert np.mean([cv_squared_reduction(*pair)[1] < 0.05 for pair in draws]) < 0.11


def test_bundles_keep_every_slot():
    mask = chosen_mask(np.random.default_rng(15).standard_normal((1000, 8)), 2)
    counts = unit_counts(mask, np.arange(1000))
    assert counts.shape == (256, 8)
    np.testing.assert_array_equal(counts.sum(axis=0), mask.sum(axis=0))
