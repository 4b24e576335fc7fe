"""Oracle: scipy's SLSQP over every set of tied experts and every split of the others.

Each program has the inputs themselves as variables: nothing is projected, pruned or branched.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import minimize

from moegeom.geometry.boundary.order_distance import least_distance, order_distance, row_coordinates


def splits(experts, k, order):
    """Tied experts, those above and those below, as docs/theory.md A4 counts them."""
    for tied in combinations(range(experts), order + 1):
        others = [e for e in range(experts) if e not in tied]
        for size in range(max(k - order, 0), min(k - 1, len(others)) + 1):
            for above in combinations(others, size):
                yield tied, above, [e for e in others if e not in above]


def by_program(weight, z, tied, above, below):
    """Least length of a move that ends in the polyhedron; inf when SLSQP finds no point of it."""
    first = tied[0]
    same = weight[list(tied[1:])] - weight[first]
    gaps = z[list(tied[1:])] - z[first]
    sign = np.array([1.0] * len(above) + [-1.0] * len(below))
    others = [*above, *below]
    sides = sign[:, None] * (weight[others] - weight[first])
    heights = sign * (z[others] - z[first])
    constraints = [{"type": "eq", "fun": lambda x: same @ x + gaps, "jac": lambda x: same}]
    if others:
        constraints.append(
            {"type": "ineq", "fun": lambda x: sides @ x + heights, "jac": lambda x: sides}
        )
    found = minimize(
        lambda x: x @ x,
        np.zeros(weight.shape[1]),
        jac=lambda x: 2.0 * x,
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 200},
    )
    is_met = np.abs(same @ found.x + gaps).max() < 1e-7
    is_met &= (sides @ found.x + heights).min(initial=0.0) > -1e-7
    return float(np.linalg.norm(found.x)) if is_met else np.inf


CASES = [
    # experts, hidden, k, order
    (4, 4, 1, 2),
    (5, 3, 2, 2),
    (5, 6, 2, 3),
    (6, 2, 3, 2),
    (6, 5, 3, 2),
    (6, 4, 5, 3),
    (6, 5, 1, 5),
    (7, 3, 2, 2),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("experts", "hidden", "k", "order"), CASES)
def test_the_distance_is_that_of_the_nearest_polyhedron(experts, hidden, k, order, has_bias):
    random = np.random.default_rng([experts, hidden, k, order, has_bias])
    spread = random.uniform(0.3, 1.5, (experts, 1))
    weight = spread * random.standard_normal((experts, hidden))
    bias = has_bias * random.standard_normal(experts)
    for _ in range(2):
        z = weight @ random.standard_normal(hidden) * 2.0 + bias
        expected = min(by_program(weight, z, *split) for split in splits(experts, k, order))
        found = order_distance(z, row_coordinates(weight), k, order)
        assert found.is_exact
        np.testing.assert_allclose(found.upper, expected, rtol=1e-6)


def test_a_least_distance_is_what_slsqp_finds():
    random = np.random.default_rng(5)
    impossible = 0
    for _ in range(30):
        count, dims = int(random.integers(1, 9)), int(random.integers(1, 6))
        normals, offsets = random.standard_normal((count, dims)), random.standard_normal(count)
        found = least_distance(normals, offsets, 0.0)
        program = minimize(
            lambda x: x @ x,
            np.zeros(dims),
            jac=lambda x: 2.0 * x,
            constraints={"type": "ineq", "fun": lambda x, a=normals, b=offsets: a @ x - b},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 300},
        )
        if np.isinf(found.bound):
            impossible += 1
            assert (normals @ program.x - offsets).min() < -1e-6
            continue
        np.testing.assert_allclose(found.bound, np.linalg.norm(program.x), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(np.linalg.norm(found.point), found.bound, rtol=1e-9)
        np.testing.assert_array_less(offsets - 1e-9, normals @ found.point)
    assert 0 < impossible < 15
