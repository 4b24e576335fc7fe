"""Cells of balls, cones and boxes against certified instances, programs over all sets, and fractions."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from moegeom.core.errors import UsageError
from moegeom.routing_cells.ball import ball_cells as balls
from moegeom.routing_cells.ball.cell_distance import nearest_vertices
from moegeom.routing_cells.exact.dictionary import Arrangement, common_tie
from moegeom.routing_cells.exact.exact_nearest import exact_nearest
from moegeom.routing_cells.facet_graph import swaps
from moegeom.routing_cells.request import CellsRequest
from moegeom.routing_cells.router import cells_of_slice, with_witnesses
from moegeom.routing_cells.walk.enumeration import AllSubsets, Enumeration, enumerate_cells
from tests.by_day import by_day
from tests.oracle import helpers
from tests.oracle.exact_cells import exact_cells, expert_sets
from tests.oracle.helpers import PLENTY, ahead, choices, in_fractions, named, router, rows_of

BALLS = [instance for instance in helpers.INSTANCES if instance["ball_radius"] is not None]
DEGENERATE = [
    i for i in helpers.INSTANCES if i["mods"] and i["ball_radius"] is None and i["E"] <= 10
]


def ball_cells(weight, bias, k: int, centre, radius: float, most: int) -> Enumeration:
    """What a search of the ball finds."""
    return balls.cells_of_ball(balls.BallProblem.of(weight, bias, k, centre, radius), most)


def holds(lower: float, squared, upper: float) -> bool:
    """Is the exact distance, as its square, between two floats?"""
    return squared is not None and Fraction(lower) ** 2 <= squared <= Fraction(upper) ** 2


def walked(weight: np.ndarray, bias: np.ndarray, k: int):
    """All cells and facets of the whole space, and the experts that each facet exchanges."""
    whole = enumerate_cells(weight, bias, k, most=PLENTY)
    assert whole.is_whole
    return whole, *swaps(whole.expert_set, whole.facets).first


@pytest.mark.parametrize("instance", BALLS, ids=lambda instance: instance["name"])
def test_cells_and_facets_of_a_ball_are_the_certified_ones(instance):
    weight, bias = helpers.arrays(instance)
    bias = np.zeros(len(weight)) if bias is None else bias
    centre = np.zeros(weight.shape[1])
    found = ball_cells(weight, bias, instance["k"], centre, instance["ball_radius"], PLENTY)
    assert found.is_whole
    assert helpers.digest(rows_of(found.expert_set)) == instance["cells_sha1"]
    assert len(found.facets) == instance["n_walls"]


@pytest.mark.parametrize(
    ("experts", "k", "d", "radius", "cells", "facets"),
    [(64, 8, 3, 0.5, 96, 427), (64, 8, 3, 1.0, 429, 2157), (32, 4, 4, 0.6, None, None)],
)
def test_the_search_finds_what_the_walk_and_the_filter_find(experts, k, d, radius, cells, facets):
    weight, bias = router(experts, d)
    centre = np.zeros(d)
    found = ball_cells(weight, bias, k, centre, radius, PLENTY)
    whole, out, into = walked(weight, bias, k)
    met = balls.filter_ball(weight, bias, whole, centre, radius)
    assert_array_equal(found.expert_set, whole.expert_set[met.cells])
    place, kept = np.cumsum(met.cells) - 1, np.flatnonzero(met.facets)
    theirs = place[whole.facets[kept]]
    order = np.lexsort(theirs.T[::-1])
    kept = kept[order]
    assert_array_equal(found.facets, theirs[order])
    both = np.sort(np.stack([out, into], axis=1)[kept], axis=1)
    assert_array_equal(np.stack(found.exchanged, axis=1), both)
    if cells is not None:
        assert (len(found.expert_set), len(found.facets)) == (cells, facets)
    # both brackets hold the same number
    assert (found.cell_distance <= met.cell_distance[met.cells][:, ::-1])[:, 0].all()
    assert (found.cell_distance >= met.cell_distance[met.cells][:, ::-1])[:, 1].all()
    assert (found.facet_distance <= met.facet_distance[kept][:, ::-1])[:, 0].all()
    assert (found.facet_distance >= met.facet_distance[kept][:, ::-1])[:, 1].all()
    assert (found.cell_distance[:, 1] < radius).all()
    assert (met.cell_distance[~met.cells, 0] >= radius).all()
    assert found.num_exact == 0


@pytest.mark.parametrize("d", [2, 3, 4])
def test_every_bracket_holds_the_exact_distance_and_every_point_its_cell(d):
    k = 3
    weight, bias = router(10, d, 100 + d)
    generator = np.random.default_rng(d)
    centre = generator.standard_normal(d)
    found = ball_cells(weight, bias, k, centre, 1.5, PLENTY)
    exact, point = Arrangement.of(weight, bias), in_fractions(centre)

    def check(expert_set, exchanged, lower, upper):
        squared = exact_nearest(exact, frozenset(expert_set), point, exchanged).squared
        assert holds(lower, squared, upper)
        assert squared < Fraction(9, 4)
        assert upper - lower <= 1e-7 * upper

    for n, expert_set in enumerate(found.expert_set.tolist()):
        check(expert_set, None, *found.cell_distance[n])
    assert_array_equal(choices(found.witness, weight, bias, k), found.expert_set)
    for n, (one, _) in enumerate(found.facets.tolist()):
        pair = tuple(int(side[n]) for side in found.exchanged)
        check(found.expert_set[one].tolist(), pair, *found.facet_distance[n])
    inside = centre + generator.standard_normal((4000, d)) * 0.5
    inside = inside[np.linalg.norm(inside - centre, axis=1) < 1.5]
    assert set(rows_of(choices(inside, weight, bias, k))) <= set(rows_of(found.expert_set))


def test_facets_have_one_distance_on_any_number_of_threads_and_only_small_walks_keep_vertices():
    weight, bias = router(64, 3)
    cells, *_ = walked(weight, bias, 8)
    given = weight, bias, cells, np.ones(3)
    found = balls.facet_distances(*given)
    assert len(found) > 3 * 4096
    assert_array_equal(found, balls.facet_distances(*given, threads=3))
    met = balls.filter_ball(*given, np.inf)
    assert_array_equal(found, met.facet_distance)
    cut, whole = (ball_cells(weight, bias, 8, np.zeros(3), 1.0, most) for most in (100, 429))
    assert (len(cut.expert_set), cut.is_whole, whole.is_whole) == (100, False, True)
    assert named(cut)[0] < named(whole)[0]
    assert named(cut)[1] < named(whole)[1]
    weight, bias = np.random.default_rng(0).standard_normal((2, 12, 3))[:, :, :3]
    for k, most, is_kept in [(3, PLENTY, True), (3, 10, False), (3, 0, False), (9, PLENTY, True)]:
        found = enumerate_cells(weight, bias[:, 0], k, most_simple=most)
        assert (found.simple is not None) == is_kept


@pytest.mark.parametrize("shift", [0.0, 0.25])
def test_cones_are_nowhere_away_from_their_tip(shift):
    """Also where the tip is not at 0, of which only exact arithmetic knows."""
    weight, tip = np.round(4.0 * router(9, 3)[0]), np.array([shift, -shift, 2.0 * shift])
    bias = -weight @ tip
    cells = enumerate_cells(weight, bias, 3)
    distances = balls.facet_distances(weight, bias, cells, tip)
    assert_array_equal(distances, 0.0)


@pytest.mark.parametrize("instance", DEGENERATE, ids=lambda instance: instance["name"])
@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0, 8.0])
def test_ties_of_many_experts_are_decided_or_refused_but_never_missed(instance, radius):
    weight, bias = helpers.arrays(instance)
    k, bias = instance["k"], np.zeros(len(weight)) if bias is None else bias
    centre = [Fraction(0)] * weight.shape[1]
    try:
        found = ball_cells(weight, bias, k, np.zeros(weight.shape[1]), radius, PLENTY)
    except ValueError as error:
        assert "degenerate" in str(error)
        return
    exact, whole = Arrangement.of(weight, bias), exact_cells(weight, bias, k)

    def is_met(expert_set, exchanged=None):
        squared = exact_nearest(exact, expert_set, centre, exchanged).squared
        return squared is not None and squared < Fraction(radius) ** 2

    cells = [cell for cell in expert_sets(whole) if is_met(frozenset(cell))]
    assert rows_of(found.expert_set) == cells
    facets = set()
    for one, other in whole.facets:
        if len(one - other) == 1:
            (out,), (into,) = one - other, other - one
            if is_met(one, (out, into)):
                first, second = (one, other) if out < into else (other, one)
                facets.add((tuple(sorted(first)), tuple(sorted(second))))
    assert named(found)[1] == facets


def test_a_point_of_four_experts_a_touching_ball_and_a_centre_on_a_tie_do_no_harm():
    weight = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    cross = ball_cells(weight, np.zeros(4), 1, np.array([0.1, 0.02]), 1.0, PLENTY)
    assert cross.expert_set.tolist() == [[0], [1], [2], [3]]
    assert cross.facets.tolist() == [[0, 1], [0, 3], [1, 2], [2, 3]]
    assert cross.num_exact > 0
    weight, bias = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([0.0, 2.0])  # tie at x = 1
    touching = ball_cells(weight, bias, 1, np.zeros(2), 1.0, PLENTY)
    assert touching.expert_set.tolist() == [[1]]
    beyond = ball_cells(weight, bias, 1, np.zeros(2), np.nextafter(1.0, 2.0), PLENTY)
    assert beyond.expert_set.tolist() == [[0], [1]]
    assert beyond.num_exact > 0
    weight = router(8, 3, seed=2)[0]
    close_by = ball_cells(weight, np.zeros(8), 2, np.zeros(3), 1.0, PLENTY)
    assert rows_of(close_by.expert_set) == expert_sets(exact_cells(weight, None, 2))
    assert (close_by.cell_distance[:, 0] == 0.0).all()
    assert (close_by.cell_distance[:, 1] < 1e-6).all()


def test_what_has_no_meaning_and_facets_on_which_others_tie_are_refused():
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
    whole = ball_cells(weight, bias, 6, np.zeros(2), 1.0, PLENTY)
    assert whole.expert_set.tolist() == [[*range(6)]]
    weight, bias = router(9, 2, seed=4)
    weight[5], bias[5] = weight[2], bias[2]
    with pytest.raises(ValueError, match="degenerate"):
        ball_cells(weight, bias, 3, np.zeros(2), 20.0, PLENTY)
    # two pairs on one hyperplane: 0 and 1 cross where 2 and 3 do, both between rank 1 and 4
    weight, point = (
        np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]),
        np.array([0.3, 0.1]),
    )
    bias = np.array([0.5, 0.5, -0.5, -0.5])
    assert len(ball_cells(weight, bias, 1, point, 1.0, PLENTY).expert_set) == 2
    with pytest.raises(ValueError, match="degenerate"):
        ball_cells(weight, np.zeros(4), 2, point, 1.0, PLENTY)
    cones = np.array([[1.0, 0.0], [-1.0, 0.0], [3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    with pytest.raises(ValueError, match="degenerate"):
        ball_cells(cones, np.zeros(6), 3, np.array([0.1, 0.5]), 9.0, PLENTY)


# -------------------------------------------------------------------------------------------- cones
def coarse_rows(experts: int, d: int, seed: int = 0) -> np.ndarray:
    """Rows of so few bits that products with coarse points are exact."""
    return np.round(1024.0 * np.random.default_rng(seed).standard_normal((experts, d))) / 1024.0


def is_open(strict: np.ndarray, level: np.ndarray | None = None) -> bool:
    """Whether some x has strict @ x > 0, and level @ x = 0: a linear program."""
    tie = None if level is None else (level, 0.0)
    bounds = [(-1.0, 1.0)] * strict.shape[1]
    return helpers.largest_margin(strict, np.zeros(len(strict)), tie, bounds) > 1e-7


def cones(weight: np.ndarray, k: int) -> tuple[set, set]:
    """The cells of W x by their definition, one program a set, and the facets, one a pair."""
    everyone, level = range(len(weight)), np.zeros(len(weight))
    cells = {
        some
        for some in combinations(everyone, k)
        if is_open(ahead(weight, level, some, [j for j in everyone if j not in some])[0])
    }
    facets = set()
    for one, other in combinations(sorted(cells), 2):
        both = [i for i in one if i in other]
        if len(both) == k - 1:
            (out,), (into,) = set(one) - set(other), set(other) - set(one)
            neither = [j for j in everyone if j not in (*both, out, into)]
            above = ahead(weight, level, both, [out])[0]
            strict = np.concatenate([above, ahead(weight, level, [out], neither)[0]])
            if is_open(strict, weight[out] - weight[into]):
                facets.add((one, other))
    return cells, facets


def found_in(weight, bias, k: int, radius: float, is_near: bool = True, **changes) -> Enumeration:
    """What is found in a ball, with points that are proved; none of a cone needs a second try."""
    request = CellsRequest("", weights=Path("w.npz"), radius=radius, num_workers=1, **changes)
    bias = np.zeros(len(weight)) if bias is None else bias
    found = cells_of_slice(weight, bias, k, request, None)
    assert isinstance(found, Enumeration)
    proved = with_witnesses(found, weight, bias, request)
    if proved.is_cone and is_near:
        assert_array_equal(proved.witness, found.witness)
    return proved


TIPS = [(8, 1, 2), (9, 3, 3), (8, 6, 3), (9, 4, 4)]


@pytest.mark.parametrize(("experts", "k", "d"), by_day(TIPS, [(8, 1, 2), (8, 6, 3)]))
def test_a_ball_around_the_tip_has_the_cells_of_the_whole_slice_at_every_radius(experts, k, d):
    weight = np.random.default_rng(experts).standard_normal((experts, d))
    expected = cones(weight, k)
    whole = enumerate_cells(weight, None, k)
    assert named(whole) == expected
    for bias in (None, np.full(experts, 0.3)):
        for radius in (1e-12, 1.0, 1e12):
            found = found_in(weight, bias, k, radius)
            assert named(found) == expected
            assert found.is_cone
            assert (found.cell_distance == 0.0).all()
            assert (found.facet_distance == 0.0).all()
            assert (np.linalg.norm(found.witness, axis=1) < radius).all()
            assert not found.exact
            assert_array_equal(choices(found.witness, weight, bias, k), found.expert_set)


@pytest.mark.parametrize("k", [2, 6])
def test_a_ball_that_holds_the_tip_anywhere_has_the_cells_of_the_whole_slice(k):
    weight, tip = coarse_rows(8, 3), np.array([0.5, -0.25, 0.5])  # at a distance of 3 / 4
    bias = 2.0 - weight @ tip
    expected = cones(weight, k)
    whole = enumerate_cells(weight, bias, k)
    assert named(whole) == expected
    assert_array_equal(choices(whole.witness, weight, bias, k), whole.expert_set)
    centre = [Fraction(0)] * 3
    exact = Arrangement.of(weight, bias)
    squares = {c: exact_nearest(exact, frozenset(c), centre).squared for c in expected[0]}
    for radius in (np.nextafter(0.75, 1.0), 2.0, 1e6):
        found = found_in(weight, bias, k, radius, is_near=radius > 1.0)
        assert named(found) == expected
        assert found.is_cone
        for row, (lower, upper) in zip(found.expert_set.tolist(), found.cell_distance, strict=True):
            assert holds(lower, squares[tuple(row)], upper)
    # an open ball that only touches the tip meets the cells that it enters elsewhere
    for radius in (0.75, 0.5):
        found = found_in(weight, bias, k, radius)
        assert not found.is_cone
        met = {cell for cell, squared in squares.items() if squared < Fraction(radius) ** 2}
        assert named(found)[0] == met < expected[0]


def test_experts_that_do_not_tie_matter_in_a_wide_ball_and_too_many_ties_are_walked():
    """Two are always chosen, three never, and six tie at the centre for two places."""
    weight, bias = coarse_rows(11, 3, seed=3), np.zeros(11)
    bias[[4, 9]], bias[[0, 5, 7]] = 8.0, -8.0
    tied = [1, 2, 3, 6, 8, 10]
    cells, _ = cones(weight[tied], 2)
    expected = {tuple(sorted([4, 9, *(tied[i] for i in cell)])) for cell in cells}
    found = found_in(weight, bias, 4, 0.5)
    assert named(found)[0] == expected
    assert found.road == "charts"
    assert not found.is_cone
    assert expected < named(found_in(weight, bias, 4, 50.0))[0]
    # Rounded biases: almost all experts tie at one point, and no two vertices are the same.
    weight = np.random.default_rng(2).standard_normal((11, 3))
    bias = -weight @ np.array([0.55, -0.275, 0.1375])
    assert common_tie(weight, bias) is None
    with pytest.raises(balls.TooManyTies, match="more than 20 facets"):
        balls.cells_of_ball(
            balls.BallProblem.of(weight, bias, 4, np.zeros(3), 2.0), PLENTY, most_exact=20
        )
    # where a walk is too long as well, both are named
    with pytest.raises(UsageError, match="within --radius more than 5.. facets") as refused:
        found_in(weight, bias, 4, 2.0, vertices=100)
    beyond = "at most 100 vertices (--vertices) to walk instead; a random router has about 152"
    assert beyond in str(refused.value)
    assert "--radius" in str(refused.value.hint)
    enough = int(refused.value.hint.split("--vertices ")[1].split()[0])
    found = found_in(weight, bias, 4, 2.0, vertices=enough)
    assert (found.road, found.is_whole) == ("walk and filter", True)
    assert named(found) == named(ball_cells(weight, bias, 4, np.zeros(3), 2.0, PLENTY))


@pytest.mark.parametrize("tie_broken", [False, True])
def test_equal_experts_that_tie_with_all_others_are_those_of_the_exact_walk(tie_broken):
    weight, tip = coarse_rows(8, 3, seed=5), np.array([1.0, 0.5, -0.25])
    weight[6] = weight[1]
    bias = -weight @ tip
    exact = exact_cells(weight, bias, 3, tie_broken)
    found = found_in(weight, bias, 3, 2.0, tie_broken=tie_broken)
    facets = {tuple(sorted(tuple(sorted(c)) for c in pair)) for pair in exact.facets}
    assert named(found) == (set(expert_sets(exact)), facets)


def test_experts_tie_at_a_point_when_fractions_say_so_and_every_set_may_be_a_cell():
    weight, tip = coarse_rows(12, 4), np.array([0.5, -3.0, 0.0, 0.125])
    bias = 7.0 - weight @ tip
    assert common_tie(weight, bias) == tuple(map(Fraction, tip.tolist()))
    assert common_tie(weight, np.full(12, 0.1)) == (0, 0, 0, 0)
    for expert in range(12):
        moved = bias.copy()
        moved[expert] = np.nextafter(moved[expert], np.inf)
        assert common_tie(weight, moved) is None
    # what is 0 modulo the prime is not 0
    moved = bias.copy()
    moved[11] += 2.0**31 - 1.0
    assert common_tie(weight, moved) is None
    # three experts in a plane always tie somewhere, at a point that float64 need not hold
    weight, bias = np.array([[1.0, 0.0], [0.0, 3.0], [7.0, 1.0]]), np.array([0.1, 0.2, 0.3])
    point = common_tie(weight, bias)
    assert len(set(helpers.exact_logits(weight, bias, point))) == 1
    # parallel lines tie nowhere, and on a line of points none is told from the others
    assert common_tie(np.array([[1.0], [1.0]]), np.array([0.0, 1.0])) is None
    assert common_tie(np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([0.0, 1.0])) is None
    weight = np.random.default_rng(1).standard_normal((6, 5))
    request = CellsRequest("", weights=Path("w.npz"), radius=1e-3)
    found = cells_of_slice(weight, np.zeros(6), 3, request, None)
    assert isinstance(found, AllSubsets)
    assert found.num_cells == len(cones(weight, 3)[0]) == 20


# ----------------------------------------------------------------------------------------- vertices
class Diagram:
    """A router with all its cells and facets, and a centre."""

    def __init__(self, experts, k, d, away=0.5, equal=0, is_moved=False) -> None:
        generator = np.random.default_rng(experts + d)
        self.weight = generator.standard_normal((experts, d))
        self.bias = generator.standard_normal(experts)
        self.weight[:equal], self.bias[:equal] = self.weight[0], self.bias[0]
        self.centre = away * generator.standard_normal(d)
        if is_moved:
            self.bias -= self.weight @ self.centre
        self.found = enumerate_cells(self.weight, self.bias, k, most_simple=PLENTY)
        self.swapped = self.found.exchanged
        self.given = self.weight, self.bias, self.found, self.centre

    def brackets(self) -> np.ndarray:
        return nearest_vertices(*self.given)

    def holds_exactly(self, facet: int, bracket: np.ndarray, width: float) -> bool:
        lower, upper = bracket[facet].tolist()
        return holds(lower, self.exact(facet)[0], upper) and upper - lower <= width * upper

    def exact(self, facet: int) -> tuple[Fraction, int]:
        """The square of the distance of a facet, and the experts on the level at its foot."""
        cell = frozenset(self.found.expert_set[self.found.facets[facet, 0]].tolist())
        pair = int(self.swapped[0][facet]), int(self.swapped[1][facet])
        instance = Arrangement.of(self.weight, self.bias)
        nearest = exact_nearest(instance, cell, in_fractions(self.centre), pair)
        logits = helpers.exact_logits(self.weight, self.bias, nearest.point)
        return nearest.squared, logits.count(logits[pair[0]])


@pytest.mark.parametrize(
    ("experts", "k", "d", "away"),
    [(12, 3, 2, 0.0), (12, 3, 2, 0.5), (10, 4, 3, 0.5), (9, 2, 4, 0.0), (9, 3, 5, 1.0)],
)
def test_a_facet_has_the_distance_of_a_vertex_just_where_its_foot_is_one(experts, k, d, away):
    diagram = Diagram(experts, k, d, away)
    found, num_found = diagram.brackets(), 0
    facets = range(0, len(found), max(1, len(found) // 60))
    for n in facets:
        is_vertex = diagram.exact(n)[1] == d + 1
        assert np.isfinite(found[n, 1]) == is_vertex
        assert not is_vertex or diagram.holds_exactly(n, found, 1e-9)
        num_found += is_vertex
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
    assert all(diagram.holds_exactly(n, found, width) for n in some[::2].tolist())


@pytest.mark.parametrize("away", [0.0, 0.5])
def test_brackets_with_and_without_vertices_hold_the_same_distance(away):
    diagram = Diagram(32, 5, 4, away)
    weight, bias, cells, centre = diagram.given
    searched = balls.facet_distances(weight, bias, replace(cells, simple=None), centre)
    seen = balls.facet_distances(*diagram.given)
    assert (np.maximum(searched[:, 0], seen[:, 0]) <= np.minimum(searched[:, 1], seen[:, 1])).all()
    is_seen = np.isfinite(diagram.brackets()[:, 1])
    assert_array_equal(seen[~is_seen], searched[~is_seen])
    assert is_seen.mean() > 0.8
    # cells and facets that are not listed are left out, the others stay
    half = np.arange(0, len(cells.facets), 2)
    some = nearest_vertices(weight, bias, replace(cells, facets=cells.facets[half]), centre)
    assert_array_equal(some[is_seen[half]], seen[half][is_seen[half]])
