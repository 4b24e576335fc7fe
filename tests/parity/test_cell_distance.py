"""The compiled search for the nearest point, and the walk by levels, against exact arithmetic, NNLS
and certified instances.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.routing_cells.ball.cell_distance import (
    BEYOND,
    EMPTY,
    MET,
    OPEN,
    Distances,
    ball_around,
    cell_distance,
    shifted,
)
from moegeom.routing_cells.exact.dictionary import Arrangement, dictionary
from moegeom.routing_cells.exact.exact_nearest import (
    ExactNearest,
    Inner,
    exact_nearest,
    inner,
    root_bracket,
)
from moegeom.routing_cells.walk import _level_diagram, _level_vertex
from moegeom.routing_cells.walk.enumeration import (
    Enumeration,
    enumerate_cells,
    experts_of,
    masks_of,
)
from moegeom.routing_cells.walk.level_walk import level_walk
from tests.oracle.exact_cells import exact_walk
from tests.oracle.helpers import PLENTY, ahead, in_fractions, router, shortest_move

#: Brackets are no wider than this share of the distance.
RTOL = 1e-7

SHAPES = [(8, 2, 1), (8, 2, 2), (12, 3, 3), (16, 4, 5), (10, 3, 8)]
every_shape = pytest.mark.parametrize("shape", SHAPES)


class Case:
    """A router, a centre, and cells and facets of it: some around, most of them nowhere."""

    def __init__(self, experts: int, k: int, d: int, count: int = 12) -> None:
        generator = np.random.default_rng(experts * 100 + d)
        self.weight = generator.standard_normal((experts, d))
        self.bias = generator.normal(size=experts)
        self.centre = generator.standard_normal(d) * 0.5
        near = self.centre + generator.standard_normal((count, d)) * 2.0
        rows = np.argsort(-(near @ self.weight.T + self.bias), axis=1)[:, :k]
        rows = np.concatenate([rows, [generator.permutation(experts)[:k] for _ in range(count)]])

        def facet(row):
            others = sorted(set(range(experts)) - set(row))
            return int(generator.choice(row)), int(generator.choice(others))

        #: The experts of a cell, and what a facet of it exchanges; None for the cell itself.
        self.places = [
            (row, pair)
            for row in map(sorted, rows.tolist())
            for pair in (None, *(facet(row) for _ in range(3)))
        ]

    def distances(self, radius: float = math.inf) -> Distances:
        inside = np.zeros((len(self.places), len(self.bias)), np.bool_)
        for n, (row, _) in enumerate(self.places):
            inside[n, row] = True
        pairs = np.array([pair or (-1, -1) for _, pair in self.places], np.int64)
        shift, error = shifted(self.weight, self.bias, self.centre)
        ball = ball_around(self.weight, shift, error.max(), radius, 1.0)
        return cell_distance(ball, inside, pairs)

    def exact(self) -> list[ExactNearest]:
        exact, centre = Arrangement.of(self.weight, self.bias), in_fractions(self.centre)
        return [exact_nearest(exact, frozenset(row), centre, pair) for row, pair in self.places]


def assert_holds(lower: float, upper: float, squared: Fraction) -> None:
    assert Fraction(lower) ** 2 <= squared <= Fraction(upper) ** 2
    assert upper - lower <= RTOL * upper


@every_shape
def test_brackets_hold_the_exact_distance(shape):
    case = Case(*shape)
    kernel = case.distances()
    assert {MET, EMPTY} >= set(kernel.state.tolist())  # random numbers leave nothing open
    for n, exact in enumerate(case.exact()):
        if exact.point is None or exact.squared is None:
            assert (kernel.state[n], kernel.lower[n]) == (EMPTY, math.inf)
            continue
        assert kernel.state[n] == MET
        assert_holds(kernel.lower[n], kernel.upper[n], exact.squared)
        point = [float(value) for value in exact.point]
        assert_allclose(point, case.centre + kernel.step[n], rtol=1e-5, atol=1e-5)


def test_facets_far_from_the_centre_are_proved_in_float64():
    case = Case(12, 3, 3)
    case.centre = case.centre * 1e8
    kernel = case.distances()
    assert OPEN not in kernel.state.tolist()
    assert (kernel.state == MET).sum() > 20
    for n, exact in enumerate(case.exact()):
        if kernel.state[n] == MET:
            assert exact.squared is not None
            assert_holds(kernel.lower[n], kernel.upper[n], exact.squared)


def assert_is_optimal(seed: int) -> None:
    generator = np.random.default_rng(seed)
    experts, d = 4 + seed % 5, 1 + seed % 4
    weight = generator.integers(-2, 3, (experts, d)) / generator.choice([1, 4])
    bias = generator.integers(-2, 3, experts) * float(seed % 3 > 0)
    centre = [Fraction(int(c), 7) for c in generator.integers(-3, 4, d)]
    k = int(generator.integers(1, experts))
    chosen = sorted(generator.permutation(experts)[:k].tolist())
    others = [j for j in range(experts) if j not in chosen]
    exchanged = None if seed % 2 else (chosen[0], others[-1])
    best = exact_nearest(Arrangement.of(weight, bias), frozenset(chosen), centre, exchanged)
    exact = in_fractions(weight)
    proof = list(zip(best.multipliers, best.pairs, strict=True))
    steps = [[v * (exact[i][m] - exact[j][m]) for v, (i, j) in proof] for m in range(d)]
    total = [sum(each, Fraction()) for each in steps]
    assert all(value >= 0 or pair == exchanged for value, pair in proof)
    at = [
        sum((w * c for w, c in zip(row, best.point or centre, strict=True)), Fraction(offset))
        for row, offset in zip(exact, bias.tolist(), strict=True)
    ]
    gaps = [at[i] - at[j] for i, j in best.pairs]
    if best.point is None:
        assert not any(total)
        assert sum(v * gap for v, gap in zip(best.multipliers, gaps, strict=True)) < 0
        return
    assert not any(gaps)
    assert total == [x - c for x, c in zip(best.point, centre, strict=True)]
    assert best.squared == sum(step * step for step in total)
    assert min(at[i] for i in chosen) >= max(at[j] for j in others)
    assert exchanged is None or at[exchanged[0]] == at[exchanged[1]]


def test_the_exact_point_and_its_multipliers_satisfy_the_conditions_of_optimality():
    """Karush, Kuhn and Tucker, or Farkas, in fractions: ties, equal rows and cones among them."""
    for seed in range(40):
        assert_is_optimal(seed)


@every_shape
def test_distances_are_those_of_least_distance_programming(shape):
    case = Case(*shape)
    kernel = case.distances()
    for n, (row, pair) in enumerate(case.places):
        others = [j for j in range(len(case.bias)) if j not in row]
        slopes, gaps = ahead(case.weight, case.bias, row, others)
        if pair is not None:
            tied = row.index(pair[0]) * len(others) + others.index(pair[1])
            slopes, gaps = np.vstack([slopes, -slopes[tied]]), np.append(gaps, -gaps[tied])
        nearest = shortest_move(slopes, gaps + slopes @ case.centre)
        assert_allclose(kernel.upper[n], nearest, rtol=1e-6)
    for radius in (0.3, 1.0, 3.0):  # ends the search and never changes the answer
        cut = case.distances(radius)
        assert (cut.state != OPEN).all()
        assert_array_equal(cut.state == MET, kernel.upper < radius)
        assert (cut.lower[cut.state == BEYOND] >= radius).all()
        assert (cut.lower <= kernel.upper).all()


def test_rounding_that_no_bound_covers_is_left_open_and_settled_exactly():
    # the facet of 0 and 1 is x = 1, and its distance the radius itself, or a step off it
    weight, bias = np.array([[1.0], [-1.0]]), np.array([0.0, 2.0])
    inside, pair = np.array([[True, False]]), np.array([[0, 1]])
    for radius, state in [(1.0 - 1e-9, BEYOND), (1.0, OPEN), (1.0 + 1e-9, MET)]:
        kernel = cell_distance(ball_around(weight, bias, 0.0, radius, 1.0), inside, pair)
        assert kernel.state.tolist() == [state]
    exact = exact_nearest(Arrangement.of(weight, bias), {0}, [Fraction(0)], (0, 1))
    assert exact.squared == 1


def test_an_infinite_distance_is_proved_and_not_only_large():
    # w2 is nearly the mean of w0 and w1: the cell of 2 is far away, or nowhere
    for lift, state, expected in [(2.0**-40, MET, 2**80), (0.0, EMPTY, None)]:
        weight = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, lift]])
        bias = np.array([0.0, 0.0, -1.0])
        exact = exact_nearest(Arrangement.of(weight, bias), {2}, [Fraction(0)] * 2)
        assert exact.squared == expected
        ball = ball_around(weight, bias, 0.0, math.inf, 1.0)
        kernel = cell_distance(ball, np.array([[False, False, True]]), np.array([[-1, -1]]))
        assert kernel.state[0] in (state, OPEN)
    weight, bias = np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([0.0, 1.0])
    inside = np.array([[True, False], [True, False], [False, True], [False, True]])
    pairs = np.array([[-1, -1], [0, 1], [-1, -1], [1, 0]])
    apart = cell_distance(ball_around(weight, bias, 0.0, math.inf, 1.0), inside, pairs)
    assert apart.state.tolist() == [EMPTY, EMPTY, MET, EMPTY]
    assert apart.upper[2] == 0.0
    same = cell_distance(ball_around(weight, np.zeros(2), 0.0, math.inf, 1.0), inside, pairs)
    assert same.state.tolist() == [OPEN] * 4


def test_the_interior_of_a_facet_is_told_from_a_corner_and_from_a_shared_facet():
    cross = Arrangement.of(np.vstack([np.eye(2), -np.eye(2)]), np.zeros(4))
    line = np.array([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [-2.0, 0.0]])
    duplicates = Arrangement.of(line, np.zeros(4))
    for arrangement, cell, pair, expected in (
        (cross, {0}, (0, 1), Inner.WHOLE),
        (cross, {0}, (0, 2), Inner.THIN),
        (cross, {0}, None, Inner.WHOLE),
        (duplicates, {0, 2}, (0, 1), Inner.SHARED),
        (duplicates, {0, 3}, None, Inner.THIN),
    ):
        assert inner(arrangement, cell, [Fraction(0), Fraction(0)], pair) is expected


def test_square_roots_are_bracketed_by_neighbours():
    for value in (Fraction(2), Fraction(1, 3), Fraction(10) ** 300, Fraction(1, 10**280)):
        lower, upper = root_bracket(value)
        assert Fraction(lower) ** 2 <= value <= Fraction(upper) ** 2
        assert upper - lower <= 4.0 * math.ulp(lower)
    assert root_bracket(Fraction(0)) == (0.0, 0.0)


# ------------------------------------------------------------------------------- the walk by levels
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
