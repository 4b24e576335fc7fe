"""Quotas of experts and thresholds of logits: by hand, and by serving tokens one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.load import dropped_slot_share
from moegeom.geometry.whatif.quotas import batch_capacity, expert_choice, kept_within_capacity
from moegeom.geometry.whatif.threshold import relu_gate, threshold_distance, threshold_for


def scores_of(tokens: int = 60, experts: int = 6, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.standard_normal((tokens, experts)) + random.standard_normal(experts)


def chosen_of(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)


# ------------------------------------------------------------------------------------------- quotas
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "factor", "expected"),
    [(2048, 64, 2, 1.25, 80), (100, 10, 1, 1.1, 11), (10, 4, 2, np.inf, 10), (10, 4, 2, 1.9, 10)],
)
def test_the_capacity_of_a_batch_by_hand(tokens, experts, k, factor, expected):
    assert batch_capacity(tokens, experts, k, factor) == expected


def test_every_expert_takes_its_quota_and_no_token_left_scores_higher_with_it():
    scores = scores_of()
    taken = expert_choice(scores, 13)
    np.testing.assert_array_equal(taken.sum(axis=0), 13)
    worst = np.where(taken, scores, np.inf).min(axis=0)
    best_left = np.where(taken, -np.inf, scores).max(axis=0)
    assert (worst > best_left).all()


def test_of_equal_scores_the_earlier_token_is_taken():
    taken = expert_choice(np.zeros((5, 2)), 2)
    np.testing.assert_array_equal(taken.sum(axis=1), [2, 2, 0, 0, 0])


def test_a_token_that_is_masked_is_taken_by_nobody():
    scores = np.array([[1.0, -np.inf], [-np.inf, -np.inf], [0.0, -np.inf]])
    np.testing.assert_array_equal(
        expert_choice(scores, 3), [[True, False], [False, False], [True, False]]
    )


def served(chosen, num_experts, capacity, order):
    """Tokens one at a time, in an order."""
    left, kept = dict.fromkeys(range(num_experts), capacity), np.zeros(chosen.shape, dtype=bool)
    for token, slot in order:
        expert = int(chosen[token, slot])
        kept[token, slot] = left[expert] > 0
        left[expert] -= 1
    return kept


def test_by_position_the_first_tokens_are_served():
    chosen = chosen_of(scores_of(), 2)
    order = [(token, slot) for token in range(60) for slot in range(2)]
    for capacity in (0, 1, 12, 20, 60):
        kept = kept_within_capacity(chosen, 6, capacity)
        np.testing.assert_array_equal(kept, served(chosen, 6, capacity, order))


def test_by_score_the_best_are_served_and_the_earlier_of_equals():
    scores = np.round(scores_of(), 1)
    chosen = chosen_of(scores, 2)
    wishes = [(token, slot) for token in range(60) for slot in range(2)]
    order = sorted(wishes, key=lambda wish: -scores[wish[0], chosen[wish]])
    for capacity in (0, 1, 12, 20, 60):
        kept = kept_within_capacity(chosen, 6, capacity, scores)
        np.testing.assert_array_equal(kept, served(chosen, 6, capacity, order))


def test_as_many_are_dropped_as_are_over():
    chosen = chosen_of(scores_of(), 3)
    counts = np.bincount(chosen.ravel(), minlength=6)
    for capacity in (5, 20, 30):
        dropped = 1.0 - kept_within_capacity(chosen, 6, capacity).mean()
        np.testing.assert_allclose(dropped, dropped_slot_share(counts, capacity), rtol=1e-13)


def test_an_empty_slot_is_not_kept():
    chosen = np.array([[0, -1], [-1, -1]], dtype=np.int32)
    np.testing.assert_array_equal(
        kept_within_capacity(chosen, 2, 5), [[True, False], [False, False]]
    )


# --------------------------------------------------------------------------------------- thresholds
def test_the_threshold_gives_the_mean_exactly_where_logits_differ():
    logits = scores_of(500)
    for experts in (0.0, 0.002, 1.0, 2.5, 5.998, 6.0):
        theta = threshold_for(logits, experts)
        np.testing.assert_allclose((relu_gate(logits, theta) > 0).sum() / 500, experts, rtol=1e-12)


def test_a_mean_that_cannot_be_is_refused():
    for experts in (-0.1, 6.1):
        with pytest.raises(ValueError, match="of 6 experts"):
            threshold_for(scores_of(), experts)


def test_the_nearest_threshold_is_crossed_at_its_distance_and_not_before():
    random = np.random.default_rng(1)
    rows, bias = random.standard_normal((5, 7)), random.standard_normal(5)
    inputs, theta = random.standard_normal((40, 7)), 0.3
    logits, norms = inputs @ rows.T + bias, np.linalg.norm(rows, axis=1)
    distance = threshold_distance(logits, norms, theta)
    runs = logits > theta
    for step, is_same in ((0.999, True), (1.001, False)):
        for token in range(40):
            moved = inputs[token] + step * distance[token] * np.concatenate(
                [rows / norms[:, None], -rows / norms[:, None]]
            )
            same = ((moved @ rows.T + bias > theta) == runs[token]).all()
            assert same == is_same


def test_rows_of_zeros_have_no_threshold_to_cross():
    logits = np.array([[1.0, 0.0], [3.0, 0.0]])
    np.testing.assert_array_equal(threshold_distance(logits, np.array([2.0, 0.0]), 0.0), [0.5, 1.5])
    np.testing.assert_array_equal(threshold_distance(logits, np.zeros(2), 0.0), [np.inf, np.inf])
