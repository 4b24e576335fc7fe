"""Sinkhorn scaling: what it promises and what it does not, shown on small batches."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.geometry.load import load_cv, max_vio
from moegeom.geometry.rows import unit_rows
from moegeom.geometry.selection import softmax, top_k
from moegeom.geometry.whatif.sinkhorn import column_error, osr_cost, sinkhorn


def clustered_cost(tokens: int = 2048, experts: int = 64, seed: int = 0) -> np.ndarray:
    """Negative cosines of tokens that come in clusters, a few of them large, near single rows."""
    random = np.random.default_rng(seed)
    rows = unit_rows(random.standard_normal((experts, 32)))
    size = 1.0 / np.arange(1, experts + 1)
    cluster = random.choice(experts, tokens, p=size / size.sum())
    inputs = unit_rows(rows[cluster] + 0.1 * random.standard_normal((tokens, 32)))
    return -inputs @ rows.T


@pytest.fixture(scope="module")
def cost() -> np.ndarray:
    return clustered_cost()


@pytest.mark.parametrize("in_logarithms", [True, False])
def test_rows_are_exact_and_three_steps_leave_columns_far_off(cost, in_logarithms):
    share = {steps: sinkhorn(cost, 0.05, steps, np.inf, in_logarithms).share for steps in (3, 300)}
    np.testing.assert_allclose(share[3].sum(axis=1), 1.0, atol=1e-6)
    assert column_error(share[3]) > 0.5
    assert column_error(share[300]) < 1e-3


def test_more_steps_lower_the_error_of_columns(cost):
    errors = [column_error(sinkhorn(cost, 0.05, steps).share) for steps in (0, 3, 10, 100)]
    assert errors == sorted(errors, reverse=True)


def test_a_balanced_plan_does_not_balance_the_largest_two_of_it(cost):
    share = sinkhorn(cost, 0.05, 300).share
    counts = np.bincount(top_k(share, 2).ravel(), minlength=64)
    assert column_error(share) < 1e-3 < 0.1 < load_cv(counts)
    assert max_vio(counts) > 0.1


def test_one_token_has_the_same_share_everywhere_whatever_its_costs():
    costs = np.random.default_rng(0).uniform(-1, 1, (1, 7))
    np.testing.assert_allclose(sinkhorn(costs, 0.05, 3).share, 1 / 7, rtol=1e-12)


def test_a_constant_of_all_experts_of_a_token_changes_nothing(cost):
    small = cost[:256]
    moved = small + np.random.default_rng(1).standard_normal((256, 1))
    for steps in (0, 3):
        share = sinkhorn(small, 0.5, steps, np.inf).share
        np.testing.assert_allclose(sinkhorn(moved, 0.5, steps, np.inf).share, share, rtol=1e-11)


def test_a_constant_of_an_expert_is_absorbed_by_the_columns(cost):
    """In the limit; three steps, which begin with rows, still see a part of it."""
    small = cost[:256]
    moved = small + np.random.default_rng(1).standard_normal(64)
    far = {
        steps: np.abs(
            sinkhorn(moved, 0.5, steps, np.inf).share - sinkhorn(small, 0.5, steps, np.inf).share
        ).max()
        for steps in (0, 3, 300)
    }
    assert far[300] < 1e-12 < far[3] < 0.3 * far[0]


def test_equal_experts_stay_equal(cost):
    rows = np.random.default_rng(2).standard_normal((6, 8))
    rows[4] = rows[1]
    inputs = unit_rows(np.random.default_rng(3).standard_normal((40, 8)))
    costs = osr_cost(inputs @ unit_rows(rows).T, rows)
    np.testing.assert_allclose(costs[:, 4], costs[:, 1], rtol=0, atol=1e-15)
    share = sinkhorn(costs, 0.05, 3).share
    np.testing.assert_allclose(share[:, 4], share[:, 1], rtol=1e-12)


def test_without_steps_each_token_has_the_softmax_of_its_costs(cost):
    for in_logarithms in (True, False):
        share = sinkhorn(cost, 0.1, 0, np.inf, in_logarithms).share
        np.testing.assert_allclose(share, softmax(-cost / 0.1), atol=1e-6)


def test_the_two_forms_agree_within_the_guard(cost):
    plain = sinkhorn(cost, 0.05, 3, in_logarithms=False).share
    seven_sums = 7 * 1e-8
    np.testing.assert_allclose(sinkhorn(cost, 0.05, 3).share, plain, rtol=0, atol=seven_sums)


def test_clipped_costs_are_counted_and_lose_their_order():
    costs = np.array([[-3.0, -2.6, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    plan = sinkhorn(costs, 0.05, 0)
    assert plan.clipped_share == 3 / 8
    assert plan.share[0, 0] == plan.share[0, 1]
    unclipped = sinkhorn(costs, 0.05, 0, np.inf)
    assert unclipped.clipped_share == 0.0
    assert unclipped.share[0, 0] > unclipped.share[0, 1]


@pytest.mark.parametrize("in_logarithms", [True, False])
def test_an_infinite_cost_is_never_chosen(in_logarithms):
    costs = np.random.default_rng(4).uniform(-1, 1, (6, 4))
    costs[:, 2] = np.inf
    costs[0, 1] = np.inf
    plan = sinkhorn(costs, 0.5, 20, in_logarithms=in_logarithms)
    assert plan.share[0, 1] == 0.0
    np.testing.assert_array_equal(plan.share[:, 2], 0.0)
    np.testing.assert_allclose(plan.share.sum(axis=1), 1.0, atol=1e-6)


def test_column_error_by_hand():
    share = np.array([[1.0, 0.0], [0.5, 0.5]])
    assert column_error(share) == 0.5
    assert np.isnan(column_error(np.empty((0, 3))))


def test_overlaps_are_squared_entry_by_entry():
    """The square of the matrix would put the sum over a third expert in its place."""
    rows = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    similarity = np.array([[1.0, 0.0, 0.0]])
    found = osr_cost(similarity, rows, overlap=1.0, excess=0.0)
    np.testing.assert_allclose(found, [[-1.0, 0.36, 0.0]], atol=1e-15)


def test_the_length_of_expert_rows_does_not_matter():
    random = np.random.default_rng(5)
    rows, similarity = random.standard_normal((5, 3)), random.uniform(-1, 1, (7, 5))
    scaled = rows * random.uniform(0.5, 2.0, (5, 1))
    np.testing.assert_allclose(osr_cost(similarity, scaled), osr_cost(similarity, rows), rtol=1e-12)
