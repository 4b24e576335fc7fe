"""Oracles: programs of SciPy over every neighbouring cell, split and pair, with nothing pruned.

Nearest inputs with another choice by nonnegative least squares; of ties of several experts by SLSQP and,
where logits move, by HiGHS; in front of an RMS norm by SLSQP.
"""

from itertools import combinations, product

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_less
from scipy.optimize import linprog, minimize
from scipy.special import expit

from moegeom.core.router import Rule, Weights
from moegeom.geometry.boundary import linear
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.orders import (
    free_logit_distance,
    least_distance,
    logit_distance,
    order_distance,
    row_coordinates,
)
from moegeom.geometry.selection import top_k
from moegeom.kernels.cpu.curved_distance import curved_distance
from tests.by_day import by_day
from tests.oracle.helpers import ahead, distance_to_boundary, router, shortest_move


def assert_is_nearest(weight, bias, y, k) -> None:
    """The distance is the least to a neighbouring cell, each with all its k (E - k) constraints."""
    logits = y @ weight.T + bias
    chosen = top_k(logits, k)
    nearest = []
    for point, own in zip(y, chosen.tolist(), strict=True):
        others = [j for j in range(len(weight)) if j not in own]
        cells = []
        for out, entering in product(own, others):
            inside = [i for i in own if i != out] + [entering]
            outside = [j for j in others if j != entering] + [out]
            normals, levels = ahead(weight, bias, inside, outside)
            cells.append(shortest_move(normals, normals @ point + levels))
        nearest.append(min(cells))
    ours = linear.boundary_distance(logits, chosen, linear.row_distances(weight, bias)).distance
    assert_allclose(ours, nearest, rtol=1e-7)


#: Experts, hidden, k: a pair is redundant as soon as experts > hidden + 1.
CASES = [(5, 6, 2), (4, 8, 1), (6, 7, 5), (7, 2, 2), (9, 3, 3), (12, 2, 1)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("experts", "hidden", "k"), CASES)
def test_the_distance_is_that_of_the_nearest_neighbouring_cell(experts, hidden, k, has_bias):
    random = np.random.default_rng([experts, hidden, k, has_bias])
    spread = random.uniform(0.5, 1.5, (experts, 1))
    weight = spread * random.standard_normal((experts, hidden))
    bias = has_bias * random.standard_normal(experts)
    assert_is_nearest(weight, bias, random.standard_normal((6, hidden)) * 2, k)


def test_redundant_equal_and_zero_rows_do_not_change_the_distance():
    """With 40 rows in a plane nearly all of the pairs are redundant."""
    weight, bias = router(40, 2, 11)
    assert_is_nearest(weight, 0.3 * bias, np.random.default_rng(11).standard_normal((2, 2)), 2)
    weight, bias = router(6, 5, 12)
    y = np.random.default_rng(12).standard_normal((12, 5)) * 2
    weight[4] = weight[1]
    assert_is_nearest(weight, bias, y, 2)
    weight[3] = 0.0
    assert_is_nearest(weight, bias, y, 3)


# -------------------------------------------------------------------------- ties of several experts
def splits(experts, k, order):
    """Tied experts, those above and those below, as docs/theory.md A4 counts them."""
    for tied in combinations(range(experts), order + 1):
        others = [e for e in range(experts) if e not in tied]
        for size in range(max(k - order, 0), min(k - 1, len(others)) + 1):
            for above in combinations(others, size):
                yield tied, above, [e for e in others if e not in above]


def as_constraints(weight, z, tied, above, below):
    """What is 0 and what is at least 0 behind a move: rows and levels of each."""
    first, others = tied[0], [*above, *below]
    sign = np.array([1.0] * len(above) + [-1.0] * len(below))
    same, rest = list(tied[1:]), others
    sides = sign[:, None] * (weight[rest] - weight[first]), sign * (z[rest] - z[first])
    return weight[same] - weight[first], z[same] - z[first], *sides


def by_programs(weight, z, k, order):
    """Least t with |W x| <= t such that experts tie and split."""
    experts, hidden = weight.shape
    best, minus = np.inf, -np.ones((experts, 1))
    within = np.vstack([np.hstack([weight, minus]), np.hstack([-weight, minus])])
    for split in splits(experts, k, order):
        same, gaps, sides, heights = as_constraints(weight, z, *split)
        solved = linprog(
            np.eye(hidden + 1)[-1],
            A_ub=np.vstack([within, np.pad(-sides, ((0, 0), (0, 1)))]),
            b_ub=np.append(np.zeros(2 * experts), heights),
            A_eq=np.pad(same, ((0, 0), (0, 1))),
            b_eq=-gaps,
            bounds=(None, None),
        )
        best = min(best, solved.fun) if solved.status == 0 else best
    return best


@pytest.mark.parametrize(
    ("experts", "hidden", "k", "order"),
    [
        *((4, 2, 1, 2), (5, 3, 2, 1), (5, 3, 2, 3), (6, 2, 3, 2), (6, 4, 2, 2)),
        *((5, 7, 2, order) for order in (1, 2, 3)),
    ],
)
def test_dependent_rows_alone_need_the_programs(experts, hidden, k, order):
    random = np.random.default_rng([experts, hidden, k, order])
    weight = random.standard_normal((experts, hidden))
    z = weight @ random.standard_normal(hidden) + 0.5 * random.standard_normal(experts)
    distance = logit_distance(z, weight, k, order)
    assert distance.is_exact
    assert_allclose(distance.upper, by_programs(weight, z, k, order), rtol=1e-5)
    # half the spread is a bound below, which independent rows reach
    free = free_logit_distance(z[None], k, order)[0]
    assert free == distance.upper if hidden > experts else free <= distance.upper * (1.0 + 1e-6)


def test_rows_that_depend_on_one_are_searched_and_least_distances_are_slsqps():
    """Rank E - 1 with independent differences: every order of logits occurs, no common shift."""
    weight = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    z = np.array([1.0, 0.3, 0.0])
    found = logit_distance(z, weight, 1, 2)
    assert_allclose(found.upper, by_programs(weight, z, 1, 2), rtol=1e-6)
    assert_allclose(found.upper, 1.0, rtol=1e-6)
    assert free_logit_distance(z[None], 1, 2)[0] == 0.5
    random = np.random.default_rng(5)
    impossible = 0
    for _ in range(30):
        count, dims = int(random.integers(1, 9)), int(random.integers(1, 6))
        normals, offsets = random.standard_normal((count, dims)), random.standard_normal(count)
        found = least_distance(normals, offsets, 0.0)
        program = minimize(
            lambda x: x @ x,
            np.zeros(dims),
            jac=lambda x: 2.0 * x,
            constraints={"type": "ineq", "fun": lambda x, a=normals, b=offsets: a @ x - b},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 300},
        )
        if np.isinf(found.bound):
            impossible += 1
            assert (normals @ program.x - offsets).min() < -1e-6
            continue
        assert_allclose(found.bound, np.linalg.norm(program.x), rtol=1e-6, atol=1e-9)
        assert_allclose(np.linalg.norm(found.point), found.bound, rtol=1e-9)
        assert_array_less(offsets - 1e-9, normals @ found.point)
    assert 0 < impossible < 15


def by_program(weight, z, split):
    """Least length of a move that ends in the polyhedron; inf when SLSQP finds no point of it."""
    same, gaps, sides, heights = as_constraints(weight, z, *split)
    constraints = [{"type": "eq", "fun": lambda x: same @ x + gaps, "jac": lambda x: same}]
    if len(sides):
        constraints.append(
            {"type": "ineq", "fun": lambda x: sides @ x + heights, "jac": lambda x: sides}
        )
    found = minimize(
        lambda x: x @ x,
        np.zeros(weight.shape[1]),
        jac=lambda x: 2.0 * x,
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 200},
    )
    is_met = np.abs(same @ found.x + gaps).max() < 1e-7
    is_met &= (sides @ found.x + heights).min(initial=0.0) > -1e-7
    return float(np.linalg.norm(found.x)) if is_met else np.inf


#: experts, hidden, k, order
ORDERS = [
    (4, 4, 1, 2), (5, 3, 2, 2), (5, 6, 2, 3), (6, 2, 3, 2),
    (6, 5, 3, 2), (6, 4, 5, 3), (6, 5, 1, 5), (7, 3, 2, 2),
]  # fmt: skip
#: By day small ones, of which every other one has a bias.
TURNS = [(case, n % 2 == 1) for n, case in enumerate(ORDERS) if n not in (4, 7)]


@pytest.mark.parametrize(("case", "has_bias"), by_day(product(ORDERS, [False, True]), TURNS))
def test_the_distance_is_that_of_the_nearest_polyhedron(case, has_bias):
    experts, hidden, k, order = case
    random = np.random.default_rng([experts, hidden, k, order, has_bias])
    spread = random.uniform(0.3, 1.5, (experts, 1))
    weight = spread * random.standard_normal((experts, hidden))
    bias = has_bias * random.standard_normal(experts)
    z = weight @ random.standard_normal(hidden) * 2.0 + bias
    expected = min(by_program(weight, z, split) for split in splits(experts, k, order))
    distance = order_distance(z, row_coordinates(weight), k, order)
    assert distance.is_exact
    assert_allclose(distance.upper, expected, rtol=1e-6)


# ------------------------------------------------------------------------------------------- angles
def logits_of(rows, bias, x):
    """Logits behind a norm without epsilon; rows times the gain."""
    return np.sqrt(len(x)) * rows @ x / np.linalg.norm(x) + bias


def nearest_by_minimisation(scores, x, k):
    """min |x' - x| over every pair of a chosen and another expert that ties at x'."""
    chosen = top_k(scores(x)[None], k)[0].tolist()
    others = set(range(len(scores(x)))) - set(chosen)
    return min(
        distance_to_boundary(x, lambda z, i=i, j=j: scores(z)[i] - scores(z)[j])
        for i, j in product(chosen, others)
    )


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_the_sine_of_the_angle_is_the_distance_over_the_length(spread):
    random = np.random.default_rng(1)
    experts, dimension, k = 5, 4, 2
    rows = random.standard_normal((experts, dimension))
    bias = spread * random.standard_normal(experts)
    x = random.standard_normal(dimension)
    logits = logits_of(rows, bias, x)[None]
    chosen = top_k(logits, k)
    length = np.array([np.sqrt(dimension)])
    (angle,) = linear.boundary_angle(logits, chosen, linear.cones_of(rows, bias), length)
    expected = nearest_by_minimisation(lambda z: logits_of(rows, bias, z), x, k)
    if np.isfinite(angle) and angle < np.pi / 2:
        assert_allclose(np.sin(angle) * np.linalg.norm(x), expected, rtol=1e-5)


def test_the_worked_cone_and_degenerate_points_have_their_angles():
    """Rows differ by (1, -1), biases by 1, x = (3, 1): the tie is at 15 degrees, x at 18.43."""
    rows, bias = np.array([[1.0, -1.0], [0.0, 0.0]]), np.array([0.0, 1.0])
    x = np.array([3.0, 1.0])
    logits, length = logits_of(rows, bias, x)[None], np.array([np.sqrt(2.0)])
    (angle,) = linear.boundary_angle(logits, top_k(logits, 1), linear.cones_of(rows, bias), length)
    assert_allclose(angle, np.arctan2(1, 3) - np.deg2rad(15), rtol=1e-12)
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])

    def angle(logits, chosen, bias):
        chosen, length = np.array([chosen], np.int32), np.array([np.sqrt(2.0)])
        return linear.boundary_angle(
            np.array([logits]), chosen, linear.cones_of(rows, np.array(bias)), length
        )[0]

    assert angle([1.0, 1.0, 0.0], [0], [0.0] * 3) == 0.0
    assert angle([1.0, 1.0, 0.0], [0, 1, 2], [0.0] * 3) == np.inf
    assert angle([1.0, 9.0, 0.0], [1], [0.0, 8.0, -20.0]) == np.inf
    found = linear.angle_bound(np.array([0.0, 1.0, 2.0, 2.1, np.inf]), np.ones(5))
    assert_allclose(found, [0.0, np.pi / 3, np.pi, np.inf, np.inf])


@pytest.mark.parametrize("seed", range(2))
def test_the_bound_behind_curved_boundaries_is_below_the_least_angle_and_near_it(seed):
    random = np.random.default_rng(seed)
    experts, dimension, k = 5, 12, 2
    rows = random.standard_normal((experts, dimension)) / np.sqrt(dimension)
    bias = 0.1 * random.standard_normal(experts)
    rule = Rule(k, "sigmoid", Weights("scores"), has_selection_bias=True)
    x = random.standard_normal(dimension)

    def selection(z):
        return expit(logits_of(rows, 0.0, z)) + bias

    logits = logits_of(rows, 0.0, x)[None]
    chosen = top_k(selection(x)[None], k)
    distance, _, _ = curved_distance(logits, chosen, curved_rows(rows, rule, None, bias))
    (bound,) = linear.angle_bound(distance, np.array([np.sqrt(dimension)]))
    # scores are those of a direction: the sine of the least angle is the distance over the length
    best = np.arcsin(nearest_by_minimisation(selection, x, k) / np.linalg.norm(x))
    assert bound <= best * (1.0 + 1e-6)
    assert bound > 0.7 * best  # it is no trivial bound
