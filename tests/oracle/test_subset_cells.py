"""Cells by asking about every set are those of the walk and of exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.studies.cells.ball.subset_cells import subset_cells
from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from moegeom.studies.cells.walk.enumeration import Enumeration, enumerate_cells


@pytest.mark.parametrize(
    ("experts", "k", "dims"),
    [(8, 2, 2), (12, 4, 4), (14, 11, 3), pytest.param(10, 3, 7, marks=pytest.mark.nightly)],
)
def test_cells_are_those_of_the_walk_with_a_point_in_each(experts, k, dims):
    generator = np.random.default_rng(experts)
    weight, bias = generator.standard_normal((experts, dims)), generator.standard_normal(experts)
    walked = enumerate_cells(weight, bias, k)
    assert isinstance(walked, Enumeration)
    found = subset_cells(weight, bias, k)
    np.testing.assert_array_equal(found.expert_set, walked.expert_set)
    logits = found.witness @ weight.T + bias
    best = np.sort(np.argsort(-logits, axis=1)[:, :k], axis=1)
    np.testing.assert_array_equal(best, found.expert_set)


@pytest.mark.parametrize("seed", range(4))
def test_ties_are_decided_exactly(seed):
    generator = np.random.default_rng(seed)
    weight = generator.integers(-2, 3, (7, 2)).astype(np.float64)
    bias = generator.integers(-2, 3, 7).astype(np.float64)
    weight[3], bias[3] = weight[1], bias[1]
    found = subset_cells(weight, bias, 3)
    assert list(map(tuple, found.expert_set.tolist())) == expert_sets(exact_cells(weight, bias, 3))


def test_rows_of_full_rank_have_every_set_as_a_cell():
    generator = np.random.default_rng(0)
    found = subset_cells(generator.standard_normal((8, 9)), np.zeros(8), 3)
    assert len(found.expert_set) == 56


def test_too_many_sets_are_refused():
    with pytest.raises(ValueError, match="at most 1000000 are tried"):
        subset_cells(np.ones((64, 2)), np.zeros(64), 8)


@pytest.mark.parametrize("k", [0, 4])
def test_top_k_outside_the_experts_is_refused(k):
    with pytest.raises(ValueError, match="of 3 experts"):
        subset_cells(np.ones((3, 2)), np.zeros(3), k)
