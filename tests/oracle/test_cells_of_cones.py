"""Cells where all experts tie at one point, against linear programs over every set of experts."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

from moegeom.core.errors import UsageError
from moegeom.studies.cells.ball.ball_cells import (
    BallProblem,
    TooManyTies,
    ball_cells,
    cells_of_ball,
    cells_within_hops,
)
from moegeom.studies.cells.ball.nearest import arrangement_of
from moegeom.studies.cells.exact.exact_cells import exact_cells, expert_sets
from moegeom.studies.cells.exact.exact_nearest import exact_nearest
from moegeom.studies.cells.exact.rank import common_tie
from moegeom.studies.cells.study.found import FoundCells, find_cells, with_witnesses
from moegeom.studies.cells.study.request import CellsRequest
from moegeom.studies.cells.walk.enumeration import AllSubsets, Enumeration, enumerate_cells

Sets = set[tuple[int, ...]]

PLENTY = 10**6


def rows_of(experts: int, d: int, seed: int = 0) -> np.ndarray:
    """Rows of so few bits that products with coarse points are exact."""
    return np.round(1024.0 * np.random.default_rng(seed).standard_normal((experts, d))) / 1024.0


def is_open(strict: np.ndarray, level: np.ndarray | None = None) -> bool:
    """Whether some x has strict @ x > 0, and level @ x = 0: a linear program."""
    d = strict.shape[1]
    found = linprog(
        [*[0.0] * d, -1.0],
        A_ub=np.column_stack([-strict, np.ones(len(strict))]),
        b_ub=np.zeros(len(strict)),
        A_eq=None if level is None else [[*level, 0.0]],
        b_eq=None if level is None else [0.0],
        bounds=[(-1.0, 1.0)] * d + [(None, 1.0)],
    )
    return found.x[-1] > 1e-7


def cones(weight: np.ndarray, k: int) -> tuple[Sets, set[tuple[tuple[int, ...], ...]]]:
    """The cells of W x by their definition, one program a set, and the facets, one a pair."""
    everyone = range(len(weight))

    def ahead(inside, outside):
        return np.array([weight[i] - weight[j] for i in inside for j in outside])

    cells = {
        some
        for some in combinations(everyone, k)
        if is_open(ahead(some, [j for j in everyone if j not in some]))
    }
    facets = set()
    for one, other in combinations(sorted(cells), 2):
        both = [i for i in one if i in other]
        if len(both) == k - 1:
            (out,), (into,) = set(one) - set(other), set(other) - set(one)
            neither = [j for j in everyone if j not in (*both, out, into)]
            strict = np.concatenate(
                [ahead(both, [out]).reshape(-1, weight.shape[1]), ahead([out], neither)]
            )
            if is_open(strict, weight[out] - weight[into]):
                facets.add((one, other))
    return cells, facets


def found_in(weight, bias, k: int, radius: float, is_near: bool = True, **changes) -> FoundCells:
    """What is found in a ball, with points that are proved; none of a cone needs a second try."""
    request = CellsRequest("", weights=Path("w.npz"), radius=radius, num_workers=1, **changes)
    found = find_cells(weight, bias, k, request, np.empty((0, weight.shape[1])), None)
    assert isinstance(found, list)
    proved = with_witnesses(found[0], weight, bias, request)
    if proved.is_cone and is_near:
        np.testing.assert_array_equal(proved.witness, found[0].witness)
    return proved


def named(found) -> tuple[Sets, set[tuple[tuple[int, ...], ...]]]:
    rows = [tuple(row) for row in found.expert_set.tolist()]
    return set(rows), {(rows[one], rows[other]) for one, other in found.facets.tolist()}


@pytest.mark.parametrize(("experts", "k", "d"), [(8, 1, 2), (9, 3, 3), (8, 6, 3), (9, 4, 4)])
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
            drawn = np.sort(np.argsort(-(found.witness @ weight.T), axis=1)[:, :k], axis=1)
            np.testing.assert_array_equal(drawn, found.expert_set)


@pytest.mark.parametrize("k", [2, 6])
def test_a_ball_that_holds_the_tip_anywhere_has_the_cells_of_the_whole_slice(k):
    weight, tip = rows_of(8, 3), np.array([0.5, -0.25, 0.5])  # at a distance of 3 / 4
    bias = 2.0 - weight @ tip
    expected = cones(weight, k)
    whole = enumerate_cells(weight, bias, k)
    assert isinstance(whole, Enumeration)
    assert named(whole) == expected
    drawn = np.sort(np.argsort(-(whole.witness @ weight.T + bias), axis=1)[:, :k], axis=1)
    np.testing.assert_array_equal(drawn, whole.expert_set)
    centre = [Fraction(0)] * 3
    exact = arrangement_of(weight, bias)
    squares = {}
    for cell in expected[0]:
        squared = exact_nearest(exact, frozenset(cell), centre).squared
        assert squared is not None
        squares[cell] = squared
    for radius in (np.nextafter(0.75, 1.0), 2.0, 1e6):
        found = found_in(weight, bias, k, radius, is_near=radius > 1.0)
        assert named(found) == expected
        assert found.is_cone
        assert found.cell_distance is not None
        for row, bracket in zip(found.expert_set.tolist(), found.cell_distance, strict=True):
            lower, upper = map(Fraction, bracket.tolist())
            assert lower**2 <= squares[tuple(row)] <= upper**2
    # an open ball that only touches the tip meets the cells that it enters elsewhere
    for radius in (0.75, 0.5):
        found = found_in(weight, bias, k, radius)
        assert not found.is_cone
        met = {cell for cell, squared in squares.items() if squared < Fraction(radius) ** 2}
        assert named(found)[0] == met < expected[0]


def test_experts_that_do_not_tie_where_the_others_do_only_matter_in_a_ball_that_they_reach():
    """Two are always chosen, three never, and six tie at the centre for two places."""
    weight, bias = rows_of(11, 3, seed=3), np.zeros(11)
    bias[[4, 9]], bias[[0, 5, 7]] = 8.0, -8.0
    tied = [1, 2, 3, 6, 8, 10]
    cells, _ = cones(weight[tied], 2)
    expected = {tuple(sorted([4, 9, *(tied[i] for i in cell)])) for cell in cells}
    found = found_in(weight, bias, 4, 0.5)
    assert named(found)[0] == expected
    assert found.road == "charts"
    assert not found.is_cone
    wide = found_in(weight, bias, 4, 50.0)
    assert expected < named(wide)[0]
    assert named(wide) == named(ball_cells(weight, bias, 4, np.zeros(3), 50.0, PLENTY))


def test_every_set_is_a_cell_of_a_ball_too_where_it_is_one_of_the_slice():
    weight = np.random.default_rng(1).standard_normal((6, 5))
    request = CellsRequest("", weights=Path("w.npz"), radius=1e-3)
    found = find_cells(weight, None, 3, request, np.empty((0, 5)), None)
    assert isinstance(found, AllSubsets)
    assert found.num_cells == len(cones(weight, 3)[0]) == 20


@pytest.mark.parametrize("tie_broken", [False, True])
def test_equal_experts_that_tie_with_all_others_are_those_of_the_exact_walk(tie_broken):
    weight, tip = rows_of(8, 3, seed=5), np.array([1.0, 0.5, -0.25])
    weight[6] = weight[1]
    bias = -weight @ tip
    exact = exact_cells(weight, bias, 3, tie_broken)
    found = found_in(weight, bias, 3, 2.0, tie_broken=tie_broken)
    cells, facets = named(found)
    assert cells == {tuple(cell) for cell in expert_sets(exact)}
    assert facets == {tuple(sorted(tuple(sorted(c)) for c in pair)) for pair in exact.facets}


def test_a_search_with_too_many_ties_gives_way_to_a_walk_that_finds_the_same():
    """Rounded biases: almost all experts tie at one point, and no two vertices are the same."""
    weight = np.random.default_rng(2).standard_normal((11, 3))
    bias = -weight @ np.array([0.55, -0.275, 0.1375])
    assert common_tie(weight, bias) is None
    with pytest.raises(TooManyTies, match="more than 20 facets"):
        cells_of_ball(BallProblem.of(weight, bias, 4, np.zeros(3), 2.0), PLENTY, most_exact=20)
    found = found_in(weight, bias, 4, 2.0)
    assert found.road == "walk and filter"
    assert named(found) == named(ball_cells(weight, bias, 4, np.zeros(3), 2.0, PLENTY))


def test_where_a_walk_is_too_long_as_well_both_are_said():
    weight = np.random.default_rng(2).standard_normal((11, 3))
    bias = -weight @ np.array([0.55, -0.275, 0.1375])
    with pytest.raises(UsageError, match="within --radius more than 5.. facets") as refused:
        found_in(weight, bias, 4, 2.0, vertices=100)
    assert (
        "at most 100 vertices (--vertices) to walk instead; a random router has about 152"
        in str(refused.value)
    )
    assert "--radius" in str(refused.value.hint)
    enough = int(refused.value.hint.split("--vertices ")[1].split()[0])
    assert found_in(weight, bias, 4, 2.0, vertices=enough).is_whole


@pytest.mark.parametrize("hops", [0, 1, 2, 99])
def test_hops_in_a_space_of_cones_are_those_of_a_search_over_all_facets(hops):
    weight, tip, point = rows_of(8, 3), np.array([0.5, -0.25, 0.5]), np.array([1.0, 0.25, -0.5])
    bias = -weight @ tip
    cells, facets = cones(weight, 3)
    start = tuple(sorted(np.argsort(-(weight @ point + bias))[:3].tolist()))
    steps, frontier = {start: 0}, {start}
    for step in range(1, hops + 1):
        beside = {a for pair in facets for a, b in (pair, pair[::-1]) if b in frontier}
        frontier = beside - steps.keys()
        steps.update(dict.fromkeys(frontier, step))
    found = cells_within_hops(weight, bias, 3, point, hops, PLENTY)
    rows = [tuple(row) for row in found.expert_set.tolist()]
    assert dict(zip(rows, found.hops.tolist(), strict=True)) == steps
    assert (set(rows) == cells) == (hops == 99)
    near = {pair for pair in facets if min(steps.get(cell, 99) for cell in pair) < hops}
    assert named(found)[1] == near
    exact, centre = arrangement_of(weight, bias), [Fraction(x) for x in point.tolist()]
    for n, (one, _) in enumerate(found.facets.tolist()):
        pair = int(found.out[n]), int(found.into[n])
        squared = exact_nearest(exact, frozenset(rows[one]), centre, pair).squared
        assert squared is not None
        lower, upper = found.facet_distance_lower[n], found.facet_distance_upper[n]
        assert Fraction(lower) ** 2 <= squared <= Fraction(upper) ** 2


def test_two_pairs_that_tie_on_one_facet_of_cones_are_refused():
    weight = np.array([[1.0, 0.0], [-1.0, 0.0], [3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    with pytest.raises(ValueError, match="degenerate"):
        cells_within_hops(weight, np.zeros(6), 3, np.array([0.1, 0.5]), 3, PLENTY)


def test_experts_tie_at_a_point_when_fractions_say_so():
    weight, tip = rows_of(12, 4), np.array([0.5, -3.0, 0.0, 0.125])
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
    found = common_tie(weight, bias)
    assert found is not None
    logits = {
        sum((Fraction(w) * x for w, x in zip(row, found, strict=True)), Fraction(offset))
        for row, offset in zip(weight.tolist(), bias.tolist(), strict=True)
    }
    assert len(logits) == 1
    # parallel lines tie nowhere, and on a line of points none is told from the others
    assert common_tie(np.array([[1.0], [1.0]]), np.array([0.0, 1.0])) is None
    assert common_tie(np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([0.0, 1.0])) is None
