"""Oracles: SciPy's functions and derivatives, SLSQP, boundaries by one logit, and a dense search;
for linear rules programs of SciPy over every neighbouring cell, split and pair, with nothing
pruned.

Nearest inputs with another choice by nonnegative least squares; of ties of several experts by SLSQP
and, where logits move, by HiGHS; in front of an RMS norm by SLSQP.
"""

import math
from itertools import product

import numpy as np
import pytest
from numba import njit
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less
from scipy.differentiate import derivative
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit, softmax

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary import linear
from moegeom.geometry.boundary.curved import BENDS, ScoreCurve, curved_rows
from moegeom.geometry.selection import route, top_k
from moegeom.kernels.cpu.curved_distance import curved_distance
from moegeom.kernels.cpu.score_curve import curve_at, curve_inverse, curve_of, curve_slopes
from tests.by_day import by_day
from tests.oracle import helpers

CURVES = [ScoreCurve(score, cap) for score in helpers.FUNCTIONS for cap in (math.inf, 1.5, 6.0)]
GRID = np.linspace(-12.0, 12.0, 4801)
every_curve = pytest.mark.parametrize("curve", CURVES, ids=lambda c: f"{c.score}-{c.soft_cap}")


def function_of(curve):
    inner, cap = helpers.FUNCTIONS[curve.score], curve.soft_cap
    return inner if math.isinf(cap) else lambda z: inner(cap * np.tanh(z / cap))


@njit
def points_of(curve, logits):
    """Score, rest and slope at each logit."""
    return [curve_at(curve, z) for z in logits]


@njit
def inverses_of(curve, points):
    """Logit and slope from each score and rest."""
    return [curve_inverse(curve, points[n, 0], points[n, 1]) for n in range(len(points))]


@njit
def slopes_of(curve, ends):
    """Least and largest slope between each two logits."""
    return [curve_slopes(curve, ends[n, 0], ends[n, 1]) for n in range(len(ends))]


def tabulated(loop, curve, given):
    return np.array(loop(curve_of(curve), np.array(given)))


def slopes_at(curve, logits):
    """The third after score and rest."""
    return tabulated(points_of, curve, logits)[:, 2]


@every_curve
def test_values_slopes_inverses_and_ranges_are_scipys(curve):
    points = tabulated(points_of, curve, GRID)
    function = function_of(curve)
    assert_allclose(points[:, 0], function(GRID), rtol=1e-12, atol=1e-300)
    slopes = derivative(function, GRID, initial_step=0.1).df
    assert_allclose(points[:, 2], slopes, rtol=1e-5, atol=1e-9)
    near = np.abs(GRID) < 3.0 if math.isfinite(curve.soft_cap) else np.abs(GRID) < 12.0
    back = tabulated(inverses_of, curve, points[near, :2])
    assert_allclose(back[:, 0], GRID[near], rtol=1e-6, atol=1e-9)
    assert_allclose(back[:, 1], points[near, 2], rtol=1e-6)
    found = curve_of(curve)
    with np.errstate(over="ignore"):
        ends = helpers.FUNCTIONS[curve.score](np.array([-curve.soft_cap, curve.soft_cap]))
    assert_allclose([found.low, found.high], ends, rtol=1e-14)


@every_curve
def test_no_derivative_leaves_its_bound_nor_a_slope_between_two_logits(curve):
    bends, step = curve.bends, GRID[1] - GRID[0]
    slopes = slopes_at(curve, GRID)
    second = (slopes[2:] - slopes[:-2]) / (2.0 * step)
    assert slopes.max() <= bends.steepest * (1.0 + 1e-9)
    assert np.abs(second).max() <= bends.bend * (1.0 + 1e-9) + 1e-12
    steep = slopes[1:-1] > 1e-12
    share = np.abs(np.log(slopes[2:] / slopes[:-2])[steep]) / (2.0 * step)
    assert share.max() <= bends.log_slope * (1.0 + 1e-6) + 1e-9
    inside = GRID[(curve.bends.convex_until > GRID) & (np.abs(GRID) < 6.0)]
    if inside.size:
        inverse = 1.0 / slopes_at(curve, inside)
        assert_array_less(-1e-9 * inverse[1:-1], np.diff(inverse, 2))
    random = np.random.default_rng(5)
    ends = np.sort(random.uniform(-8.0, 8.0, (200, 2)))
    least, most = tabulated(slopes_of, curve, ends).T
    inside = slopes_at(curve, np.linspace(*ends.T, 50).ravel()).reshape(50, 200)
    assert (least <= inside.min(axis=0) * (1.0 + 1e-12)).all()
    assert (inside.max(axis=0) <= most * (1.0 + 1e-9)).all()


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_the_bounds_are_reached(score):
    """So that a constant cannot be far too large: largest slope, where it is, largest bend."""
    curve, own = ScoreCurve(score), BENDS[score]
    slopes = slopes_at(curve, GRID)
    assert_allclose(slopes.max(), own.steepest, rtol=1e-5)
    assert_allclose(GRID[slopes.argmax()], own.peak, atol=0.006)
    second = np.gradient(slopes, GRID)
    assert_allclose(np.abs(second).max(), own.bend, rtol=1e-4)
    convex = np.diff(1.0 / slopes, 2)
    if math.isfinite(own.convex_until):
        first_concave = GRID[1:-1][convex < 0.0].min()
        assert_allclose(first_concave, own.convex_until, atol=0.01)


def test_far_out_a_sigmoid_keeps_the_distance_to_one():
    curve = ScoreCurve("sigmoid")
    points = tabulated(points_of, curve, [60.0])
    assert_allclose(points[0, 1], expit(-60.0), rtol=1e-14)
    back = tabulated(inverses_of, curve, [points[0, :2], [0.25, 0.75]])
    assert_allclose(back[:, 0], [60.0, logit(0.25)])


# ---------------------------------------------------------------------------------------- distances
HIDDEN, STARTS = 3, 2
SCORE = Weights("scores")


#: Rule, number of experts, spread of selection biases, tokens.
SEPARABLE = [
    (Rule(1, "sigmoid", SCORE, True), 3, 0.2, 10),
    (Rule(2, "sigmoid", SCORE, True, logit_map=LogitMap(1.0, 3.0)), 3, 0.2, 10),
    (Rule(1, "sqrt_softplus", SCORE, True), 3, 0.3, 10),
    (Rule(1, "sqrt_softplus", SCORE, True, logit_map=LogitMap(0.5, 2.0)), 3, 0.3, 10),
    (Rule(1, "identity", SCORE, True, logit_map=LogitMap(1.0, 2.0)), 3, 0.5, 10),
]
SPREADS = {"sigmoid": 0.2, "softmax": 0.02, "identity": 0.2}


def grouped(score, kind, fill):
    rule = Rule(2, score, SCORE, True, groups=GroupMask(3, 2, kind, fill))
    return rule, 6, SPREADS[score], 10


BOUNDED = [
    (Rule(1, "softmax", SCORE, True), 3, 0.05, 30),
    *(grouped(*case) for case in product(SPREADS, ("max", "top2_sum"), (-np.inf, 0.0))),
]
BOUNDED_BY_DAY = {
    "softmax": BOUNDED[0],
    "groups by maximum": grouped("sigmoid", "max", -np.inf),
    "groups by sum": grouped("softmax", "top2_sum", -np.inf),
    "groups by maximum, filled": grouped("identity", "max", 0.0),
    "groups by sum, filled": grouped("sigmoid", "top2_sum", 0.0),
}


def derivatives(z, rule):
    """Scores of one token, and their Jacobian in the logits, by hand."""
    if rule.score == "softmax":
        q = softmax(z)
        return q, np.diag(q) - np.outer(q, q)
    if rule.logit_map is None:
        return helpers.FUNCTIONS[rule.score](z), np.diag(helpers.SLOPES[rule.score](z))
    multiplier, cap = rule.logit_map.multiplier, rule.logit_map.soft_cap
    ratio = np.tanh(multiplier * z / cap)
    slope = helpers.SLOPES[rule.score](cap * ratio) * multiplier * (1.0 - ratio**2)
    return helpers.FUNCTIONS[rule.score](cap * ratio), np.diag(slope)


def nearest_on_boundary(weight, bias, rule, y, pair, starts):
    """Nearest points y' with q_i = q_j, one of each start that converged."""
    i, j = pair

    def gap(point):
        q, _ = derivatives(weight @ point, rule)
        return q[i] + bias[i] - q[j] - bias[j]

    def gradient(point):
        _, jacobian = derivatives(weight @ point, rule)
        return (jacobian[i] - jacobian[j]) @ weight

    yield from helpers.points_of_boundary(y, gap, starts, gradient)


def compare(rule, experts, spread, tokens):
    """Bounds, and for each token the points of its boundaries that were found, behind them by a hair."""
    random = np.random.default_rng([experts, tokens, rule.top_k])
    for _ in range(tokens // 10):
        weight = random.standard_normal((experts, HIDDEN))
        bias = spread * random.standard_normal(experts)
        y = random.standard_normal((10, HIDDEN))
        logits = y @ weight.T
        chosen = route(logits, rule, bias).chosen
        lower, upper, _ = curved_distance(logits, chosen, curved_rows(weight, rule, None, bias))
        for token in range(10):
            others = sorted(set(range(experts)) - set(chosen[token].tolist()))
            starts = y[token] + 0.5 * random.standard_normal((STARTS, HIDDEN))
            points = [
                point
                for i in chosen[token]
                for j in others
                for point in nearest_on_boundary(weight, bias, rule, y[token], (i, j), starts)
            ]
            yield weight, bias, y[token], chosen[token], points, lower[token], upper[token]


@pytest.mark.parametrize(("rule", "experts", "spread", "tokens"), SEPARABLE)
def test_the_distance_is_that_of_the_nearest_point_of_any_boundary(rule, experts, spread, tokens):
    """Minimisation is never nearer, and from a few starts nearly always as near."""
    ratios = []
    for _, _, y, _, points, lower, upper in compare(rule, experts, spread, tokens):
        nearest = min((np.linalg.norm(point - y) for point in points), default=math.inf)
        assert lower <= nearest * (1.0 + 1e-7) + 1e-9
        if math.isfinite(nearest):
            ratios.append(nearest / upper)
    assert len(ratios) > 0.8 * tokens
    assert_array_less(1.0 - 2e-6, ratios)
    assert np.mean(np.array(ratios) < 1.0 + 2e-6) > 0.97


@pytest.mark.parametrize(("rule", "experts", "spread", "tokens"), by_day(BOUNDED, BOUNDED_BY_DAY))
def test_no_point_behind_a_boundary_is_nearer_than_the_lower_bound(rule, experts, spread, tokens):
    """Of the points found, those count where a step beyond the boundary changes the choice."""
    seen, nearest = 0, []
    for weight, bias, y, chosen, points, lower, upper in compare(rule, experts, spread, tokens):
        assert lower <= upper
        if points:
            steps = np.array(points) - y
            nearest.append((lower, np.linalg.norm(steps, axis=1).min(), upper))
            steps *= 1.0 + 1e-6
            sets = np.sort(route((y + steps) @ weight.T, rule, bias).chosen, axis=1)
            changed = (sets != np.sort(chosen)).any(axis=1)
            seen += changed.any()
            assert_array_less(lower, np.linalg.norm(steps[changed], axis=1))
    assert seen > 0.7 * tokens
    if rule.groups is None:
        # the nearest boundary is the distance, and the upper bound is no nearer than that
        lower, nearest, upper = np.array(nearest).T
        assert_array_less(lower, nearest * (1.0 + 1e-7) + 1e-12)
        # from a few starts a minimum may be missed
        assert np.mean(nearest < upper * (1.0 + 1e-6)) > 0.97
        assert_array_less(0.6, np.median(lower / nearest))
        assert_array_less(np.median(upper / nearest), 1.1)


# ------------------------------------------------------------------------------------ large routers
TOKENS = 3
#: The logit of a score; nan or inf where none has it.
INVERSES = {
    "identity": lambda s: s,
    "sigmoid": logit,
    "sqrt_softplus": lambda s: np.where(s > 0.0, np.log(np.expm1(s * s)), -np.inf),
}
#: Score, soft cap, experts, experts per token, spread of the selection biases.
ROUTERS = [
    ("sigmoid", math.inf, 64, 8, 0.2),
    ("sigmoid", math.inf, 256, 8, 0.05),
    ("sigmoid", 4.0, 64, 6, 0.2),
    ("sqrt_softplus", math.inf, 64, 6, 0.3),
    ("sqrt_softplus", 3.0, 64, 6, 0.3),
    ("identity", 3.0, 64, 8, 0.3),
]


class Boundaries:
    """All boundaries between chosen and other experts, as the square of the distance by one logit."""

    def __init__(self, weight, bias, score, cap, z, chosen) -> None:
        out = np.setdiff1d(np.arange(len(z)), chosen)
        self.i, self.j = (a.ravel() for a in np.meshgrid(chosen, out, indexing="ij"))
        self.u, self.v, self.delta = z[self.i], z[self.j], bias[self.i] - bias[self.j]
        gram = weight @ weight.T
        kii, kjj, kij = gram[self.i, self.i], gram[self.j, self.j], gram[self.i, self.j]
        det = kii * kjj - kij**2
        self.inverse = kjj / det, -kij / det, kii / det
        self.score, self.score_inverse = helpers.FUNCTIONS[score], INVERSES[score]
        self.cap = cap

    def square(self, there, pair=slice(None)):
        """(du, dv) K^-1 (du, dv)' with f(v') = f(u') + delta; inf where there is no v'."""
        a, b, c = (part[pair] for part in self.inverse)
        capped = there if math.isinf(self.cap) else self.cap * np.tanh(there / self.cap)
        with np.errstate(all="ignore"):
            other = self.score_inverse(self.score(capped) + self.delta[pair])
            if math.isfinite(self.cap):
                other = self.cap * np.arctanh(other / self.cap)
            du, dv = there - self.u[pair], other - self.v[pair]
            return np.nan_to_num(a * du * du + 2.0 * b * du * dv + c * dv * dv, nan=np.inf)

    def nearest(self):
        """Distance and pair: the best of a grid of logits, then a minimum beside it."""
        steps = np.linspace(-6.0, 6.0, 1201)
        grid = self.square(self.u + steps[:, None])
        best = math.inf, -1, -1
        for pair in np.argsort(grid.min(axis=0))[:5]:
            near = self.u[pair] + steps[grid[:, pair].argmin()]
            found = minimize_scalar(
                lambda there, pair=pair: self.square(there, pair),
                bounds=(near - 0.02, near + 0.02),
                method="bounded",
                options={"xatol": 1e-12},
            )
            best = min(best, (math.sqrt(found.fun), self.i[pair], self.j[pair]))
        return best


@pytest.mark.parametrize(("score", "cap", "experts", "k", "spread"), ROUTERS)
def test_the_distance_is_the_least_over_all_boundaries(score, cap, experts, k, spread):
    random = np.random.default_rng([experts, k])
    weight = random.standard_normal((experts, 12)) / 2.0
    bias = spread * random.standard_normal(experts)
    rule = Rule(k, score, Weights("scores"), True, logit_map=LogitMap(1.0, cap))
    logits = random.standard_normal((TOKENS, 12)) @ weight.T
    chosen = route(logits, rule, bias).chosen
    lower, upper, pair = curved_distance(logits, chosen, curved_rows(weight, rule, None, bias))
    for token in range(TOKENS):
        expected = Boundaries(weight, bias, score, cap, logits[token], chosen[token]).nearest()
        assert lower[token] <= expected[0] * (1.0 + 1e-9)
        assert_allclose(upper[token], expected[0], rtol=2e-6)
        assert_array_equal(pair[token], expected[1:])


# --------------------------------------------------------------------------- upper bounds of groups
#: Random routers; most have one token near which the steepest descent finds nothing good.
NUM_ROUTERS = 15


def drawn(seed: int):
    random = np.random.default_rng(seed)
    experts, groups = int(random.choice([8, 12, 16, 24])), int(random.choice([2, 4]))
    hidden, kept = int(random.integers(2, 10)), int(random.integers(1, groups))
    kind, fill = str(random.choice(["max", "top2_sum"])), float(random.choice([-np.inf, 0.0]))
    k = int(random.integers(1, min(6, kept * experts // groups) + 1))
    weight = random.uniform(0.3, 1.5, (experts, 1)) * random.standard_normal((experts, hidden))
    bias = float(random.choice([0.01, 0.05])) * random.standard_normal(experts)
    rule = Rule(k, "softmax", Weights("scores"), True, groups=GroupMask(groups, kept, kind, fill))
    y = random.standard_normal((1, hidden)) * random.uniform(0.3, 3.0)
    return weight, bias, rule, y, random


class Search:
    """Steps after which a router chooses another set, by the rule alone."""

    def __init__(self, weight, bias, rule, y) -> None:
        self._weight, self._bias, self._rule, self._y = weight, bias, rule, y
        self._before = np.sort(route(y @ weight.T, rule, bias).chosen)

    def is_changed(self, steps):
        chosen = route((self._y + steps) @ self._weight.T, self._rule, self._bias).chosen
        return (np.sort(chosen, axis=1) != self._before).any(axis=1)

    def shortened(self, directions, length):
        """The shortest of steps of one length that change the set, after bisection."""
        low, high = np.zeros(len(directions)), np.full(len(directions), length)
        for _ in range(24):
            middle = (low + high) / 2.0
            changed = self.is_changed(middle[:, None] * directions)
            low, high = np.where(changed, low, middle), np.where(changed, middle, high)
        nearest = int(high.argmin())
        return float(high[nearest]), directions[nearest]

    def dense(self, random):
        """The nearest flip of many directions at growing lengths, improved by random turns."""
        hidden = self._weight.shape[1]
        rows = (self._weight[:, None] - self._weight[None]).reshape(-1, hidden)
        ways = np.concatenate([random.standard_normal((400, hidden)), rows, self._weight])
        size = np.linalg.norm(ways, axis=1)
        ways = ways[size > 1e-9] / size[size > 1e-9, None]
        for length in np.geomspace(1e-3, 1e3, 48):
            changed = self.is_changed(length * ways)
            if changed.any():
                break
        else:
            return np.inf
        best, way = self.shortened(ways[changed], length)
        for turn in 0.3 * 0.8 ** np.arange(24):
            near = way + turn * random.standard_normal((60, hidden)) / np.sqrt(hidden)
            near /= np.linalg.norm(near, axis=1, keepdims=True)
            changed = self.is_changed(best * (1.0 - 1e-4) * near)
            if changed.any():
                best, way = self.shortened(near[changed], best)
        return best


def test_the_upper_bound_is_as_near_as_a_dense_search_finds_a_flip():
    ratios = []
    for seed in range(NUM_ROUTERS):
        weight, bias, rule, y, random = drawn(seed)
        logits = y @ weight.T
        chosen = route(logits, rule, bias).chosen
        rows = curved_rows(weight, rule, None, bias)
        lower, upper, _ = curved_distance(logits, chosen, rows)
        best = Search(weight, bias, rule, y).dense(random)
        assert lower[0] <= best
        assert np.isfinite(upper[0]) == np.isfinite(best)
        if np.isfinite(best):
            ratios.append(upper[0] / best)
    # the search finds one within the bound each time, as the rule does change by then
    assert min(ratios) > 1.0 - 1e-9
    assert np.median(ratios) < 1.01
    assert np.quantile(ratios, 0.9) < 1.1
    assert max(ratios) < 2.0


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
            normals, levels = helpers.ahead(weight, bias, inside, outside)
            cells.append(helpers.shortest_move(normals, normals @ point + levels))
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
    weight, bias = helpers.router(40, 2, 11)
    assert_is_nearest(weight, 0.3 * bias, np.random.default_rng(11).standard_normal((2, 2)), 2)
    weight, bias = helpers.router(6, 5, 12)
    y = np.random.default_rng(12).standard_normal((12, 5)) * 2
    weight[4] = weight[1]
    assert_is_nearest(weight, bias, y, 2)
    weight[3] = 0.0
    assert_is_nearest(weight, bias, y, 3)


# ------------------------------------------------------------------------------------------- angles
def logits_of(rows, bias, x):
    """Logits behind a norm without epsilon; rows times the gain."""
    return np.sqrt(len(x)) * rows @ x / np.linalg.norm(x) + bias


def nearest_by_minimisation(scores, x, k):
    """min |x' - x| over every pair of a chosen and another expert that ties at x'."""
    chosen = top_k(scores(x)[None], k)[0].tolist()
    others = set(range(len(scores(x)))) - set(chosen)
    return min(
        helpers.distance_to_boundary(x, lambda z, i=i, j=j: scores(z)[i] - scores(z)[j])
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
