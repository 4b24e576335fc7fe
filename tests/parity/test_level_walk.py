"""The walk in certified float64 finds what the walk in exact arithmetic finds, vertex by vertex."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from moegeom.studies.cells.exact.collected import collected
from moegeom.studies.cells.exact.dictionary import Arrangement, dictionary
from moegeom.studies.cells.exact.exact_cells import exact_cells
from moegeom.studies.cells.exact.exact_walk import exact_walk
from moegeom.studies.cells.exact.rank import independent_columns
from moegeom.studies.cells.walk import _level_diagram, _level_vertex
from moegeom.studies.cells.walk.enumeration import Enumeration, enumerate_cells
from moegeom.studies.cells.walk.level_walk import Walked, level_walk
from tests.oracle.test_cells_against_certified_instances import INSTANCES, arrays, digest


def fractions(weight: np.ndarray, bias: np.ndarray) -> Arrangement:
    rows = [[Fraction(value) for value in row] for row in weight.tolist()]
    return Arrangement(rows, [Fraction(value) for value in bias.tolist()])


def is_walked(instance) -> bool:
    """Affine, whole space, d >= 2, full rank and not all subsets: what the walk is for."""
    if instance["ball_radius"] is not None or not instance["affine"] or instance["d"] < 2:
        return False
    if instance["k"] == instance["E"] or instance["d"] >= instance["E"] - 1:
        return False
    weight, bias = arrays(instance)
    return len(independent_columns(fractions(weight, bias).weight)) == instance["d"]


WALKED = [instance for instance in INSTANCES if is_walked(instance)]


def drawn(seed: int, experts: int, dims: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((experts, dims)), generator.standard_normal(experts)


def walk_of(weight, bias, k: int, budget: int = 10**6) -> Walked:
    walked = level_walk(weight, bias, k, budget)
    assert walked is not None
    return walked


def cells_of(walked: Walked, k: int) -> list[tuple[int, ...]]:
    """Cells that meet at the vertices, ties broken."""
    cells = set()
    for on, above in zip(walked.on.tolist(), walked.above, strict=True):
        over = np.flatnonzero(above).tolist()
        for some in itertools.combinations(on, k - len(over)):
            cells.add(tuple(sorted([*over, *some])))
    return sorted(cells)


def diagram_of(weight, bias, k: int):
    walked = walk_of(weight, bias, k)
    return collected(walked.on, walked.above, walked.is_simple, walked.rays, weight, bias, k)


def exact_cells_of(weight, bias, k: int) -> list[tuple[int, ...]]:
    return sorted(tuple(sorted(cell)) for cell in exact_walk(fractions(weight, bias), k).cells)


@pytest.mark.parametrize("instance", WALKED, ids=lambda instance: instance["name"])
def test_cells_are_those_of_the_exact_walk_and_the_certified_ones(instance):
    weight, bias = arrays(instance)
    walked = walk_of(weight, bias, instance["k"])
    assert walked.is_whole
    cells = cells_of(walked, instance["k"])
    if walked.num_exact == 0:
        assert digest(cells) == instance["cells_sha1"]
        assert walked.gap > 1.0
    if instance["E"] <= 12:
        exact = exact_walk(fractions(weight, bias), instance["k"])
        assert len(walked.on) == exact.num_vertices
        assert cells == exact_cells_of(weight, bias, instance["k"])


@pytest.mark.parametrize(
    "instance",
    [i for i in WALKED if i["n_walls"] == i["n_swap_walls"] and not i["mods"]],
    ids=lambda instance: instance["name"],
)
def test_collected_cells_and_facets_are_the_certified_ones(instance):
    weight, bias = arrays(instance)
    diagram = diagram_of(weight, bias, instance["k"])
    cells = [tuple(row) for row in diagram.expert_set.tolist()]
    assert digest(cells) == instance["cells_sha1"]
    assert len(diagram.facets) == instance["n_walls"]
    assert diagram.is_proved.all()
    # a witness lies in its cell, and the two cells of a facet differ in what it says
    logits = diagram.witness @ weight.T + bias
    best = np.sort(np.argsort(-logits, axis=1)[:, : instance["k"]], axis=1)
    assert_array_equal(best, diagram.expert_set)
    facets = zip(diagram.facets, diagram.out, diagram.into, strict=True)
    for (one, other), out, into in facets:
        assert set(cells[one]) - set(cells[other]) == {out}
        assert set(cells[other]) - set(cells[one]) == {into}


def test_bounded_cells_are_those_without_a_ray():
    weight, bias = drawn(7, 10, 2)
    diagram = diagram_of(weight, bias, 3)
    unbounded = [tuple(row) for row in diagram.expert_set[~diagram.is_bounded].tolist()]
    exact = exact_cells(weight, bias, 3).unbounded
    assert unbounded == sorted(tuple(sorted(cell)) for cell in exact)


def test_every_link_is_the_edge_that_exact_arithmetic_shoots():
    weight, bias = drawn(2, 10, 3)
    walked = walk_of(weight, bias, 4)
    for vertex, on in enumerate(walked.on.tolist()):
        exact = dictionary(fractions(weight, bias), on)
        assert exact is not None
        assert exact.above == frozenset(np.flatnonzero(walked.above[vertex]).tolist())
        for edge, end in enumerate(walked.links[vertex].tolist()):
            if end == -1:
                continue
            met = exact.shot(edge // 2, edge % 2 == 1)
            if end == -2:
                assert met is None
            else:
                assert set(walked.on[end].tolist()) == {*on, met} - {on[edge // 2]}


def test_edges_lead_back_and_cells_satisfy_eulers_relation():
    weight, bias = drawn(5, 20, 2)
    for k in (1, 3, 10):
        walked = walk_of(weight, bias, k)
        for vertex, links in enumerate(walked.links.tolist()):
            assert all(vertex in walked.links[end] for end in links if end >= 0)
        num_rays = int((walked.links == -2).sum())
        num_edges = num_rays + int((walked.links >= 0).sum()) // 2
        # in the plane an edge of the diagram is a facet; V - E + F = 1 with rays to one point
        assert len(walked.on) - num_edges + len(cells_of(walked, k)) == 1


def test_kernels_are_compiled_for_all_numbers_of_dimensions_at_once():
    for dims in (2, 3, 4):
        assert isinstance(enumerate_cells(*drawn(6, 9, dims), 3), Enumeration)
    kernels = [_level_vertex.advance, _level_vertex.check_links, _level_diagram.gather_cells]
    kernels += [_level_diagram.gather_facets, _level_diagram.gather_open_facets]
    assert [len(kernel.signatures) for kernel in kernels] == [1] * len(kernels)


def test_a_budget_ends_the_walk_and_says_so():
    weight, bias = drawn(1, 32, 3)
    part = walk_of(weight, bias, 4, 100)
    assert [walk_of(weight, bias, 4).is_whole, part.is_whole] == [True, False]
    assert len(part.on) <= 100


def test_ties_of_integers_are_settled_exactly_and_nothing_else_is():
    generator = np.random.default_rng(3)
    weight = generator.integers(-3, 4, (9, 2)).astype(np.float64)
    bias = generator.integers(-3, 4, 9).astype(np.float64)
    tied = walk_of(weight, bias, 3)
    apart = walk_of(weight + 1e-3 * generator.standard_normal(weight.shape), bias, 3)
    assert tied.num_exact > 0 == apart.num_exact
    assert cells_of(tied, 3) == exact_cells_of(weight, bias, 3)
