"""The walk in certified float64 finds what the walk in exact arithmetic finds, vertex by vertex."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from moegeom.studies.cells.exact.collected import collected
from moegeom.studies.cells.exact.dictionary import Arrangement, dictionary
from moegeom.studies.cells.exact.exact_cells import exact_cells
from moegeom.studies.cells.exact.exact_walk import exact_walk
from moegeom.studies.cells.exact.rank import independent_columns
from moegeom.studies.cells.walk._level_diagram import (
    gather_cells,
    gather_facets,
    gather_open_facets,
)
from moegeom.studies.cells.walk._level_vertex import advance, check_links
from moegeom.studies.cells.walk.enumeration import Enumeration, enumerate_cells
from moegeom.studies.cells.walk.level_walk import Walked, level_walk
from tests.oracle.test_cells_against_certified_instances import INSTANCES, arrays, digest

PLENTY = 10**6


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


def cells_of(walked: Walked, k: int) -> list[tuple[int, ...]]:
    """Cells that meet at the vertices, ties broken."""
    found = set()
    for on, above in zip(walked.on.tolist(), walked.above, strict=True):
        over = np.flatnonzero(above).tolist()
        for some in itertools.combinations(on, k - len(over)):
            found.add(tuple(sorted([*over, *some])))
    return sorted(found)


@pytest.mark.parametrize("instance", WALKED, ids=lambda instance: instance["name"])
def test_cells_are_those_of_the_exact_walk_and_the_certified_ones(instance):
    weight, bias = arrays(instance)
    walked = level_walk(weight, bias, instance["k"], PLENTY)
    assert walked is not None
    assert walked.is_whole
    cells = cells_of(walked, instance["k"])
    if walked.num_exact == 0:
        assert digest(cells) == instance["cells_sha1"]
        assert walked.gap > 1.0
    if instance["E"] <= 12:
        diagram = exact_walk(fractions(weight, bias), instance["k"])
        assert len(walked.on) == diagram.num_vertices
        assert cells == sorted(tuple(sorted(cell)) for cell in diagram.cells)


@pytest.mark.parametrize(
    "instance",
    [i for i in WALKED if i["n_walls"] == i["n_swap_walls"] and not i["mods"]],
    ids=lambda instance: instance["name"],
)
def test_collected_cells_and_facets_are_the_certified_ones(instance):
    weight, bias = arrays(instance)
    walked = level_walk(weight, bias, instance["k"], PLENTY)
    assert walked is not None
    found = collected(
        walked.on, walked.above, walked.is_simple, walked.rays, weight, bias, instance["k"]
    )
    cells = [tuple(row) for row in found.expert_set.tolist()]
    assert digest(cells) == instance["cells_sha1"]
    assert len(found.facets) == instance["n_walls"]
    assert found.is_proved.all()
    # a witness lies in its cell, and the two cells of a facet differ in what it says
    logits = found.witness @ weight.T + bias
    best = np.sort(np.argsort(-logits, axis=1)[:, : instance["k"]], axis=1)
    np.testing.assert_array_equal(best, found.expert_set)
    for (one, other), out, into in zip(found.facets, found.out, found.into, strict=True):
        assert set(cells[one]) - set(cells[other]) == {out}
        assert set(cells[other]) - set(cells[one]) == {into}


def test_bounded_cells_are_those_without_a_ray():
    generator = np.random.default_rng(7)
    weight, bias = generator.standard_normal((10, 2)), generator.standard_normal(10)
    walked = level_walk(weight, bias, 3, PLENTY)
    assert walked is not None
    found = collected(walked.on, walked.above, walked.is_simple, walked.rays, weight, bias, 3)
    exact = exact_cells(weight, bias, 3)
    unbounded = [tuple(row) for row in found.expert_set[~found.is_bounded].tolist()]
    assert unbounded == sorted(tuple(sorted(cell)) for cell in exact.unbounded)


def test_every_link_is_the_edge_that_exact_arithmetic_shoots():
    generator = np.random.default_rng(2)
    weight, bias = generator.standard_normal((10, 3)), generator.standard_normal(10)
    walked = level_walk(weight, bias, 4, PLENTY)
    assert walked is not None
    for vertex, on in enumerate(walked.on.tolist()):
        found = dictionary(fractions(weight, bias), on)
        assert found is not None
        assert found.above == frozenset(np.flatnonzero(walked.above[vertex]).tolist())
        for edge, end in enumerate(walked.links[vertex].tolist()):
            if end == -1:
                continue
            met = found.shot(edge // 2, edge % 2 == 1)
            if end == -2:
                assert met is None
            else:
                assert set(walked.on[end].tolist()) == {*on, met} - {on[edge // 2]}


def test_edges_lead_back_and_cells_satisfy_eulers_relation():
    generator = np.random.default_rng(5)
    weight, bias = generator.standard_normal((20, 2)), generator.standard_normal(20)
    for k in (1, 3, 10):
        walked = level_walk(weight, bias, k, PLENTY)
        assert walked is not None
        for vertex, links in enumerate(walked.links.tolist()):
            assert all(vertex in walked.links[end] for end in links if end >= 0)
        num_rays = int((walked.links == -2).sum())
        num_edges = num_rays + int((walked.links >= 0).sum()) // 2
        # in the plane an edge of the diagram is a facet; V - E + F = 1 with rays to one point
        assert len(walked.on) - num_edges + len(cells_of(walked, k)) == 1


def test_kernels_are_compiled_for_all_numbers_of_dimensions_at_once():
    generator = np.random.default_rng(6)
    for dims in (2, 3, 4):
        assert isinstance(
            enumerate_cells(generator.standard_normal((9, dims)), generator.standard_normal(9), 3),
            Enumeration,
        )
    kernels = advance, check_links, gather_cells, gather_facets, gather_open_facets
    assert [len(kernel.signatures) for kernel in kernels] == [1] * len(kernels)


def test_a_budget_ends_the_walk_and_says_so():
    generator = np.random.default_rng(1)
    weight, bias = generator.standard_normal((32, 3)), generator.standard_normal(32)
    whole = level_walk(weight, bias, 4, PLENTY)
    part = level_walk(weight, bias, 4, 100)
    assert whole is not None
    assert part is not None
    assert whole.is_whole
    assert not part.is_whole
    assert len(part.on) <= 100


def test_ties_of_integers_are_settled_exactly_and_nothing_else_is():
    generator = np.random.default_rng(3)
    weight = generator.integers(-3, 4, (9, 2)).astype(np.float64)
    bias = generator.integers(-3, 4, 9).astype(np.float64)
    tied = level_walk(weight, bias, 3, PLENTY)
    apart = level_walk(weight + 1e-3 * generator.standard_normal(weight.shape), bias, 3, PLENTY)
    assert tied is not None
    assert apart is not None
    assert tied.num_exact > 0
    assert apart.num_exact == 0
    assert cells_of(tied, 3) == sorted(
        tuple(sorted(cell)) for cell in exact_walk(fractions(weight, bias), 3).cells
    )
