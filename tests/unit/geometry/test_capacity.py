"""Capacity of experts and ranks: worked by hand, and by serving tokens one at a time."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

import numpy as np
import pytest

from moegeom.geometry.load import dropped_slot_share, expert_capacity, rank_imbalance


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "factor", "expected"),
    [
        (2048, 64, 2, 1.25, 80),  # docs/theory.md D3
        (100, 10, 1, 1.1, 11),  # the float 1.1 is a little more than 11/10
        (100, 10, 1, 1.0, 10),
        (101, 10, 1, 1.0, 11),
        (1, 8, 1, 1.0, 1),
        (0, 8, 2, 1.5, 0),
        (10**15 + 1, 1, 1, 1.0, 10**15 + 1),  # beyond what a product of floats would keep
    ],
)
def test_capacity_is_the_fair_load_times_the_factor_rounded_up(
    tokens, experts, k, factor, expected
):
    assert expert_capacity(tokens, experts, k, factor) == expected


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.7, 2.3, 1e-3])
def test_capacity_takes_the_factor_as_it_is_written(factor):
    for tokens in (10, 700, 1000, 4096, 12_345):
        exact = Decimal(str(factor)) * tokens * 4 / 64  # 64 is a power of two: no rounding
        expected = int(exact.to_integral_value(ROUND_CEILING))
        assert expert_capacity(tokens, 64, 4, factor) == expected


def test_dropped_slots_are_those_that_find_their_expert_full():
    random = np.random.default_rng(0)
    for capacity in (0, 1, 7, 20, 1000):
        slots = random.choice(8, 200, p=random.dirichlet(np.ones(8)))
        left, dropped = dict.fromkeys(range(8), capacity), 0
        for expert in slots.tolist():
            dropped += left[expert] == 0
            left[expert] = max(left[expert] - 1, 0)
        counts = np.bincount(slots, minlength=8)
        np.testing.assert_allclose(dropped_slot_share(counts, capacity), dropped / 200, rtol=1e-14)


def test_dropped_slots_by_hand():
    """Capacity 4 of loads 8, 4, 2, 2: four of sixteen slots too many."""
    counts = np.array([8, 4, 2, 2])
    np.testing.assert_equal(dropped_slot_share(counts, expert_capacity(8, 4, 2, 1.0)), 0.25)
    np.testing.assert_equal(dropped_slot_share(counts, 8), 0.0)
    assert np.isnan(dropped_slot_share(0 * counts, 3))


def test_ranks_by_hand():
    """Ranks (8, 4) and (2, 2): 12 and 4 of a mean of 8."""
    counts = np.array([8, 4, 2, 2])
    np.testing.assert_equal(rank_imbalance(counts, 2), 1.5)
    np.testing.assert_equal(rank_imbalance(counts, 4), 2.0)
    np.testing.assert_equal(rank_imbalance(counts, 1), 1.0)


def test_the_order_inside_a_rank_does_not_matter_and_between_ranks_it_does():
    np.testing.assert_equal(rank_imbalance(np.array([4, 8, 2, 2]), 2), 1.5)
    np.testing.assert_equal(rank_imbalance(np.array([8, 2, 2, 4]), 2), 1.25)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_imbalance_lies_between_even_and_one_busy_rank(ranks):
    random = np.random.default_rng(ranks)
    for _ in range(50):
        found = rank_imbalance(random.poisson(random.gamma(0.3, 9.0, 16)) + 0, ranks)
        assert np.isnan(found) or 1.0 <= found <= ranks
    np.testing.assert_equal(rank_imbalance(np.full(16, 3), ranks), 1.0)
    np.testing.assert_equal(rank_imbalance(np.eye(1, 16, 5, dtype=np.int64)[0], ranks), ranks)


def test_more_ranks_are_never_more_even():
    random = np.random.default_rng(0)
    for _ in range(50):
        counts = random.poisson(random.gamma(0.5, 20.0, 32)) + 1
        found = [rank_imbalance(counts, ranks) for ranks in (1, 2, 4, 8, 16, 32)]
        assert found == sorted(found)


def test_ranks_that_do_not_divide_the_experts_and_no_tokens_have_no_figure():
    counts = np.array([8, 4, 2, 2])
    for found in (
        rank_imbalance(counts, 3),
        rank_imbalance(counts, 8),
        rank_imbalance(0 * counts, 2),
    ):
        assert np.isnan(found)
