"""Cells of a ball against certified instances, the walk over the whole space, and exact cells."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from moegeom.studies.cells.ball.ball_cells import (
    ball_cells,
    cells_within_hops,
    facet_distances,
    filter_ball,
)
from moegeom.studies.cells.ball.nearest import arrangement_of
from moegeom.studies.cells.exact.collected import collected
from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from moegeom.studies.cells.exact.exact_nearest import exact_nearest
from moegeom.studies.cells.walk.level_walk import level_walk
from tests.oracle.test_cells_against_certified_instances import INSTANCES, arrays, digest

PLENTY = 10**6

BALLS = [instance for instance in INSTANCES if instance["ball_radius"] is not None]
DEGENERATE = [
    instance
    for instance in INSTANCES
    if instance["mods"] and instance["ball_radius"] is None and instance["E"] <= 10
]


def router(experts: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((experts, d)), generator.standard_normal(experts)


def walked(weight: np.ndarray, bias: np.ndarray, k: int):
    """All cells and facets of the whole space."""
    found = level_walk(weight, bias, k, PLENTY)
    assert found is not None
    assert found.is_whole
    return collected(found.on, found.above, found.is_simple, found.rays, weight, bias, k)


def named(cells) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Facets by the experts of both cells."""
    rows = [tuple(row) for row in cells.expert_set.tolist()]
    return {(rows[one], rows[other]) for one, other in cells.facets.tolist()}


@pytest.mark.parametrize("instance", BALLS, ids=lambda instance: instance["name"])
def test_cells_and_facets_of_a_ball_are_the_certified_ones(instance):
    weight, bias = arrays(instance)
    bias = np.zeros(len(weight)) if bias is None else bias
    centre = np.zeros(weight.shape[1])
    found = ball_cells(weight, bias, instance["k"], centre, instance["ball_radius"], PLENTY)
    assert found.is_whole
    assert digest([tuple(row) for row in found.expert_set.tolist()]) == instance["cells_sha1"]
    assert len(found.facets) == instance["n_walls"]
    assert found.gap <= instance["ball_gap"] or instance["ball_gap"] == 1.0


@pytest.mark.parametrize(
    ("experts", "k", "d", "radius", "cells", "facets"),
    [(64, 8, 3, 0.5, 96, 427), (64, 8, 3, 1.0, 429, 2157), (32, 4, 4, 0.6, None, None)],
)
def test_the_search_finds_what_the_walk_and_the_filter_find(experts, k, d, radius, cells, facets):
    weight, bias = router(experts, d)
    centre = np.zeros(d)
    found = ball_cells(weight, bias, k, centre, radius, PLENTY)
    whole = walked(weight, bias, k)
    met = filter_ball(
        weight, bias, whole.expert_set, whole.facets, whole.out, whole.into, centre, radius
    )
    np.testing.assert_array_equal(found.expert_set, whole.expert_set[met.cells])
    place, kept = np.cumsum(met.cells) - 1, np.flatnonzero(met.facets)
    theirs = place[whole.facets[kept]]
    order = np.lexsort(theirs.T[::-1])
    kept = kept[order]
    np.testing.assert_array_equal(found.facets, theirs[order])
    np.testing.assert_array_equal(found.out, whole.out[kept])
    np.testing.assert_array_equal(found.into, whole.into[kept])
    if cells is not None:
        assert (len(found.expert_set), len(found.facets)) == (cells, facets)
    # both brackets hold the same number
    assert (found.distance_lower <= met.cell_upper[met.cells]).all()
    assert (met.cell_lower[met.cells] <= found.distance_upper).all()
    assert (found.facet_distance_lower <= met.facet_upper[kept]).all()
    assert (met.facet_lower[kept] <= found.facet_distance_upper).all()
    assert (found.distance_upper < radius).all()
    assert (met.cell_lower[~met.cells] >= radius).all()
    assert found.num_exact == 0


@pytest.mark.parametrize("seed", range(6))
def test_every_bracket_holds_the_exact_distance_and_every_point_its_cell(seed):
    generator = np.random.default_rng(100 + seed)
    experts, k, d = 10, 3, 2 + seed % 3
    weight, bias = generator.standard_normal((experts, d)), generator.standard_normal(experts)
    centre = generator.standard_normal(d)
    found = ball_cells(weight, bias, k, centre, 1.5, PLENTY)
    exact, point = arrangement_of(weight, bias), [Fraction(c) for c in centre.tolist()]

    def check(expert_set, exchanged, lower, upper):
        squared = exact_nearest(exact, frozenset(expert_set), point, exchanged).squared
        assert squared is not None
        assert Fraction(lower) ** 2 <= squared <= Fraction(upper) ** 2
        assert squared < Fraction(9, 4)
        assert upper - lower <= 1e-7 * upper

    for n, expert_set in enumerate(found.expert_set.tolist()):
        check(expert_set, None, found.distance_lower[n], found.distance_upper[n])
        logits = weight @ found.nearest[n] + bias
        assert set(np.argsort(-logits)[:k]) == set(expert_set)
    for n, (one, _) in enumerate(found.facets.tolist()):
        pair = int(found.out[n]), int(found.into[n])
        bracket = found.facet_distance_lower[n], found.facet_distance_upper[n]
        check(found.expert_set[one].tolist(), pair, *bracket)
    inside = centre + generator.standard_normal((4000, d)) * 0.5
    inside = inside[np.linalg.norm(inside - centre, axis=1) < 1.5]
    seen = np.sort(np.argsort(-(inside @ weight.T + bias), axis=1)[:, :k], axis=1)
    assert {tuple(row) for row in seen.tolist()} <= {tuple(r) for r in found.expert_set.tolist()}


def test_facets_have_one_distance_on_any_number_of_threads():
    weight, bias = router(64, 3)
    cells = walked(weight, bias, 8)
    given = weight, bias, cells.expert_set, cells.facets, (cells.out, cells.into), np.ones(3)
    found = facet_distances(*given)
    assert len(found) > 3 * 4096
    np.testing.assert_array_equal(found, facet_distances(*given, threads=3))
    met = filter_ball(*given[:4], cells.out, cells.into, np.ones(3), np.inf)
    np.testing.assert_array_equal(found, np.stack([met.facet_lower, met.facet_upper], axis=1))


@pytest.mark.parametrize("shift", [0.0, 0.25])
def test_cones_are_nowhere_away_from_their_tip(shift):
    """Also where the tip is not at 0, of which only exact arithmetic knows."""
    weight, tip = np.round(4.0 * router(9, 3)[0]), np.array([shift, -shift, 2.0 * shift])
    bias = -weight @ tip
    whole = exact_cells(weight, bias, 3)
    rows = expert_sets(whole)
    place = {frozenset(row): n for n, row in enumerate(rows)}
    facets = np.array([[place[one], place[other]] for one, other in whole.facets])
    pairs = np.array([[min(one - other), min(other - one)] for one, other in whole.facets])
    pairs = pairs.astype(np.int16)
    expert_set = np.array(rows, np.int16)
    found = facet_distances(weight, bias, expert_set, facets, (pairs[:, 0], pairs[:, 1]), tip)
    np.testing.assert_array_equal(found, 0.0)


@pytest.mark.parametrize("instance", DEGENERATE, ids=lambda instance: instance["name"])
@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0, 8.0])
def test_ties_of_many_experts_are_decided_or_refused_but_never_missed(instance, radius):
    weight, bias = arrays(instance)
    k, bias = instance["k"], np.zeros(len(weight)) if bias is None else bias
    centre = [Fraction(0)] * weight.shape[1]
    try:
        found = ball_cells(weight, bias, k, np.zeros(weight.shape[1]), radius, PLENTY)
    except ValueError as error:
        assert "degenerate" in str(error)
        return
    exact, whole = arrangement_of(weight, bias), exact_cells(weight, bias, k)

    def is_met(expert_set, exchanged=None):
        squared = exact_nearest(exact, expert_set, centre, exchanged).squared
        return squared is not None and squared < Fraction(radius) ** 2

    cells = [cell for cell in expert_sets(whole) if is_met(frozenset(cell))]
    assert [tuple(row) for row in found.expert_set.tolist()] == cells
    facets = set()
    for one, other in whole.facets:
        if len(one - other) == 1:
            (out,), (into,) = one - other, other - one
            if is_met(one, (out, into)):
                first, second = (one, other) if out < into else (other, one)
                facets.add((tuple(sorted(first)), tuple(sorted(second))))
    assert named(found) == facets


def test_facets_on_which_other_experts_tie_too_are_refused():
    weight, bias = router(9, 2, seed=4)
    weight[5], bias[5] = weight[2], bias[2]
    with pytest.raises(ValueError, match="degenerate"):
        ball_cells(weight, bias, 3, np.zeros(2), 20.0, PLENTY)
    # two pairs on one hyperplane: 0 and 1 cross where 2 and 3 do, both between rank 1 and 4
    weight = np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    bias = np.array([0.5, 0.5, -0.5, -0.5])
    assert len(ball_cells(weight, bias, 1, np.array([0.3, 0.1]), 1.0, PLENTY).expert_set) == 2
    weight = np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    with pytest.raises(ValueError, match="degenerate"):
        ball_cells(weight, np.zeros(4), 2, np.array([0.3, 0.1]), 1.0, PLENTY)


def test_four_experts_that_meet_in_a_point_of_the_plane_do_no_harm():
    weight = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    found = ball_cells(weight, np.zeros(4), 1, np.array([0.1, 0.02]), 1.0, PLENTY)
    assert found.expert_set.tolist() == [[0], [1], [2], [3]]
    assert found.facets.tolist() == [[0, 1], [0, 3], [1, 2], [2, 3]]
    assert found.num_exact > 0


def test_a_ball_that_only_touches_a_facet_does_not_meet_it():
    weight, bias = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([0.0, 2.0])  # tie at x = 1
    touching = ball_cells(weight, bias, 1, np.zeros(2), 1.0, PLENTY)
    assert touching.expert_set.tolist() == [[1]]
    assert touching.gap == 0.0
    beyond = ball_cells(weight, bias, 1, np.zeros(2), np.nextafter(1.0, 2.0), PLENTY)
    assert beyond.expert_set.tolist() == [[0], [1]]
    assert beyond.num_exact > 0


def test_a_centre_on_a_tie_starts_from_a_cell_close_by():
    weight = router(8, 3, seed=2)[0]
    found = ball_cells(weight, np.zeros(8), 2, np.zeros(3), 1.0, PLENTY)
    assert [tuple(r) for r in found.expert_set.tolist()] == expert_sets(
        exact_cells(weight, None, 2)
    )
    assert (found.distance_lower == 0.0).all()
    assert (found.distance_upper < 1e-6).all()


def test_more_cells_than_asked_for_are_cut_and_said_so():
    weight, bias = router(64, 3)
    cut = ball_cells(weight, bias, 8, np.zeros(3), 1.0, 100)
    assert len(cut.expert_set) == 100
    assert not cut.is_whole
    whole = ball_cells(weight, bias, 8, np.zeros(3), 1.0, 429)
    assert whole.is_whole
    assert {tuple(r) for r in cut.expert_set.tolist()} < {
        tuple(r) for r in whole.expert_set.tolist()
    }
    assert named(cut) < named(whole)


@pytest.mark.parametrize("hops", [0, 1, 3, 50])
def test_hops_are_those_of_breadth_first_search_over_all_facets(hops):
    weight, bias = router(16, 3)
    whole = walked(weight, bias, 4)
    rows = [tuple(row) for row in whole.expert_set.tolist()]
    beside = {row: set() for row in rows}
    for one, other in named(whole):
        beside[one].add(other)
        beside[other].add(one)
    point = np.array([0.3, -0.2, 0.5])
    start = tuple(sorted(np.argsort(-(weight @ point + bias))[:4].tolist()))
    steps, frontier = {start: 0}, [start]
    for step in range(1, hops + 1):
        frontier = sorted({n for row in frontier for n in beside[row]} - steps.keys())
        steps.update(dict.fromkeys(frontier, step))
    found = cells_within_hops(weight, bias, 4, point, hops, PLENTY)
    assert found.is_whole
    own = [tuple(row) for row in found.expert_set.tolist()]
    assert dict(zip(own, found.hops.tolist(), strict=True)) == steps
    near = {(a, b) for a, b in named(whole) if min(steps.get(a, 99), steps.get(b, 99)) < hops}
    assert named(found) == near
    exact, centre = arrangement_of(weight, bias), [Fraction(c) for c in point.tolist()]
    for n in range(0, len(own), 7):
        squared = exact_nearest(exact, frozenset(own[n]), centre).squared
        assert squared is not None
        bracket = found.distance_lower[n], found.distance_upper[n]
        assert Fraction(bracket[0]) ** 2 <= squared <= Fraction(bracket[1]) ** 2


def test_arguments_without_a_meaning_are_refused():
    weight, bias = router(6, 2)
    for k, centre, radius, match in [
        (0, np.zeros(2), 1.0, "top-0"),
        (7, np.zeros(2), 1.0, "top-7"),
        (2, np.zeros(2), 0.0, "positive"),
        (2, np.zeros(2), np.nan, "positive"),
        (2, np.zeros(2), np.inf, "finite"),
        (2, np.full(2, np.nan), 1.0, "NaN"),
    ]:
        with pytest.raises(ValueError, match=match):
            ball_cells(weight, bias, k, centre, radius, PLENTY)
    assert ball_cells(weight, bias, 6, np.zeros(2), 1.0, PLENTY).expert_set.tolist() == [
        [*range(6)]
    ]
