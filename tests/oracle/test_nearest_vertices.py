"""Distances of facets from the vertices of a walk, against exact arithmetic."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from moegeom.studies.cells.ball import nearest_vertices as module
from moegeom.studies.cells.ball.ball_cells import facet_distances
from moegeom.studies.cells.ball.nearest import arrangement_of
from moegeom.studies.cells.ball.nearest_vertices import nearest_vertices
from moegeom.studies.cells.exact.exact_nearest import exact_nearest
from moegeom.studies.cells.graph.facet_graph import swaps
from moegeom.studies.cells.walk.enumeration import Enumeration, enumerate_cells

PLENTY = 10**6


class Diagram:
    """A router with all its cells and facets, and a centre."""

    def __init__(
        self,
        experts: int,
        k: int,
        d: int,
        away: float = 0.5,
        equal: int = 0,
        is_moved: bool = False,
    ) -> None:
        generator = np.random.default_rng(experts + d)
        self.weight = generator.standard_normal((experts, d))
        self.bias, self.d = generator.standard_normal(experts), d
        self.weight[:equal], self.bias[:equal] = self.weight[0], self.bias[0]
        self.centre = away * generator.standard_normal(d)
        if is_moved:
            self.bias -= self.weight @ self.centre
        found = enumerate_cells(self.weight, self.bias, k, most_simple=PLENTY)
        assert isinstance(found, Enumeration)
        assert found.simple is not None
        self.found, self.simple = found, found.simple
        self.swapped = swaps(found.expert_set, found.facets).first

    def brackets(self) -> np.ndarray:
        return nearest_vertices(
            self.weight, self.bias, self.found.expert_set, self.found.facets, self.centre,
            self.simple,
        )  # fmt: skip

    def exact(self, facet: int) -> tuple[Fraction, int]:
        """The square of the distance of a facet, and the experts on the level at its foot."""
        first, out = self.found.facets[facet, 0], int(self.swapped[0][facet])
        into, centre = int(self.swapped[1][facet]), [Fraction(c) for c in self.centre.tolist()]
        instance = arrangement_of(self.weight, self.bias)
        cell = frozenset(self.found.expert_set[first].tolist())
        nearest = exact_nearest(instance, cell, centre, (out, into))
        assert nearest.point is not None
        assert nearest.squared is not None
        logits = [
            sum((w * x for w, x in zip(row, nearest.point, strict=True)), offset)
            for row, offset in zip(instance.weight, instance.bias, strict=True)
        ]
        return nearest.squared, logits.count(logits[out])


@pytest.mark.parametrize(
    ("experts", "k", "d", "away"),
    [(12, 3, 2, 0.0), (12, 3, 2, 0.5), (10, 4, 3, 0.5), (9, 2, 4, 0.0), (9, 3, 5, 1.0)],
)
def test_a_facet_has_the_distance_of_a_vertex_just_where_its_foot_is_one(experts, k, d, away):
    diagram = Diagram(experts, k, d, away)
    found, num_found = diagram.brackets(), 0
    facets = range(0, len(found), max(1, len(found) // 150))
    for n in facets:
        squared, num_tied = diagram.exact(n)
        lower, upper = found[n].tolist()
        assert np.isfinite(upper) == (num_tied == d + 1)
        if num_tied == d + 1:
            num_found += 1
            assert Fraction(lower) ** 2 <= squared <= Fraction(upper) ** 2
            assert upper - lower <= 1e-9 * upper
    assert 0 < num_found < len(facets)


@pytest.mark.parametrize(
    ("options", "width"),
    [({"away": 1e7}, 1e-9), ({"equal": 2}, 1e-9), ({"away": 1e7, "is_moved": True}, 1e-5)],
    ids=["far centre", "equal experts", "all far away"],
)
def test_brackets_hold_the_exact_distance_where_rounding_is_large(options, width):
    diagram = Diagram(10, 3, 3, **options)
    found = diagram.brackets()
    some = np.flatnonzero(np.isfinite(found[:, 1]))
    assert len(some) > 20
    for n in some[::2].tolist():
        squared, _ = diagram.exact(n)
        lower, upper = found[n].tolist()
        assert Fraction(lower) ** 2 <= squared <= Fraction(upper) ** 2
        assert upper - lower <= width * upper


@pytest.mark.parametrize("is_whole", [True, False], ids=["all", "the first"])
@pytest.mark.parametrize("size", [1e-9, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("d", [2, 3])
def test_multipliers_prove_a_lower_bound_however_wrong_they_are(d, size, is_whole, monkeypatch):
    """Where their signs fit; those of no vertex and those that do not sum to 0 among them."""
    diagram = Diagram(10, 4, d)
    found = diagram.found
    given = diagram.weight, diagram.bias, found.expert_set, found.facets
    searched = facet_distances(*given, diagram.swapped, diagram.centre)
    generator, seen = np.random.default_rng(3), module.weighed

    def wrong(*given):
        right = seen(*given)
        noise = size * generator.standard_normal(right.multipliers.shape)
        noise[:, 1:] *= is_whole
        return replace(right, multipliers=right.multipliers + noise)

    monkeypatch.setattr(module, "weighed", wrong)
    num_wrong = 0
    for _ in range(20):
        bracket = diagram.brackets()
        assert (bracket[:, 0][np.isfinite(bracket[:, 1])] > 0.0).any()
        assert (searched[:, 0] <= bracket[:, 1]).all()
        some = np.isfinite(bracket[:, 1])
        assert (bracket[some, 0] <= searched[some, 1]).all()
        num_wrong += int((bracket[some, 1] > 1.01 * searched[some, 1]).sum())
    assert (num_wrong > 0) == (size > 0.1)


@pytest.mark.parametrize("away", [0.0, 0.5])
def test_brackets_with_and_without_vertices_hold_the_same_distance(away):
    diagram = Diagram(32, 5, 4, away)
    found = diagram.found
    given = (
        diagram.weight, diagram.bias, found.expert_set, found.facets, diagram.swapped,
        diagram.centre,
    )  # fmt: skip
    searched, seen = facet_distances(*given), facet_distances(*given, simple=diagram.simple)
    assert (np.maximum(searched[:, 0], seen[:, 0]) <= np.minimum(searched[:, 1], seen[:, 1])).all()
    is_seen = np.isfinite(diagram.brackets()[:, 1])
    np.testing.assert_array_equal(seen[~is_seen], searched[~is_seen])
    assert is_seen.mean() > 0.8
    # cells and facets that are not listed are left out, the others stay
    kept = np.arange(0, len(found.facets), 2)
    some = nearest_vertices(*given[:3], found.facets[kept], diagram.centre, diagram.simple)
    np.testing.assert_array_equal(some[is_seen[kept]], seen[kept][is_seen[kept]])


def test_vertices_are_kept_of_small_walks_alone():
    weight, bias = np.random.default_rng(0).standard_normal((2, 12, 3))[:, :, :3]
    for k, most, is_kept in [(3, PLENTY, True), (3, 10, False), (3, 0, False), (9, PLENTY, False)]:
        found = enumerate_cells(weight, bias[:, 0], k, most_simple=most)
        assert isinstance(found, Enumeration)
        assert (found.simple is not None) == is_kept
