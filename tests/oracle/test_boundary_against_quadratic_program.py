"""Oracle: a quadratic program for the nearest point of each neighbouring cell.

The nearest input with another chosen set lies where one chosen expert i and one other j change
places. For each pair the program finds the nearest y' that puts j above i *and* keeps every other
comparison of the neighbouring cell, so no theory about redundant boundaries goes in: pairs that share
no boundary are infeasible, and the least distance over the feasible ones is the answer. Solved as a
least-distance problem (Lawson and Hanson) by scipy's nonnegative least squares.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from moegeom.geometry.boundary.linear import Boundary, boundary_distance, row_distances
from moegeom.geometry.selection import top_k


def least_distance(normals: np.ndarray, offsets: np.ndarray) -> float:
    """min |x| subject to ``normals @ x >= offsets``; inf when infeasible."""
    size = np.maximum(np.linalg.norm(normals, axis=1), 1e-300)
    kept = np.linalg.norm(normals, axis=1) > 1e-12
    if (offsets[~kept] > 1e-12).any():
        return np.inf
    A, b = normals[kept] / size[kept, None], offsets[kept] / size[kept]
    stacked = np.vstack([A.T, b])
    target = np.zeros(stacked.shape[0])
    target[-1] = 1.0
    dual, residual = nnls(stacked, target, maxiter=1000)
    if residual < 1e-9:
        return np.inf
    r = stacked @ dual - target
    return float(np.linalg.norm(r[:-1] / r[-1]))


def distance_by_programs(weight, bias, y, chosen) -> float:
    """Least distance to a neighbouring cell, each with all its k (E - k) constraints."""
    experts = len(weight)
    z = weight @ y + bias
    others = [j for j in range(experts) if j not in chosen]
    best = np.inf
    for out in chosen:
        for entering in others:
            inside = [i for i in chosen if i != out] + [entering]
            outside = [j for j in others if j != entering] + [out]
            pairs = [(i, j) for i in inside for j in outside]
            normals = np.array([weight[i] - weight[j] for i, j in pairs])
            gaps = np.array([z[j] - z[i] for i, j in pairs])
            best = min(best, least_distance(normals, gaps))
    return best


def measured(weight, bias, y, k) -> tuple[Boundary, np.ndarray]:
    logits = y @ weight.T + bias
    chosen = top_k(logits, k)
    return boundary_distance(logits, chosen, row_distances(weight, bias)), chosen


CASES = [
    # experts, hidden, k: a pair is redundant as soon as experts > hidden + 1
    (5, 6, 2),
    (4, 8, 1),
    (6, 7, 5),
    (7, 2, 2),
    (9, 3, 3),
    (12, 2, 1),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("experts", "hidden", "k"), CASES)
def test_the_distance_is_that_of_the_nearest_neighbouring_cell(experts, hidden, k, has_bias):
    random = np.random.default_rng([experts, hidden, k, has_bias])
    spread = random.uniform(0.5, 1.5, (experts, 1))
    weight = spread * random.standard_normal((experts, hidden))
    bias = has_bias * random.standard_normal(experts)
    y = random.standard_normal((6, hidden)) * 2
    found, chosen = measured(weight, bias, y, k)
    expected = [distance_by_programs(weight, bias, y[t], chosen[t].tolist()) for t in range(6)]
    np.testing.assert_allclose(found.distance, expected, rtol=1e-7)


def test_redundant_pairs_do_not_change_the_distance_although_they_are_compared():
    """With 40 rows in a plane nearly all of the pairs are redundant."""
    random = np.random.default_rng(11)
    weight, bias = random.standard_normal((40, 2)), random.standard_normal(40) * 0.3
    y = random.standard_normal((2, 2))
    found, chosen = measured(weight, bias, y, 2)
    expected = [distance_by_programs(weight, bias, y[t], chosen[t].tolist()) for t in range(2)]
    np.testing.assert_allclose(found.distance, expected, rtol=1e-7)


def test_equal_rows_with_different_biases_are_no_boundary():
    random = np.random.default_rng(12)
    weight, bias = random.standard_normal((6, 5)), random.standard_normal(6)
    weight[4] = weight[1]
    y = random.standard_normal((12, 5)) * 2
    found, chosen = measured(weight, bias, y, 2)
    expected = [distance_by_programs(weight, bias, y[t], chosen[t].tolist()) for t in range(12)]
    np.testing.assert_allclose(found.distance, expected, rtol=1e-7)


def test_a_zero_row_is_an_expert_like_any_other():
    random = np.random.default_rng(13)
    weight, bias = random.standard_normal((6, 5)), random.standard_normal(6)
    weight[3] = 0.0
    y = random.standard_normal((12, 5))
    found, chosen = measured(weight, bias, y, 3)
    expected = [distance_by_programs(weight, bias, y[t], chosen[t].tolist()) for t in range(12)]
    np.testing.assert_allclose(found.distance, expected, rtol=1e-7)
