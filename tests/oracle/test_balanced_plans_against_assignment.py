"""Oracle: in the limit a Sinkhorn plan is the optimal balanced assignment, of SciPy and of HiGHS."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from moegeom.geometry.selection import top_k
from moegeom.geometry.whatif.sinkhorn import column_error, sinkhorn
from moegeom.studies.balance.program.bias import balancing_bias

TOKENS, EXPERTS = 8, 4


def assigned(cost: np.ndarray) -> np.ndarray:
    """Expert of each token at least cost, each expert with its fair share of tokens."""
    tokens, experts = cost.shape
    quota = tokens // experts
    token, place = linear_sum_assignment(np.repeat(cost, quota, axis=1))
    expert = np.empty(tokens, dtype=int)
    expert[token] = place // quota
    return expert


@pytest.mark.parametrize("seed", range(5))
def test_the_limit_is_the_assignment_of_least_cost(seed):
    random = np.random.default_rng(seed)
    cost = random.uniform(-1, 1, (TOKENS, EXPERTS)) - random.uniform(0, 1, EXPERTS)
    plan = sinkhorn(cost, 0.005, 2_000, np.inf)
    assert column_error(plan.share) < 1e-3
    np.testing.assert_array_equal(top_k(plan.share, 1)[:, 0], assigned(cost))
    best = cost[np.arange(TOKENS), assigned(cost)].sum()
    np.testing.assert_allclose((plan.share * cost).sum(), best, atol=0.05)


def test_few_steps_and_the_clip_miss_it():
    missed = 0
    for seed in range(8):
        random = np.random.default_rng(seed)
        cost = random.uniform(-1, 1, (TOKENS, EXPERTS)) - random.uniform(0, 1, EXPERTS)
        found = top_k(sinkhorn(cost, 0.002, 3).share, 1)[:, 0]
        missed += bool((found != assigned(cost)).any())
    assert missed >= 4


def test_the_limit_has_the_value_of_the_program_that_balances_by_a_bias():
    """One expert a token: both solve the same linear program."""
    random = np.random.default_rng(0)
    scores = random.uniform(0, 1, (64, EXPERTS)) + random.uniform(0, 0.5, EXPERTS)
    program = balancing_bias(scores, 1)
    share = sinkhorn(-scores, 0.004, 1_000, np.inf).share
    assert column_error(share) < 1e-2
    np.testing.assert_allclose((share * scores).sum(), program.value, rtol=2e-3)
    best = scores[np.arange(64), assigned(-scores)].sum()
    np.testing.assert_allclose(best, program.value, rtol=1e-9)
