"""Oracle: one linear program for every set of tied experts and every split of the others.

Solved by scipy's HiGHS with the move of the input as variables, all of them, none left out.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from moegeom.geometry.boundary.orders import free_logit_distance, logit_distance


def by_programs(weight, z, k, order):
    """Least t with |W x| <= t such that experts tie and split as docs/theory.md A4 says."""
    experts, hidden = weight.shape
    best = np.inf
    for tied in combinations(range(experts), order + 1):
        others = [e for e in range(experts) if e not in tied]
        for size in range(max(k - order, 0), min(k - 1, len(others)) + 1):
            for above in combinations(others, size):
                rows = [np.append(weight[e], -1.0) for e in range(experts)]
                rows += [np.append(-weight[e], -1.0) for e in range(experts)]
                limits = [0.0] * (2 * experts)
                for e in others:
                    sign = 1.0 if e in above else -1.0
                    rows.append(np.append(-sign * (weight[e] - weight[tied[0]]), 0.0))
                    limits.append(sign * (z[e] - z[tied[0]]))
                found = linprog(
                    np.eye(hidden + 1)[-1],
                    A_ub=np.array(rows),
                    b_ub=limits,
                    A_eq=[np.append(weight[e] - weight[tied[0]], 0.0) for e in tied[1:]],
                    b_eq=[z[tied[0]] - z[e] for e in tied[1:]],
                    bounds=(None, None),
                )
                best = min(best, found.fun) if found.status == 0 else best
    return best


@pytest.mark.parametrize(
    ("experts", "hidden", "k", "order"),
    [(4, 2, 1, 2), (5, 3, 2, 1), (5, 3, 2, 3), (6, 2, 3, 2), (6, 4, 2, 2)],
)
def test_dependent_rows_need_the_programs(experts, hidden, k, order):
    random = np.random.default_rng([experts, hidden, k, order])
    weight = random.standard_normal((experts, hidden))
    z = weight @ random.standard_normal(hidden) + 0.5 * random.standard_normal(experts)
    found = logit_distance(z, weight, k, order)
    assert found.is_exact
    np.testing.assert_allclose(found.upper, by_programs(weight, z, k, order), rtol=1e-5)
    # and half the spread is a bound below, here not reached
    assert free_logit_distance(z[None], k, order)[0] <= found.upper * (1.0 + 1e-6)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_independent_rows_need_none(order):
    random = np.random.default_rng(order)
    weight, z = random.standard_normal((5, 7)), random.standard_normal(5)
    found = logit_distance(z, weight, 2, order)
    np.testing.assert_allclose(found.upper, by_programs(weight, z, 2, order), rtol=1e-6)
    np.testing.assert_array_equal(found.upper, free_logit_distance(z[None], 2, order)[0])


def test_rows_that_are_dependent_by_a_multiple_of_one_row_are_searched():
    """Rank E - 1 with independent differences: every order of logits occurs, no common shift."""
    weight = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    z = np.array([1.0, 0.3, 0.0])
    found = logit_distance(z, weight, 1, 2)
    np.testing.assert_allclose(found.upper, by_programs(weight, z, 1, 2), rtol=1e-6)
    np.testing.assert_allclose(found.upper, 1.0, rtol=1e-6)
    assert free_logit_distance(z[None], 1, 2)[0] == 0.5
