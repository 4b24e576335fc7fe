"""The walk in certified float64 finds what the walk in exact arithmetic finds, vertex by vertex."""

import itertools

import numpy as np
import pytest

from moegeom.routing_cells.exact.dictionary import Arrangement, dictionary
from moegeom.routing_cells.walk import _level_diagram, _level_vertex
from moegeom.routing_cells.walk.enumeration import (
    Enumeration,
    enumerate_cells,
    experts_of,
    masks_of,
)
from moegeom.routing_cells.walk.level_walk import Walked, level_walk
from tests.oracle.exact_cells import exact_walk, independent_columns
from tests.oracle.helpers import INSTANCES, PLENTY, arrays, digest, in_fractions, router


def fractions(weight: np.ndarray, bias: np.ndarray) -> Arrangement:
    return Arrangement(in_fractions(weight), in_fractions(bias))


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
    cells = set()
    for on, above in zip(walked.on.tolist(), masks_of(walked.bits), strict=True):
        over = list(experts_of(above))
        for some in itertools.combinations(on, k - len(over)):
            cells.add(tuple(sorted([*over, *some])))
    return sorted(cells)


@pytest.mark.parametrize("instance", WALKED, ids=lambda instance: instance["name"])
def test_cells_are_those_of_the_exact_walk_and_the_certified_ones(instance):
    weight, bias = arrays(instance)
    walked = level_walk(weight, bias, instance["k"], PLENTY)
    assert walked.is_whole
    cells = cells_of(walked, instance["k"])
    if walked.num_exact == 0:
        assert digest(cells) == instance["cells_sha1"]
        assert walked.gap > 1.0
    if instance["E"] <= 12:
        exact = exact_walk(fractions(weight, bias), instance["k"])
        assert len(walked.on) == exact.num_vertices
        assert cells == sorted(tuple(sorted(cell)) for cell in exact.cells)


def test_every_link_is_the_edge_that_exact_arithmetic_shoots():
    weight, bias = router(10, 3, 2)
    walked = level_walk(weight, bias, 4, PLENTY)
    for vertex, on in enumerate(walked.on.tolist()):
        exact = dictionary(fractions(weight, bias), on)
        assert exact is not None
        assert exact.above == frozenset(experts_of(masks_of(walked.bits[[vertex]])[0]))
        for edge, end in enumerate(walked.links[vertex].tolist()):
            if end == -1:
                continue
            met = exact.shot(edge // 2, edge % 2 == 1)
            if end == -2:
                assert met is None
            else:
                assert set(walked.on[end].tolist()) == {*on, met} - {on[edge // 2]}


def test_kernels_are_compiled_for_all_numbers_of_dimensions_at_once():
    for dims in (2, 3, 4):
        assert isinstance(enumerate_cells(*router(9, dims, 6), 3), Enumeration)
    kernels = [_level_vertex.advance, _level_vertex.check_links, _level_diagram.gather_cells]
    kernels += [_level_diagram.gather_facets, _level_diagram.gather_open_facets]
    assert [len(kernel.signatures) for kernel in kernels] == [1] * len(kernels)


def test_a_budget_ends_the_walk_and_says_so():
    weight, bias = router(32, 3, 1)
    part = level_walk(weight, bias, 4, 100)
    assert [level_walk(weight, bias, 4, PLENTY).is_whole, part.is_whole] == [True, False]
    assert len(part.on) <= 100
