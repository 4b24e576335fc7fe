"""The boundary distance is a distance, and the largest logits bracket it; of curved rules nothing
flips nearer than the lower bound; of ties of order n: spreads, near-ties and the nearest distance.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.spatial.distance import cdist

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import boundary_distance, distance_bracket, row_distances
from moegeom.geometry.selection import route, top_k
from moegeom.kernels.cpu.curved_distance import curved_distance
from tests.by_day import by_day


class Case:
    """A random affine router and some inputs."""

    def __init__(self, seed: int, tokens: int = 8) -> None:
        self.random = np.random.default_rng(seed)
        experts = int(self.random.integers(2, 14))
        hidden = int(self.random.integers(1, 9))
        self.k = int(self.random.integers(1, experts))
        sizes = self.random.uniform(0.3, 2.0, (experts, 1))
        self.weight = sizes * self.random.standard_normal((experts, hidden))
        self.bias = self.random.standard_normal(experts)
        self.y = 2 * self.random.standard_normal((tokens, hidden))

    def logits(self, y):
        return y @ self.weight.T + self.bias

    def measured(self, y=None, weight=None, bias=None):
        """For these inputs, rows and biases, or the own ones."""
        y = self.y if y is None else y
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        logits = y @ weight.T + bias
        return boundary_distance(logits, top_k(logits, self.k), row_distances(weight, bias))

    def sets(self, y):
        return np.sort(top_k(self.logits(y), self.k), axis=1)

    def directions(self, count):
        drawn = self.random.standard_normal((count, self.y.shape[1]))
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


SEEDS = st.integers(0, 2**32 - 1)
FACTORS = st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20])


@given(SEEDS)
def test_no_direction_flips_within_the_distance(seed):
    case = Case(seed, tokens=3)
    distance, before = case.measured().distance, case.sets(case.y)
    for token in range(3):
        moved = case.y[token] + 0.999 * distance[token] * case.directions(200)
        assert_array_equal(case.sets(moved), np.tile(before[token], (200, 1)))


@given(SEEDS)
def test_a_step_of_the_distance_along_the_witness_flips(seed):
    case = Case(seed)
    boundary, before = case.measured(), case.sets(case.y)
    out, entering = boundary.pair.T
    normal = case.weight[out] - case.weight[entering]
    normal *= boundary.distance[:, None] / np.linalg.norm(normal, axis=1, keepdims=True)
    assert_array_equal(case.sets(case.y - 0.999 * normal), before)
    assert (case.sets(case.y - 1.001 * normal) != before).any(axis=1).all()


@given(SEEDS, FACTORS)
def test_common_rows_and_scales_of_the_router_change_nothing_and_inputs_scale_along(seed, factor):
    case = Case(seed)
    plain = case.measured()
    weight = case.weight + case.random.standard_normal(case.y.shape[1])
    shifted = case.measured(weight=weight, bias=case.bias + 3.5)
    assert_allclose(shifted.distance, plain.distance, rtol=1e-7, atol=1e-9)
    assert_array_equal(shifted.pair, plain.pair)
    scaled = case.measured(weight=case.weight * factor, bias=case.bias * factor)
    assert_allclose(scaled.distance, plain.distance, rtol=1e-12)
    along = case.measured(case.y * factor, bias=case.bias * factor)
    assert_allclose(along.distance, plain.distance * factor, rtol=1e-12)


@given(SEEDS)
def test_relabelling_experts_relabels_the_pair_and_nothing_else(seed):
    case = Case(seed)
    order = case.random.permutation(len(case.weight))
    before, after = case.measured(), case.measured(weight=case.weight[order], bias=case.bias[order])
    assert_allclose(after.distance, before.distance, rtol=1e-12)
    assert_array_equal(order[after.pair], before.pair)


# ------------------------------------------------------------------- brackets by the largest logits
TOKENS = 12


def plain(random, experts, hidden):
    return random.uniform(0.3, 2.0, (experts, 1)) * random.standard_normal((experts, hidden))


def clusters(random, experts, hidden):
    """Rows near a few centres: every expert has near neighbours."""
    centres = random.standard_normal((max(experts // 4, 1), hidden))
    noise = 10.0 ** random.uniform(-4.0, 0.0, (experts, 1))
    near = centres[random.integers(0, len(centres), experts)]
    return near + noise * random.standard_normal((experts, hidden))


def duplicates(random, experts, hidden):
    """Some rows stand twice, some are zero."""
    rows = plain(random, experts, hidden)
    rows[random.integers(0, experts, experts // 3)] = rows[0]
    rows[random.integers(0, experts, experts // 5)] = 0.0
    return rows


def whole_numbers(random, experts, hidden):
    """Few different logits: ties everywhere, at the border of what is known too."""
    return random.integers(-1, 2, (experts, hidden)).astype(np.float64)


def long_rows(random, experts, hidden):
    """Lengths over four orders of magnitude: boundaries of low logits may be the nearest."""
    return 10.0 ** random.uniform(0.0, 4.0, (experts, 1)) * plain(random, experts, hidden)


KINDS = (plain, long_rows, clusters, duplicates, whole_numbers)


class Recorded:
    """A router, the logits of some tokens in float32, and the m largest of them."""

    def __init__(self, seed: int, kind) -> None:
        random = np.random.default_rng(seed)
        experts, hidden = int(random.integers(3, 40)), int(random.integers(1, 12))
        self.random, self.experts = random, experts
        self.k = int(random.integers(1, min(experts - 1, 8) + 1))
        self.weight = kind(random, experts, hidden)
        steps = random.integers(-2, 3, experts) / 2.0
        self.bias = steps * bool(random.integers(2))
        y = random.standard_normal((TOKENS, hidden))
        y = np.rint(y) if kind is whole_numbers else y
        self.logits = (y @ self.weight.T + self.bias).astype(np.float32)
        # duplicate rows have the same float32 logits: a matrix product may round them apart
        for i in range(experts):
            same = (self.weight == self.weight[i]).all(axis=1) & (self.bias == self.bias[i])
            self.logits[:, same] = self.logits[:, [i]]
        self.rows = row_distances(self.weight, self.bias)
        self.chosen = top_k(self.logits, self.k)
        self.full = boundary_distance(self.logits, self.chosen, self.rows)
        self.m = int(random.integers(self.k + 1, experts + 1))

    def top(self, m):
        """The m largest logits and their experts, in an order of no meaning."""
        order = np.argsort(-self.logits, axis=1, kind="stable")[:, :m].astype(np.int32)
        order = self.random.permuted(order, axis=1)
        return np.take_along_axis(self.logits, order, axis=1), order

    def bracket(self, m=None):
        return distance_bracket(*self.top(m or self.m), self.chosen, self.rows)


CASES = st.builds(Recorded, st.integers(0, 2**32 - 1), st.sampled_from(KINDS))


@given(CASES)
def test_the_bracket_holds_the_distance_and_is_it_where_it_is_exact(case):
    """Bit for bit, also where rows are nearly parallel and quotients magnify the rounding."""
    bracket = case.bracket()
    assert (bracket.lower <= case.full.distance).all()
    assert (case.full.distance <= bracket.upper).all()
    exact = bracket.is_exact
    assert_array_equal(bracket.lower[exact], case.full.distance[exact])
    assert (bracket.pair[~exact] == -1).all()

    # and its pair is a boundary at that distance
    walled = bracket.is_exact & np.isfinite(bracket.lower)
    assert_array_equal(bracket.pair[:, 0] >= 0, walled)
    token = np.flatnonzero(walled)
    out, entering = bracket.pair[token].T
    gap = case.logits[token, out].astype(np.float64) - case.logits[token, entering]
    assert_array_equal(gap * case.rows.inverse[out, entering], bracket.lower[token])
    apart = cdist(case.weight, case.weight)[out, entering]
    assert_allclose(gap[apart > 0.0] / apart[apart > 0.0], bracket.lower[token][apart > 0.0], 1e-7)
    assert not (case.chosen[token] == entering[:, None]).any()


@given(CASES)
def test_both_ends_are_reached_by_some_logits(case):
    """With the others at the least known logit the distance is the lower end, far below the upper."""
    logits, expert = case.top(case.m)
    bracket = distance_bracket(logits, expert, case.chosen, case.rows)
    known = np.zeros(case.logits.shape, dtype=bool)
    np.put_along_axis(known, expert.astype(np.int64), True, axis=1)
    least = logits.min(axis=1, keepdims=True)
    near = np.where(known, case.logits, least)
    far = np.where(known, case.logits.astype(np.float64), -1e300)
    for filled, end in ((near, bracket.lower), (far, bracket.upper)):
        assert_array_equal(end, boundary_distance(filled, case.chosen, case.rows).distance)


@given(CASES)
def test_more_logits_narrow_the_bracket_and_all_of_them_close_it(case):
    numbers = (case.m, (case.m + case.experts) // 2, case.experts)
    wide, narrow, closed = (case.bracket(m) for m in numbers)
    assert (wide.lower <= narrow.lower).all()
    assert (narrow.upper <= wide.upper).all()
    assert closed.is_exact.all()
    assert_array_equal(closed.lower, case.full.distance)
    assert_array_equal(closed.pair, case.full.pair)


def test_the_worked_triangle_and_a_permanent_tie_with_an_expert_that_is_not_known():
    """Experts 0 and 1 known: expert 2 could stand at 0.5, and is farther than expert 1 even so."""
    weight = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [1.0, 0.0]])
    # the second token: rows 0 and 2 are sqrt(5) apart, so expert 2 at -1 might be nearer
    logits, expert = np.float32([[2.0, 0.5], [1.0, -1.0]]), np.int32([[0, 1], [0, 1]])
    bracket = distance_bracket(logits, expert, np.int32([[0], [0]]), row_distances(weight[:3]))
    assert_allclose(bracket.upper, [1.5 / np.sqrt(2), 2.0 / np.sqrt(2)], rtol=1e-15)
    assert_allclose(bracket.lower, [1.5 / np.sqrt(5), 2.0 / np.sqrt(5)], rtol=1e-15)
    assert_array_equal(bracket.pair, [[-1, -1], [-1, -1]])
    # a recording may round duplicate rows apart; the distance does not depend on it
    tied = distance_bracket(logits[:1], expert[:1], np.int32([[0]]), row_distances(weight))
    assert_array_equal([tied.lower[0], tied.upper[0]], [0.0, 0.0])
    assert_array_equal(tied.pair, [[0, 3]])


@dataclass(frozen=True)
class Setting:
    """A rule, and how large its selection biases are."""

    score: str
    groups: GroupMask | None = None
    logit_map: LogitMap | None = None
    spread: float = 0.2
    shift: float = 0.0

    def __str__(self) -> str:
        groups = self.groups and f"{self.groups.score} {self.groups.fill}"
        cap = self.logit_map and f"cap {self.logit_map.soft_cap}"
        return " ".join(t for t in (self.score, groups, cap, f"{self.spread}{self.shift:+}") if t)


INF = np.inf
SEPARABLE = [
    Setting("sigmoid"),
    Setting("sqrt_softplus"),
    Setting("identity", logit_map=LogitMap(1.0, 2.0)),
    Setting("sigmoid", logit_map=LogitMap(0.3, 4.0)),
    Setting("sqrt_softplus", logit_map=LogitMap(2.0, 3.0)),
]


def grouped(score: str, spread: float, shift: float, kind: str, fill: float) -> Setting:
    return Setting(score, GroupMask(4, 2, kind, fill), None, spread, shift)


BOUNDED = [
    Setting("softmax", spread=0.05),
    *(
        grouped(score, spread, shift, kind, fill)
        for score, spread, shift in (
            ("sigmoid", 0.2, 0.0),
            ("sigmoid", 0.0, -0.5),
            ("sqrt_softplus", 0.2, -0.8),
            ("identity", 0.0, 0.0),
            ("softmax", 0.0, 0.0),
            ("softmax", 0.05, -0.05),
        )
        for kind in ("max", "top2_sum")
        for fill in (-INF, 0.0)
    ),
]
BOUNDED = by_day(
    BOUNDED,
    {
        "a coupled score": BOUNDED[0],
        "groups by their maximum": grouped("sigmoid", 0.2, 0.0, "max", -INF),
        "groups by a sum of two": grouped("sigmoid", 0.2, 0.0, "top2_sum", -INF),
        "a fill that decides": grouped("sqrt_softplus", 0.2, -0.8, "max", 0.0),
        "no bias": grouped("sigmoid", 0.0, -0.5, "top2_sum", 0.0),
        "raw logits": grouped("identity", 0.0, 0.0, "top2_sum", 0.0),
        "a coupled score in groups": grouped("softmax", 0.0, 0.0, "max", -INF),
        "and with biases": grouped("softmax", 0.05, -0.05, "top2_sum", 0.0),
    },
)
every_rule = pytest.mark.parametrize("setting", SEPARABLE + BOUNDED, ids=str)
separable = pytest.mark.parametrize("setting", SEPARABLE, ids=str)
bounded = pytest.mark.parametrize("setting", BOUNDED, ids=str)
#: A circle, fine enough to meet what is only a hair behind a boundary.
AROUND = np.exp(2j * np.pi * np.arange(8192) / 8192)
AROUND = np.stack([AROUND.real, AROUND.imag], axis=1)


class CurvedCase:
    """A random router of a rule, and some inputs."""

    experts = 12

    def __init__(self, setting: Setting, seed: int, tokens: int = 4, hidden: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        hidden = hidden or int(self.random.integers(2, 6))
        k = int(self.random.integers(1, 7))
        lengths = self.random.uniform(0.3, 1.5, (self.experts, 1))
        self.weight = lengths * self.random.standard_normal((self.experts, hidden))
        if seed % 3 == 0:  # parallel, opposite, equal and zero rows
            self.weight[[1, 3, 6]] = self.weight[[0, 2, 5]] * [[2.0], [-1.0], [1.0]]
            self.weight[7] = 0.0
        self.bias = setting.spread * self.random.standard_normal(self.experts) + setting.shift
        groups, logit_map = setting.groups, setting.logit_map
        self.rule = Rule(k, setting.score, Weights("scores"), True, False, groups, logit_map)
        self.rows = curved_rows(self.weight, self.rule, None, self.bias)
        self.y = self.random.standard_normal((tokens, hidden))
        self.lower, self.upper, self.pair = self.bounds(self.y)

    def bounds(self, y):
        return curved_distance(self.logits(y), self.chosen(y), self.rows)

    def logits(self, y):
        return y @ self.weight.T

    def chosen(self, y):
        return route(self.logits(y), self.rule, self.bias).chosen

    def directions(self, count):
        drawn = self.random.standard_normal((count, self.y.shape[1]))
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    def flips(self, token, steps):
        """Whether the set after each step is another one."""
        before = np.sort(self.chosen(self.y[token : token + 1]), axis=1)
        return (np.sort(self.chosen(self.y[token] + steps), axis=1) != before).any(axis=1)

    def circle(self, rows):
        """Unit vectors all around in the span of one or two rows."""
        basis = np.linalg.svd(rows, full_matrices=False).Vh
        basis = basis[: np.linalg.matrix_rank(rows, rtol=1e-9)]
        return AROUND[:, : len(basis)] @ basis if len(basis) > 1 else np.vstack([basis, -basis])


@every_rule
@settings(max_examples=5)
@given(SEEDS)
def test_no_direction_flips_within_the_lower_bound_and_the_pair_is_one_that_swaps(setting, seed):
    """4 tokens, 500 directions, 5 routers of each rule."""
    case = CurvedCase(setting, seed)
    assert (case.lower <= case.upper).all()
    row = np.flatnonzero(case.pair[:, 0] >= 0)
    (out, entering), chosen = case.pair[row].T, case.chosen(case.y)[row]
    assert (chosen == out[:, None]).any(axis=1).all()
    assert not (chosen == entering[:, None]).any()
    reach = np.minimum(case.lower, 1e6)
    for token in range(len(case.y)):
        assert not case.flips(token, 0.999 * reach[token] * case.directions(500)).any()


@separable
@settings(max_examples=6)
@given(SEEDS)
def test_in_the_plane_of_the_pair_the_set_flips_at_the_distance_and_not_before(setting, seed):
    case = CurvedCase(setting, seed)
    finite = np.isfinite(case.upper)
    # the bracket of a separable rule is closed
    assert (case.upper[finite] * (1.0 - 1.0000001e-6) - 1e-300 < case.lower[finite]).all()
    assert np.isinf(case.lower[~finite]).all()
    for token in np.flatnonzero(finite & (case.upper > 0.0)).tolist():
        around = case.circle(case.weight[case.pair[token]])
        assert case.flips(token, (1.0 + 1e-5) * case.upper[token] * around).any()
        for share in (0.1, 0.5, 0.9, 1.0 - 1e-5):
            coarse = around[:: 4 if len(around) > 4 else 1]
            assert not case.flips(token, share * case.lower[token] * coarse).any()


@bounded
@settings(max_examples=5)
@given(SEEDS)
def test_in_the_plane_the_first_flip_is_between_the_bounds(setting, seed):
    """Two coordinates: a disc holds all inputs that are so near."""
    case = CurvedCase(setting, seed, hidden=2)
    for token in range(len(case.y)):
        for share in (0.1, 0.5, 0.9, 0.999):
            steps = share * min(case.lower[token], 1e6) * AROUND[::4]
            assert not case.flips(token, steps).any()
        if 1e-9 < case.upper[token] < np.inf:
            # the step of the upper bound ends anywhere behind the boundary, within its resolution
            hairs = (1.0 + 1e-6, 1.0 + 1e-4, 1.001)
            assert any(case.flips(token, h * case.upper[token] * AROUND).any() for h in hairs)


@separable
@settings(max_examples=10)
@given(SEEDS)
def test_equal_selection_biases_leave_the_linear_boundaries_of_the_logits(setting, seed):
    case = CurvedCase(Setting(setting.score, None, setting.logit_map, 0.0, 0.25), seed)
    logits = case.logits(case.y)
    straight = boundary_distance(logits, case.chosen(case.y), row_distances(case.weight))
    for bound in (case.lower, case.upper):
        assert_allclose(bound, straight.distance, rtol=1e-12)
