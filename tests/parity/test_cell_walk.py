"""The walk by levels against exact arithmetic."""

import numpy as np

from moegeom.routing_cells.exact.dictionary import Arrangement, dictionary
from moegeom.routing_cells.walk import _level_diagram, _level_vertex
from moegeom.routing_cells.walk.enumeration import (
    Enumeration,
    enumerate_cells,
    experts_of,
    masks_of,
)
from moegeom.routing_cells.walk.level_walk import level_walk
from tests.oracle.exact_cells import exact_walk
from tests.oracle.helpers import PLENTY, in_fractions, router


def fractions(weight: np.ndarray, bias: np.ndarray) -> Arrangement:
    return Arrangement(in_fractions(weight), in_fractions(bias))


def test_every_link_is_the_edge_that_exact_arithmetic_shoots():
    weight, bias = router(10, 3, 2)
    walked = level_walk(weight, bias, 4, PLENTY)
    assert len(walked.on) == exact_walk(fractions(weight, bias), 4).num_vertices
    assert walked.gap > 1.0
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
