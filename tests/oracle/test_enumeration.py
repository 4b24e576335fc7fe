"""The road that is taken for each kind of instance leads to the certified cells and facets."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from moegeom.studies.cells.walk.enumeration import AllSubsets, Enumeration, enumerate_cells
from tests.oracle.test_cells_against_certified_instances import WHOLE, arrays, digest


def rows(found: Enumeration) -> list[tuple[int, ...]]:
    return [tuple(row) for row in found.expert_set.tolist()]


def pairs(found: Enumeration) -> set[frozenset[tuple[int, ...]]]:
    cells = rows(found)
    return {frozenset((cells[a], cells[b])) for a, b in found.facets.tolist()}


def assert_inside(found: Enumeration, weight, bias, k):
    logits = found.witness @ weight.T + (0.0 if bias is None else bias)
    best = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :k], axis=1)
    np.testing.assert_array_equal(best, found.expert_set)


@pytest.mark.parametrize("instance", WHOLE, ids=lambda instance: instance["name"])
def test_cells_and_facets_are_the_certified_ones(instance):
    weight, bias = arrays(instance)
    found = enumerate_cells(weight, bias, instance["k"])
    if isinstance(found, AllSubsets):
        assert found.num_cells == instance["n_cells"]
        assert found.num_facets == instance["n_walls"]
        return
    assert digest(rows(found)) == instance["cells_sha1"]
    assert len(found.facets) == instance["n_walls"]
    assert len(pairs(found)) == instance["n_walls"]
    assert found.is_whole


@pytest.mark.parametrize(
    ("experts", "k", "dims", "is_affine", "road"),
    [
        (9, 3, 1, True, "sweep"),
        (9, 3, 2, True, "walk"),
        (9, 7, 2, True, "walk"),  # more than half: by the complement
        (9, 7, 3, False, "charts"),
        (9, 3, 2, False, "sweep"),
        (10, 4, 3, False, "charts"),
        (10, 1, 4, True, "walk"),
        (10, 9, 3, True, "walk"),
    ],
)
def test_every_road_leads_to_what_exact_arithmetic_finds(experts, k, dims, is_affine, road):
    generator = np.random.default_rng(experts + k + dims)
    weight = generator.standard_normal((experts, dims))
    bias = generator.standard_normal(experts) if is_affine else None
    found = enumerate_cells(weight, bias, k)
    assert isinstance(found, Enumeration)
    assert found.road == road
    exact = exact_cells(weight, bias, k)
    assert rows(found) == expert_sets(exact)
    assert pairs(found) == {
        frozenset((tuple(sorted(a)), tuple(sorted(b)))) for a, b in exact.facets
    }
    bounded = [cell not in exact.unbounded for cell in sorted(exact.cells, key=sorted)]
    assert found.is_bounded.tolist() == bounded
    assert_inside(found, weight, bias, k)


def test_columns_that_depend_on_others_change_no_cell():
    generator = np.random.default_rng(4)
    weight = generator.integers(-4, 5, (9, 2)).astype(np.float64)
    bias = generator.standard_normal(9)
    wide = np.column_stack([weight, weight @ [1.0, 2.0], np.ones(9)])
    narrow, found = enumerate_cells(weight, bias, 3), enumerate_cells(wide, bias, 3)
    assert isinstance(found, Enumeration)
    assert isinstance(narrow, Enumeration)
    assert rows(found) == rows(narrow)
    assert pairs(found) == pairs(narrow)
    assert not found.is_bounded.any()
    assert_inside(found, wide, bias, 3)


def test_sums_over_k_are_those_of_the_whole_arrangement():
    # docs/theory.md G1: affine sum_{k=0}^{E} N_k = sum_{i <= d + 1} C(E, i)
    generator = np.random.default_rng(6)
    weight, bias = generator.standard_normal((9, 3)), generator.standard_normal(9)
    counts = [len(rows(enumerate_cells(weight, bias, k))) for k in range(1, 10)]
    assert 1 + sum(counts) == 1 + 9 + 36 + 84 + 126
    # central: 2 sum_{i <= d} C(E - 1, i)
    counts = [len(rows(enumerate_cells(weight, None, k))) for k in range(1, 10)]
    assert 1 + sum(counts) == 2 * (1 + 8 + 28 + 56)


def test_rank_one_less_than_experts_is_said_and_not_counted():
    generator = np.random.default_rng(0)
    found = enumerate_cells(generator.standard_normal((64, 200)), None, 8)
    assert isinstance(found, AllSubsets)
    assert found.num_cells == 4426165368
    assert found.num_facets == 4426165368 * 8 * 56 // 2


def test_a_central_router_on_a_line_has_its_facet_at_zero():
    weight = np.array([[3.0], [1.0], [-2.0]])
    found = enumerate_cells(weight, None, 1)
    assert rows(found) == [(0,), (2,)]
    assert found.facets.tolist() == [[0, 1]]
    assert len(exact_cells(weight, None, 1).facets) == 1


def test_threads_change_nothing():
    generator = np.random.default_rng(8)
    weight, bias = generator.standard_normal((40, 4)), generator.standard_normal(40)
    one = enumerate_cells(weight, bias, 5)
    two = enumerate_cells(weight, bias, 5, threads=2)
    assert isinstance(one, Enumeration)
    assert isinstance(two, Enumeration)
    assert one.num_vertices > 1024
    np.testing.assert_array_equal(one.expert_set, two.expert_set)
    np.testing.assert_array_equal(one.facets, two.facets)


def test_a_budget_of_vertices_leaves_no_cells_and_says_so():
    generator = np.random.default_rng(1)
    weight, bias = generator.standard_normal((32, 3)), generator.standard_normal(32)
    for offset in (bias, None):
        found = enumerate_cells(weight, offset, 4, most=50)
        assert isinstance(found, Enumeration)
        assert not found.is_whole
        assert len(found.expert_set) == 0


def test_equal_rows_have_one_cell_and_none_on_a_tie():
    weight = np.ones((4, 3))
    assert rows(enumerate_cells(weight, np.array([3.0, 1.0, 2.0, 0.0]), 2)) == [(0, 2)]
    assert rows(enumerate_cells(weight, np.array([3.0, 1.0, 1.0, 0.0]), 2)) == []
    broken = enumerate_cells(weight, np.array([3.0, 1.0, 1.0, 0.0]), 2, tie_broken=True)
    assert rows(broken) == [(0, 1)]
    assert rows(enumerate_cells(weight, None, 4)) == [(0, 1, 2, 3)]


@pytest.mark.parametrize("k", [0, 5])
def test_top_k_outside_the_experts_is_refused(k):
    with pytest.raises(ValueError, match="of 4 experts"):
        enumerate_cells(np.ones((4, 2)), None, k)


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        enumerate_cells(np.array([[1.0], [np.nan]]), None, 1)
