"""Nothing flips nearer than the lower bound, something does on the circle of the upper one."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance
from tests.by_day import by_day


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
SEEDS = st.integers(0, 2**32 - 1)


class Case:
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
    case = Case(setting, seed)
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
    case = Case(setting, seed)
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
    case = Case(setting, seed, hidden=2)
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
    case = Case(Setting(setting.score, None, setting.logit_map, 0.0, 0.25), seed)
    logits = case.logits(case.y)
    straight = boundary_distance(logits, case.chosen(case.y), row_distances(case.weight))
    for bound in (case.lower, case.upper):
        assert_allclose(bound, straight.distance, rtol=1e-12)
