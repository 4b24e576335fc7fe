"""The walk against code of others, and against a search that shares nothing with it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.spatial import ConvexHull

from moegeom.studies.cells.ball.ball_cells import cells_within_hops
from moegeom.studies.cells.walk.enumeration import Enumeration, enumerate_cells

#: Seeds by day, and all of them at night.
_BY_DAY, _AT_NIGHT = 40, 400


def instance(seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """A random size of at most 14 experts and 4 dimensions."""
    generator = np.random.default_rng(seed)
    experts, dims = int(generator.integers(6, 15)), int(generator.integers(2, 5))
    k = int(generator.integers(1, experts))
    return generator.standard_normal((experts, dims)), generator.standard_normal(experts), k


@pytest.mark.parametrize(
    "seeds",
    [range(_BY_DAY), pytest.param(range(_BY_DAY, _AT_NIGHT), marks=pytest.mark.nightly)],
)
def test_the_walk_finds_what_a_search_by_least_distances_finds(seeds):
    for seed in seeds:
        weight, bias, k = instance(seed)
        walked = enumerate_cells(weight, bias, k)
        assert isinstance(walked, Enumeration)
        searched = cells_within_hops(weight, bias, k, np.zeros(weight.shape[1]), 10**6, 10**6)
        np.testing.assert_array_equal(walked.expert_set, searched.expert_set)
        assert sorted(map(tuple, walked.facets.tolist())) == sorted(
            tuple(sorted(pair)) for pair in searched.facets.tolist()
        )


@pytest.mark.parametrize("seed", range(6))
def test_cells_are_the_upper_vertices_of_qhulls_polytope_of_sums(seed):
    weight, bias, k = instance(seed)
    lifted = np.column_stack([weight, bias])
    sets = list(combinations(range(len(bias)), k))
    sums = np.array([lifted[list(some)].sum(axis=0) for some in sets])
    hull = ConvexHull(sums)
    # (x, 1) is normal to a face of the sets that are largest at x: faces that look upwards
    upper = hull.simplices[hull.equations[:, -2] > 1e-9]
    found = enumerate_cells(weight, bias, k)
    assert isinstance(found, Enumeration)
    assert sorted(sets[n] for n in np.unique(upper)) == list(map(tuple, found.expert_set.tolist()))


def test_cells_are_the_sets_that_highs_finds_a_margin_for():
    generator = np.random.default_rng(2)
    weight, bias, k = generator.standard_normal((9, 3)), generator.standard_normal(9), 3
    found = enumerate_cells(weight, bias, k)
    assert isinstance(found, Enumeration)
    cells = set(map(tuple, found.expert_set.tolist()))
    for some in combinations(range(9), k):
        inside = np.isin(np.arange(9), some)
        # z_i >= t + s inside, z_j <= t - s outside: a margin s above 0 is a cell
        sign = np.where(inside, -1.0, 1.0)
        rows = np.column_stack([sign[:, None] * weight, -sign, np.ones(9)])
        limits = -sign * bias
        bounds = [(None, None)] * 4 + [(None, 1.0)]
        solved = linprog([0, 0, 0, 0, -1.0], rows, limits, bounds=bounds)
        assert abs(solved.x[-1]) > 1e-6
        assert (solved.x[-1] > 0) == (some in cells)
