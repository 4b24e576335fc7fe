"""Functions around cells against enumerations, other libraries and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.sparse.csgraph import floyd_warshall, shortest_path
from scipy.stats import binom

from moegeom.geometry.solid_angles import sampled_angles, shares_of
from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from moegeom.studies.cells.graph.facet_graph import facet_graph, swaps
from moegeom.studies.cells.graph.visited_graph import visited_graph
from tests.oracle.exact_angles import exact_angles

PLENTY = 10**6


def router(experts, dims, seed):
    random = np.random.default_rng(seed)
    return random.standard_normal((experts, dims)), random.standard_normal(experts)


def as_arrays(found, k):
    """Cells and facets of the exact reference as arrays."""
    cells = expert_sets(found)
    place = {cell: number for number, cell in enumerate(cells)}
    facets = [[place[tuple(sorted(side))] for side in pair] for pair in found.facets]
    return np.array(cells).reshape(-1, k), np.array(facets, np.int64).reshape(-1, 2)


# ------------------------------------------------------------------------------------- facet graph
@pytest.mark.parametrize(("experts", "k", "dims"), [(8, 2, 2), (8, 3, 3), (6, 3, 5), (7, 2, 1)])
def test_the_diameter_and_the_degrees_are_those_of_all_pairs(experts, k, dims):
    cells, facets = as_arrays(exact_cells(*router(experts, dims, experts), k), k)
    matrix = np.zeros((len(cells), len(cells)))
    matrix[facets[:, 0], facets[:, 1]] = 1
    steps = floyd_warshall(matrix, directed=False, unweighted=True)
    degree = (matrix + matrix.T).sum(axis=0)
    found = facet_graph(len(cells), facets)
    assert found.diameter == steps.max()
    assert found.is_diameter_exact
    assert (found.num_cells, found.num_facets, found.num_components) == (len(cells), len(facets), 1)
    assert (found.degree_min, found.degree_max) == (degree.min(), degree.max())
    assert found.degree_mean == degree.mean()
    bound = facet_graph(len(cells), facets, most_passed=len(facets))
    assert not bound.is_diameter_exact
    assert found.diameter / 2 <= bound.diameter <= found.diameter


def test_the_diameter_of_a_path_is_found_at_its_ends():
    path = np.stack([np.arange(199), np.arange(1, 200)], axis=1)
    found = facet_graph(200, path)
    assert (found.diameter, found.degree_min, found.degree_max) == (199, 1, 2)
    assert facet_graph(200, path, most_passed=10).diameter == 199


@pytest.mark.parametrize("cells", [65, 300, 700])
@pytest.mark.parametrize("degree", [0.8, 1.5, 3.0, 12.0])
def test_the_diameter_of_random_graphs_in_pieces_is_that_of_all_pairs(cells, degree):
    """Sparse ones have long arms and fall into pieces, of dense ones most cells are searched."""
    random = np.random.default_rng(cells)
    facets = np.unique(np.sort(random.integers(0, cells, (int(degree * cells), 2))), axis=0)
    facets = facets[facets[:, 0] < facets[:, 1]]
    matrix = np.zeros((cells, cells))
    matrix[facets[:, 0], facets[:, 1]] = 1
    steps = shortest_path(matrix, directed=False, unweighted=True)
    found = facet_graph(cells, facets)
    assert found.is_diameter_exact
    assert found.diameter == steps[np.isfinite(steps)].max()
    for most_passed in (10, 10 * len(facets), 50 * len(facets)):
        bound = facet_graph(cells, facets, most_passed)
        assert bound.diameter <= found.diameter
        assert bound.diameter == found.diameter or not bound.is_diameter_exact


def test_pieces_and_facets_of_several_swaps_are_counted():
    cells = np.array([[0, 1], [0, 2], [2, 3], [4, 5], [6, 7]])
    facets = np.array([[0, 1], [1, 2], [0, 2]])
    found = facet_graph(len(cells), facets)
    assert (found.num_components, found.largest_component, found.diameter) == (3, 3, 1)
    swapped = swaps(cells, facets)
    assert swapped.num.tolist() == [1, 1, 2]
    assert (swapped.out.tolist(), swapped.into.tolist()) == ([1, 0, 0, 1], [2, 3, 2, 3])
    assert [part.tolist() for part in swapped.first] == [[1, 0, 0], [2, 3, 2]]
    lonely = facet_graph(1, facets[:0])
    assert (lonely.diameter, lonely.degree_mean) == (0, 0.0)
    with pytest.raises(ValueError, match="no cells"):
        facet_graph(0, facets[:0])


def test_the_diameter_of_all_subsets_is_that_of_the_johnson_graph():
    cells, facets = as_arrays(exact_cells(*router(7, 6, 0), 3), 3)
    assert facet_graph(len(cells), facets).diameter == 3


# ------------------------------------------------------------------------------------ solid angles
@pytest.mark.parametrize(("experts", "k", "dims"), [(3, 1, 2), (9, 3, 2), (40, 6, 2), (5, 2, 1)])
def test_arcs_are_the_shares_of_directions_and_sum_to_one(experts, k, dims):
    weight, _ = router(experts, dims, experts)
    exact, sampled = exact_angles(weight, k), sampled_angles(weight, k, 400_000, seed=1)
    np.testing.assert_allclose(exact.share.sum(), 1.0, 1e-14)
    assert sorted(map(tuple, exact.expert_set.tolist())) == expert_sets(
        exact_cells(weight, None, k)
    )
    share = shares_of(sampled, exact.expert_set)
    assert (share == 0.0).sum() == len(exact.share) - len(sampled.share)
    sigma = np.sqrt(exact.share * (1 - exact.share) / 400_000)
    assert np.all(np.abs(share - exact.share) <= 5 * sigma)
    np.testing.assert_allclose(
        sampled.standard_error, sigma[np.isin(share, sampled.share) & (share > 0)], 0.2
    )


def test_three_rows_at_equal_angles_take_a_third_each_and_thin_arcs_keep_their_digits():
    turns = 2 * np.pi * np.arange(3) / 3
    weight = np.column_stack([np.cos(turns), np.sin(turns)])
    np.testing.assert_allclose(exact_angles(weight, 1).share, [1 / 3] * 3, 1e-14)
    # at y = 1 expert 0 is first up to x = 2^-60, 1 up to 2^-60 + 2^-80, then 2; at y = -1 1 never is
    sliver = np.array([[0.0, 0.0], [1.0, -(2.0**-60)], [2.0, -(2.0**-59) - 2.0**-80]])
    found = exact_angles(sliver, 1)
    assert found.expert_set[:, 0].tolist() == [0, 1, 2]
    np.testing.assert_allclose(found.share[1], 2.0**-80 / 2 / np.pi, 1e-14)
    np.testing.assert_allclose(found.share.sum(), 1.0, 1e-15)


def test_equal_rows_are_told_apart_by_number_in_both_ways_of_counting():
    weight, _ = router(6, 2, 5)
    weight[4] = weight[1]
    exact, sampled = exact_angles(weight, 2), sampled_angles(weight, 2, 50_000, seed=3)
    assert not any(4 in cell and 1 not in cell for cell in exact.expert_set.tolist())
    assert set(map(tuple, sampled.expert_set.tolist())) <= set(
        map(tuple, exact.expert_set.tolist())
    )
    assert shares_of(exact, np.array([[4, 5]])) == 0.0


def test_samples_do_not_depend_on_the_batch_and_orthants_are_equal():
    weight = np.eye(4)
    found = sampled_angles(weight, 1, 40_000, seed=2, batch=999)
    again = sampled_angles(weight, 1, 40_000, seed=2)
    np.testing.assert_array_equal(found.share, again.share)
    np.testing.assert_allclose(found.share, 0.25, 0, 5 * math.sqrt(0.25 * 0.75 / 40_000))
    # a share of ``unseen`` is missed by all samples one time in twenty
    np.testing.assert_allclose(binom.pmf(0, 40_000, found.unseen), 0.05, 1e-9)


def test_what_has_no_angles_is_refused():
    with pytest.raises(ValueError, match="3 dimensions"):
        exact_angles(np.eye(3), 1)
    with pytest.raises(ValueError, match="top_k 3 of 2"):
        exact_angles(np.eye(2), 3)
    with pytest.raises(ValueError, match="0 directions"):
        sampled_angles(np.eye(2), 1, 0, seed=0)
    assert exact_angles(np.eye(2), 2).share.tolist() == [1.0]


# --------------------------------------------------------------------------- visited expert sets
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(300, 9, 3), (300, 40, 2), (50, 6, 1), (400, 16, 6), (1, 5, 2)]
)
def test_neighbours_and_pieces_are_those_of_all_pairs(tokens, experts, k):
    random = np.random.default_rng(experts)
    chosen = np.array([random.permutation(experts)[:k] for _ in range(tokens)])
    found = visited_graph(chosen)
    sets = [frozenset(row) for row in found.expert_set.tolist()]
    wanted = [
        [i, j]
        for i, j in itertools.combinations(range(len(sets)), 2)
        if len(sets[i] & sets[j]) == k - 1
    ]
    assert found.num_edges == len(wanted)
    degree = np.bincount(np.array(wanted, int).reshape(-1), minlength=len(sets))
    np.testing.assert_array_equal(found.degree, degree)
    label = list(range(len(sets)))
    for i, j in wanted:
        label = [label[i] if x == label[j] else x for x in label]
    assert len({*zip(label, found.component.tolist(), strict=True)}) == len(set(label))
    assert found.num_components == len(set(label))
    counted = [sum(frozenset(row) == some for row in chosen.tolist()) for some in sets]
    assert found.tokens.tolist() == counted
    per_piece = np.bincount(found.component, weights=found.tokens)
    assert (np.diff(per_piece) <= 0).all()
    assert found.largest_share == per_piece[0] / tokens
    assert found.is_whole


def test_beyond_the_limit_the_most_visited_expert_sets_stay():
    chosen = np.array([[0, 1], [2, 3], [1, 0], [4, 5], [5, 4], [0, 2], [2, 3], [3, 2]])
    found = visited_graph(chosen, most_slots=4)
    assert found.expert_set.tolist() == [[0, 1], [2, 3]]
    assert found.tokens.tolist() == [2, 3]
    assert (found.num_expert_sets, found.num_tokens, found.is_whole) == (4, 8, False)
    assert found.num_components == 2  # [0, 2], which joins them, is left out
    assert found.largest_share == 3 / 8
    assert visited_graph(chosen).num_components == 2


def test_no_tokens_visit_nothing():
    found = visited_graph(np.empty((0, 3), np.int32))
    assert (found.num_components, found.num_edges, found.num_expert_sets) == (0, 0, 0)
    assert np.isnan(found.largest_share)
