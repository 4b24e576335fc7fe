"""Functions around cells against enumerations, other libraries and closed forms."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse.csgraph import floyd_warshall
from scipy.spatial import ConvexHull
from scipy.stats import binom

from moegeom.geometry.capacity.hypersimplex import kset_vertices, largest_sum
from moegeom.geometry.solid_angles import sampled_angles, shares_of
from moegeom.studies.cells.exact.collected import collected
from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from moegeom.studies.cells.exact.recession import (
    BOUNDED,
    THIN,
    WIDE,
    bias_order,
    cone_kinds,
    ray_generators,
    recession_cones,
)
from moegeom.studies.cells.graph.facet_graph import facet_graph, is_one_swap
from moegeom.studies.cells.graph.visited_graph import visited_graph
from moegeom.studies.cells.walk.level_walk import level_walk
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
    found = facet_graph(cells, facets)
    assert found.diameter == steps.max()
    assert found.is_diameter_exact
    assert (found.num_cells, found.num_facets, found.num_components) == (len(cells), len(facets), 1)
    assert (found.degree_min, found.degree_max) == (degree.min(), degree.max())
    assert found.degree_mean == degree.mean()
    assert found.one_swap_share == 1.0
    bound = facet_graph(cells, facets, most_searched=1)
    assert not bound.is_diameter_exact
    assert found.diameter / 2 <= bound.diameter <= found.diameter


def test_the_diameter_needs_words_of_more_than_64_cells():
    path = np.stack([np.arange(199), np.arange(1, 200)], axis=1)
    cells = np.arange(200)[:, None]
    found = facet_graph(cells, path)
    assert (found.diameter, found.degree_min, found.degree_max) == (199, 1, 2)
    assert facet_graph(cells, path, most_searched=10).diameter == 199


def test_pieces_and_facets_of_several_swaps_are_counted():
    cells = np.array([[0, 1], [0, 2], [2, 3], [4, 5], [6, 7]])
    facets = np.array([[0, 1], [1, 2], [0, 2]])
    found = facet_graph(cells, facets)
    assert (found.num_components, found.largest_component, found.diameter) == (3, 3, 1)
    assert is_one_swap(cells, facets).tolist() == [True, True, False]
    assert found.one_swap_share == 2 / 3
    lonely = facet_graph(cells[:1], facets[:0])
    assert (lonely.diameter, lonely.degree_mean) == (0, 0.0)
    assert np.isnan(lonely.one_swap_share)
    with pytest.raises(ValueError, match="no cells"):
        facet_graph(cells[:0], facets[:0])


def test_the_diameter_of_all_subsets_is_that_of_the_johnson_graph():
    cells, facets = as_arrays(exact_cells(*router(7, 6, 0), 3), 3)
    assert facet_graph(cells, facets).diameter == 3


# ---------------------------------------------------------------------------------- k-set polytope
@pytest.mark.parametrize(("experts", "k", "dims"), [(8, 2, 2), (7, 3, 2), (7, 3, 3), (6, 4, 3)])
def test_vertices_are_those_of_the_hull_of_all_sums(experts, k, dims):
    weight, bias = router(experts, dims, 10 + experts)
    subsets = np.array(list(itertools.combinations(range(experts), k)))
    sums = np.column_stack([weight, bias])[subsets].sum(axis=1)
    hull = {tuple(subsets[number].tolist()) for number in ConvexHull(sums).vertices}
    above = set(expert_sets(exact_cells(weight, bias, k)))
    below = set(expert_sets(exact_cells(weight, -bias, k)))
    assert hull == above | below
    cells = np.array(sorted(above))
    np.testing.assert_allclose(
        kset_vertices(cells, weight, bias), np.column_stack([weight, bias])[cells].sum(1), 1e-14
    )


@pytest.mark.parametrize("k", [1, 3])
def test_vertices_without_bias_are_the_central_cells(k):
    weight, _ = router(8, 3, 3)
    subsets = np.array(list(itertools.combinations(range(8), k)))
    hull = ConvexHull(weight[subsets].sum(axis=1)).vertices
    cells, facets = as_arrays(exact_cells(weight, None, k), k)
    assert sorted(map(tuple, subsets[hull].tolist())) == sorted(map(tuple, cells.tolist()))
    if k == 1:  # facets are the edges: E = V + F - 2 with triangles only
        assert len(facets) == 3 * len(cells) - 6


@pytest.mark.parametrize(("dims", "is_central"), [(2, False), (3, False), (3, True)])
def test_the_largest_vertex_is_the_sum_of_the_largest_logits(dims, is_central):
    weight, bias = router(9, dims, dims)
    own = None if is_central else bias
    cells, _ = as_arrays(exact_cells(weight, own, 3), 3)
    x = np.random.default_rng(1).standard_normal((500, dims)) * 3
    logits = x @ weight.T + (0.0 if is_central else bias)
    wanted = np.sort(logits, axis=1)[:, -3:].sum(axis=1)
    found = largest_sum(kset_vertices(cells, weight, own), x)
    np.testing.assert_allclose(found, wanted, 0, 1e-13)
    short = largest_sum(kset_vertices(cells[1:], weight, own), x)
    assert (short < wanted - 1e-9).any()


# --------------------------------------------------------------------------------- recession cones
def widest(weight, cell, is_wide):
    """By linear programs: whether some direction, or a whole ball of them, never leaves the cell."""
    rest = [j for j in range(len(weight)) if j not in cell]
    rows = np.array([weight[j] - weight[i] for i in cell for j in rest])
    dims, best = weight.shape[1], 0.0
    if is_wide:
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        cost = np.append(np.zeros(dims), -1.0)
        found = linprog(cost, np.hstack([rows, norms]), np.zeros(len(rows)), bounds=(-1, 1))
        return -found.fun > 1e-9
    for axis, sign in itertools.product(range(dims), (1, -1)):
        found = linprog(-sign * np.eye(dims)[axis], rows, np.zeros(len(rows)), bounds=(-1, 1))
        best = max(best, -found.fun)
    return best > 1e-9


@pytest.mark.parametrize(
    ("experts", "k", "dims"), [(7, 2, 2), (7, 3, 3), (6, 2, 1), (5, 2, 4), (5, 2, 6), (4, 4, 2)]
)
def test_cones_are_those_of_linear_programs_and_wide_ones_are_central_cells(experts, k, dims):
    weight, bias = router(experts, dims, experts + dims)
    cones, cells = recession_cones(weight, bias, k), exact_cells(weight, bias, k)
    central = exact_cells(weight, None, k).cells
    assert list(cones) == list(cells.cells)
    assert {cell for cell, cone in cones.items() if cone.dimension == dims} == set(central)
    assert {cell for cell, cone in cones.items() if cone.dimension} == cells.unbounded
    if k == experts:
        return
    for cell, cone in cones.items():
        assert widest(weight, cell, is_wide=False) == (cone.dimension > 0)
        assert widest(weight, cell, is_wide=True) == (cone.dimension == dims)


def never_leaves(weight, cell, direction):
    rates = [
        sum((Fraction(w) * v for w, v in zip(row, direction, strict=True)), Fraction(0))
        for row in weight.tolist()
    ]
    return min(rates[i] for i in cell) >= max(
        (rate for j, rate in enumerate(rates) if j not in cell), default=min(rates)
    )


def test_generators_of_degenerate_rows_never_leave_and_lines_go_both_ways():
    random = np.random.default_rng(4)
    weight = random.integers(-5, 6, (6, 3)).astype(float)
    weight[:, 2] = weight[:, 0] + 2 * weight[:, 1] + 7  # differences of rank 2
    weight[3] = weight[1]
    bias = random.integers(-3, 4, 6).astype(float)
    cones = recession_cones(weight, bias, 2)
    (line,) = next(iter(cones.values())).lines
    assert any(line)
    assert {cone.dimension for cone in cones.values()} <= {1, 2, 3}
    for cell, cone in cones.items():
        for ray in (*cone.rays, line, tuple(-value for value in line)):
            assert never_leaves(weight, cell, ray)
    order = bias_order(bias)
    ranked = exact_cells(weight[order], None, 2, tie_broken=True).cells
    wide = {frozenset(order[list(cell)].tolist()) for cell in ranked}
    assert {cell for cell, cone in cones.items() if cone.dimension == 3} == wide & set(cones)
    assert any({1, 3} & cell and not {1, 3} <= cell for cell in wide)


@pytest.mark.parametrize(("experts", "k", "dims"), [(9, 3, 2), (9, 2, 3), (12, 4, 3), (8, 3, 4)])
def test_kinds_and_rays_of_the_walk_are_those_of_the_exact_cones(experts, k, dims):
    weight, bias = router(experts, dims, 20 + experts)
    walked = level_walk(weight, bias, k, PLENTY)
    assert walked is not None
    found = collected(walked.on, walked.above, walked.is_simple, walked.rays, weight, bias, k)
    central = np.array(expert_sets(exact_cells(weight, None, k)))
    cones = recession_cones(weight, bias, k)
    kinds = cone_kinds(found.expert_set, found.is_bounded, central)
    for cell, kind in zip(found.expert_set.tolist(), kinds, strict=True):
        dimension = cones[frozenset(cell)].dimension
        assert kind == (BOUNDED if dimension == 0 else WIDE if dimension == dims else THIN)
    assert THIN not in kinds  # rows in general position
    assert (kinds == WIDE).sum() == len(central)
    rays = ray_generators(walked.on, walked.above, walked.rays, weight, k)
    listed: dict = {}
    for cell, tied, direction in zip(
        rays.expert_set.tolist(), rays.tied, rays.direction, strict=True
    ):
        listed.setdefault(frozenset(cell), []).append(direction)
        level = weight[tied.astype(int)] @ direction
        np.testing.assert_allclose(level, level[0], 0, 1e-10)
    for cell, cone in cones.items():
        wanted = np.array([[float(value) for value in ray] for ray in cone.rays])
        own = np.array(listed.get(cell, []))
        assert len(own) == len(wanted)
        if len(own):
            wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
            distance = np.abs(own[:, None] - wanted[None]).max(axis=2)
            assert distance.min(axis=0).max() < 1e-10
            assert distance.min(axis=1).max() < 1e-10


def test_a_strip_between_parallel_facets_is_thin():
    weight = np.array([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, -3.0]])
    bias = np.array([0.0, 1.0, 0.0, 0.0])
    cones = recession_cones(weight, bias, 1)
    strip = cones[frozenset({1})]
    assert (strip.dimension, strip.rays, strip.lines) == (1, ((0, 1),), ())
    cells = np.arange(4)[:, None]
    central = np.array(expert_sets(exact_cells(weight, None, 1)))
    kinds = cone_kinds(cells, np.zeros(4, bool), central)
    assert kinds.tolist() == [WIDE, THIN, WIDE, WIDE]
    assert [cones[frozenset({i})].dimension for i in range(4)] == [2, 1, 2, 2]


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
