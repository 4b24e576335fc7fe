"""The compiled search for the nearest point against its reference, exact arithmetic and NNLS."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import nnls

from moegeom.studies.cells.ball._cell_answer import BEYOND, EMPTY, MET, OPEN, ball_around
from moegeom.studies.cells.ball.cell_distance import Distances, cell_distance
from moegeom.studies.cells.ball.nearest import arrangement_of, nearest, shifted
from moegeom.studies.cells.exact.exact_nearest import Inner, exact_nearest, inner, root_bracket

#: Distances agree to this many parts; both are well inside their brackets.
RTOL = 1e-7

SHAPES = [(8, 2, 1), (8, 2, 2), (12, 3, 3), (16, 4, 5), (10, 3, 8)]


class Case:
    """A router, a centre, and cells and facets of it: some around, most of them nowhere."""

    def __init__(self, experts: int, k: int, d: int, count: int = 12) -> None:
        generator = np.random.default_rng(experts * 100 + d)
        self.weight, self.bias = (
            generator.standard_normal((experts, d)),
            generator.normal(size=experts),
        )
        self.centre = generator.standard_normal(d) * 0.5
        near = self.centre + generator.standard_normal((count, d)) * 2.0
        rows = np.argsort(-(near @ self.weight.T + self.bias), axis=1)[:, :k]
        rows = np.concatenate([rows, [generator.permutation(experts)[:k] for _ in range(count)]])
        self.rows = [sorted(row) for row in rows.tolist()]
        self.asked = [(row, pair(row)) for row in self.rows for pair in self._choices(generator)]

    def _choices(self, generator):
        experts = len(self.bias)

        def facet(row):
            others = sorted(set(range(experts)) - set(row))
            return int(generator.choice(row)), int(generator.choice(others))

        return (lambda row: None), facet, facet, facet

    def found(self, radius: float = math.inf) -> Distances:
        inside = np.zeros((len(self.asked), len(self.bias)), np.bool_)
        for n, (row, _) in enumerate(self.asked):
            inside[n, row] = True
        pairs = np.array([pair or (-1, -1) for _, pair in self.asked], np.int64)
        shift, error = shifted(self.weight, self.bias, self.centre)
        ball = ball_around(self.weight, shift, error.max(), radius, 1.0)
        return cell_distance(ball, inside, pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_brackets_of_kernel_and_reference_hold_the_exact_distance(shape):
    case = Case(*shape)
    found = case.found()
    exact = arrangement_of(case.weight, case.bias)
    centre = [Fraction(value) for value in case.centre.tolist()]
    assert {MET, EMPTY} >= set(found.state.tolist())  # random numbers leave nothing open
    for n, (row, pair) in enumerate(case.asked):
        expected = exact_nearest(exact, frozenset(row), centre, pair)
        ours = nearest(case.weight, case.bias, row, case.centre, pair)
        if expected.squared is None:
            assert found.state[n] == EMPTY
            assert ours.distance == found.lower[n] == math.inf
            assert np.isnan(ours.point).all()
            continue
        assert found.state[n] == MET
        for lower, upper in [(found.lower[n], found.upper[n]), (ours.lower, ours.upper)]:
            assert Fraction(lower) ** 2 <= expected.squared <= Fraction(upper) ** 2
            assert upper - lower <= RTOL * upper
        length = np.linalg.norm(found.step[n])
        np.testing.assert_allclose(ours.distance, length, rtol=RTOL, atol=0.0)
        np.testing.assert_allclose(ours.point, case.centre + found.step[n], rtol=1e-5, atol=1e-5)


def test_facets_far_from_the_centre_are_proved_in_float64():
    case = Case(12, 3, 3)
    case.centre = case.centre * 1e8
    found = case.found()
    assert OPEN not in found.state.tolist()
    exact = arrangement_of(case.weight, case.bias)
    centre = [Fraction(value) for value in case.centre.tolist()]
    for n in np.flatnonzero(found.state == MET).tolist():
        row, pair = case.asked[n]
        squared = exact_nearest(exact, frozenset(row), centre, pair).squared
        assert squared is not None
        assert Fraction(found.lower[n]) ** 2 <= squared <= Fraction(found.upper[n]) ** 2
        assert found.upper[n] - found.lower[n] <= RTOL * found.upper[n]
    assert (found.state == MET).sum() > 20


@pytest.mark.parametrize("seed", range(40))
def test_the_exact_point_and_its_multipliers_satisfy_the_conditions_of_optimality(seed):
    """Karush, Kuhn and Tucker, or Farkas, in fractions: ties, equal rows and cones among them."""
    generator = np.random.default_rng(seed)
    experts, d = 4 + seed % 5, 1 + seed % 4
    weight = generator.integers(-2, 3, (experts, d)) / generator.choice([1, 4])
    bias = generator.integers(-2, 3, experts) * float(seed % 3 > 0)
    centre = [Fraction(int(c), 7) for c in generator.integers(-3, 4, d)]
    k = int(generator.integers(1, experts))
    chosen = sorted(generator.permutation(experts)[:k].tolist())
    others = [j for j in range(experts) if j not in chosen]
    exchanged = None if seed % 2 else (chosen[0], others[-1])
    found = exact_nearest(arrangement_of(weight, bias), frozenset(chosen), centre, exchanged)
    slopes = [
        [Fraction(a) - Fraction(b) for a, b in zip(weight[i], weight[j], strict=True)]
        for i, j in found.pairs
    ]
    total = [
        sum((v * row[m] for v, row in zip(found.multipliers, slopes, strict=True)), Fraction())
        for m in range(d)
    ]
    for pair, value in zip(found.pairs, found.multipliers, strict=True):
        assert value >= 0 or pair == exchanged

    def logits(x):
        return [
            sum((Fraction(w) * c for w, c in zip(row, x, strict=True)), Fraction(offset))
            for row, offset in zip(weight.tolist(), bias.tolist(), strict=True)
        ]

    at = logits(centre if found.point is None else found.point)
    gaps = [at[i] - at[j] for i, j in found.pairs]
    if found.point is None:
        assert not any(total)
        assert sum(v * gap for v, gap in zip(found.multipliers, gaps, strict=True)) < 0
        return
    assert not any(gaps)
    assert total == [x - c for x, c in zip(found.point, centre, strict=True)]
    assert found.squared == sum(step * step for step in total)
    assert min(at[i] for i in chosen) >= max(at[j] for j in others)
    assert exchanged is None or at[exchanged[0]] == at[exchanged[1]]


def least_distance(slopes: np.ndarray, gaps: np.ndarray) -> float:
    """Lawson and Hanson's problem LDP: the shortest y with slopes y + gaps >= 0, by scipy's NNLS."""
    matrix = np.vstack([slopes.T, -gaps])
    target = np.append(np.zeros(slopes.shape[1]), 1.0)
    weights, _ = nnls(matrix, target, maxiter=10_000)
    residual = matrix @ weights - target
    if np.linalg.norm(residual) < 1e-8:
        return math.inf
    return float(np.linalg.norm(residual[:-1] / residual[-1]))


@pytest.mark.parametrize("shape", SHAPES)
def test_distances_are_those_of_least_distance_programming(shape):
    case = Case(*shape)
    found = case.found()
    for n, (row, pair) in enumerate(case.asked):
        others = [j for j in range(len(case.bias)) if j not in row]
        slopes = (case.weight[row][:, None] - case.weight[others][None]).reshape(-1, shape[2])
        gaps = (case.bias[row][:, None] - case.bias[others][None]).ravel() + slopes @ case.centre
        if pair is not None:
            tied = row.index(pair[0]) * len(others) + others.index(pair[1])
            slopes, gaps = np.vstack([slopes, -slopes[tied]]), np.append(gaps, -gaps[tied])
        np.testing.assert_allclose(found.upper[n], least_distance(slopes, gaps), rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [0.3, 1.0, 3.0])
def test_a_radius_ends_the_search_and_never_changes_the_answer(shape, radius):
    case = Case(*shape)
    whole, cut = case.found(), case.found(radius)
    assert (cut.state != OPEN).all()
    np.testing.assert_array_equal(cut.state == MET, whole.upper < radius)
    assert (cut.lower[cut.state == BEYOND] >= radius).all()
    assert (cut.lower <= whole.upper).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_multipliers_prove_the_distance_or_the_contradiction(shape):
    """The gradient of half the squared distance is the sum of the active slopes."""
    case = Case(*shape)
    found = case.found()
    for n, (_, pair) in enumerate(case.asked):
        rows = [row for row in found.pairs[n].tolist() if row[0] >= 0]
        weights = found.multipliers[n, : len(rows)]
        slopes = np.array([case.weight[i] - case.weight[j] for i, j in rows])
        total = weights @ slopes if rows else np.zeros(shape[2])
        gaps = [
            slope @ case.centre + case.bias[i] - case.bias[j]
            for slope, (i, j) in zip(slopes, rows, strict=True)
        ]
        assert all(w >= 0.0 or tuple(row) == pair for w, row in zip(weights, rows, strict=True))
        if found.state[n] == EMPTY:
            np.testing.assert_allclose(total, 0.0, atol=1e-9 * np.abs(weights).max())
            assert weights @ gaps < 0.0
        else:
            np.testing.assert_allclose(total, found.step[n], rtol=1e-6, atol=1e-6)


def test_rounding_that_no_bound_covers_is_left_open_and_settled_exactly():
    # the facet of 0 and 1 is x = 1, and its distance the radius itself, or a step off it
    weight, bias = np.array([[1.0], [-1.0]]), np.array([0.0, 2.0])
    inside, pair = np.array([[True, False]]), np.array([[0, 1]])
    for radius, state in [(1.0 - 1e-9, BEYOND), (1.0, OPEN), (1.0 + 1e-9, MET)]:
        found = cell_distance(ball_around(weight, bias, 0.0, radius, 1.0), inside, pair)
        assert found.state.tolist() == [state]
    ours = nearest(weight, bias, [0], np.zeros(1), (0, 1))
    assert ours.lower <= 1.0 <= ours.upper


def test_an_infinite_distance_is_proved_and_not_only_large():
    # w2 is nearly the mean of w0 and w1: the cell of 2 is far away, or nowhere
    for lift, state in [(2.0**-40, MET), (0.0, EMPTY)]:
        weight = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, lift]])
        bias = np.array([0.0, 0.0, -1.0])
        ours = nearest(weight, bias, [2], np.zeros(2))
        assert (ours.upper == math.inf) == (state == EMPTY)
        assert ours.proof == ("exact" if state == EMPTY else ours.proof)
        expected = 2.0**40 if state == MET else math.inf
        np.testing.assert_allclose(ours.distance, expected, rtol=1e-9)
        inside = np.array([[False, False, True]])
        ball = ball_around(weight, bias, 0.0, math.inf, 1.0)
        found = cell_distance(ball, inside, np.array([[-1, -1]]))
        assert found.state[0] in (state, OPEN)


def test_equal_rows_part_nowhere():
    weight, bias = np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([0.0, 1.0])
    inside = np.array([[True, False], [True, False], [False, True], [False, True]])
    pairs = np.array([[-1, -1], [0, 1], [-1, -1], [1, 0]])
    found = cell_distance(ball_around(weight, bias, 0.0, math.inf, 1.0), inside, pairs)
    assert found.state.tolist() == [EMPTY, EMPTY, MET, EMPTY]
    assert found.upper[2] == 0.0
    same = cell_distance(ball_around(weight, np.zeros(2), 0.0, math.inf, 1.0), inside, pairs)
    assert same.state.tolist() == [OPEN] * 4


def test_the_interior_of_a_facet_is_told_from_a_corner_and_from_a_shared_facet():
    centre = [Fraction(0), Fraction(0)]
    cross = arrangement_of(
        np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]), np.zeros(4)
    )
    assert inner(cross, {0}, centre, (0, 1)) is Inner.WHOLE
    assert inner(cross, {0}, centre, (0, 2)) is Inner.THIN
    assert inner(cross, {0}, centre) is Inner.WHOLE
    duplicates = arrangement_of(
        np.array([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [-2.0, 0.0]]), np.zeros(4)
    )
    assert inner(duplicates, {0, 2}, centre, (0, 1)) is Inner.SHARED
    assert inner(duplicates, {0, 3}, centre) is Inner.THIN


@pytest.mark.parametrize(
    "value", [Fraction(2), Fraction(1, 3), Fraction(10) ** 300, Fraction(1, 10**280)]
)
def test_square_roots_are_bracketed_by_neighbours(value):
    lower, upper = root_bracket(value)
    assert Fraction(lower) ** 2 <= value <= Fraction(upper) ** 2
    assert upper - lower <= 4.0 * math.ulp(lower)
    assert root_bracket(Fraction(0)) == (0.0, 0.0)
