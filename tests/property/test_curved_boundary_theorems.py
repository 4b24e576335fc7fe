"""Nothing flips nearer than the lower bound, something does on the circle of the upper one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance


@dataclass(frozen=True)
class Setting:
    """A rule, and how large its selection biases are."""

    score: str
    groups: GroupMask | None = None
    logit_map: LogitMap | None = None
    spread: float = 0.2
    shift: float = 0.0

    @property
    def name(self) -> str:
        groups, mapped = self.groups, self.logit_map
        text = (
            f"{groups.score}_{groups.num_kept}_of_{groups.num_groups}_{groups.fill}"
            if groups
            else ""
        )
        cap = "" if mapped is None else f"cap{mapped.soft_cap}"
        return "-".join(t for t in (self.score, cap, text, f"{self.spread}{self.shift:+}") if t)


INF = np.inf
SEPARABLE = [
    Setting("sigmoid"),
    Setting("sqrt_softplus"),
    Setting("identity", logit_map=LogitMap(1.0, 2.0)),
    Setting("sigmoid", logit_map=LogitMap(0.3, 4.0)),
    Setting("sqrt_softplus", logit_map=LogitMap(2.0, 3.0)),
]
BOUNDED = [
    Setting("softmax", spread=0.05),
    *(
        Setting(score, GroupMask(4, 2, kind, fill), None, spread, shift)
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
every_rule = pytest.mark.parametrize("setting", SEPARABLE + BOUNDED, ids=lambda s: s.name)
separable = pytest.mark.parametrize("setting", SEPARABLE, ids=lambda s: s.name)
bounded = pytest.mark.parametrize("setting", BOUNDED, ids=lambda s: s.name)
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
        self.weight = self.random.uniform(
            0.3, 1.5, (self.experts, 1)
        ) * self.random.standard_normal((self.experts, hidden))
        if seed % 3 == 0:  # parallel, opposite, equal and zero rows
            self.weight[[1, 3, 6]] = self.weight[[0, 2, 5]] * [[2.0], [-1.0], [1.0]]
            self.weight[7] = 0.0
        self.bias = setting.spread * self.random.standard_normal(self.experts) + setting.shift
        self.rule = Rule(
            k, setting.score, Weights("scores"), True, False, setting.groups, setting.logit_map
        )
        self.rows = curved_rows(self.weight, self.rule, None, self.bias)
        self.y = self.random.standard_normal((tokens, hidden))
        self.lower, self.upper, self.pair = self.bounds(self.y)

    def bounds(self, y):
        return curved_distance(self.logits(y), self.chosen(y), self.rows)

    def logits(self, y):
        return y @ self.weight.T

    def chosen(self, y):
        return route(self.logits(y), self.rule, self.bias).chosen

    def sets(self, y):
        return np.sort(self.chosen(y), axis=1)

    def directions(self, count):
        drawn = self.random.standard_normal((count, self.y.shape[1]))
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    def flips(self, token, steps):
        """Whether the set after each step is another one."""
        before, y = self.sets(self.y[token : token + 1]), self.y[token] + steps
        return (self.sets(y) != before).any(axis=1)

    def circle(self, rows):
        """Unit vectors all around in the span of one or two rows."""
        found = np.linalg.svd(rows, full_matrices=False)
        basis = found.Vh[: np.linalg.matrix_rank(rows, rtol=1e-9)]
        return AROUND[:, : len(basis)] @ basis if len(basis) > 1 else np.vstack([basis, -basis])


@every_rule
@settings(max_examples=8)
@given(SEEDS)
def test_no_direction_flips_within_the_lower_bound(setting, seed):
    """4 tokens, 500 directions: 480 000 trials over all rules and seeds."""
    case = Case(setting, seed)
    reach = np.minimum(case.lower, 1e6)
    for token in range(len(case.y)):
        steps = 0.999 * reach[token] * case.directions(500)
        np.testing.assert_array_equal(case.flips(token, steps), False)


@separable
@settings(max_examples=12)
@given(SEEDS)
def test_in_the_plane_of_the_pair_the_set_flips_at_the_distance_and_not_before(setting, seed):
    case = Case(setting, seed)
    for token in np.flatnonzero(np.isfinite(case.upper) & (case.upper > 0.0)).tolist():
        around = case.circle(case.weight[case.pair[token]])
        assert case.flips(token, (1.0 + 1e-5) * case.upper[token] * around).any()
        for share in (0.1, 0.5, 0.9, 1.0 - 1e-5):
            assert not case.flips(token, share * case.lower[token] * around).any()


@pytest.mark.one_in(3)
@bounded
@settings(max_examples=8)
@given(SEEDS)
def test_in_the_plane_the_first_flip_is_between_the_bounds(setting, seed):
    """Two coordinates: a disc holds all inputs that are so near."""
    case = Case(setting, seed, hidden=2)
    for token in range(len(case.y)):
        for share in (0.1, 0.5, 0.9, 0.999):
            steps = share * min(case.lower[token], 1e6) * AROUND
            assert not case.flips(token, steps).any()
        if 1e-9 < case.upper[token] < np.inf:
            # the step of the upper bound ends anywhere behind the boundary, within its resolution
            hairs = (1.0 + 1e-6, 1.0 + 1e-4, 1.001)
            assert any(case.flips(token, h * case.upper[token] * AROUND).any() for h in hairs)


@separable
@settings(max_examples=12)
@given(SEEDS)
def test_the_bracket_of_a_separable_rule_is_closed(setting, seed):
    case = Case(setting, seed)
    finite = np.isfinite(case.upper)
    np.testing.assert_array_less(
        case.upper[finite] * (1.0 - 1.0000001e-6) - 1e-300, case.lower[finite]
    )
    np.testing.assert_array_equal(case.lower[~finite], np.inf)


@bounded
@settings(max_examples=8)
@given(SEEDS)
def test_the_bounds_are_in_order_and_the_pair_is_one_that_swaps(setting, seed):
    case = Case(setting, seed)
    np.testing.assert_array_equal(case.lower <= case.upper, True)
    known = case.pair[:, 0] >= 0
    chosen = np.zeros((len(case.y), case.experts), dtype=bool)
    np.put_along_axis(chosen, case.chosen(case.y), True, axis=1)
    out, entering = case.pair[known].T
    np.testing.assert_array_equal(chosen[known, out], True)
    np.testing.assert_array_equal(chosen[known, entering], False)


@separable
@settings(max_examples=10)
@given(SEEDS)
def test_equal_selection_biases_leave_the_linear_boundaries_of_the_logits(setting, seed):
    case = Case(Setting(setting.score, None, setting.logit_map, 0.0, 0.25), seed)
    logits = case.logits(case.y)
    straight = boundary_distance(logits, case.chosen(case.y), row_distances(case.weight))
    np.testing.assert_allclose(case.upper, straight.distance, rtol=1e-12)
    np.testing.assert_allclose(case.lower, straight.distance, rtol=1e-12)


@separable
@settings(max_examples=10)
@given(SEEDS)
def test_the_distance_is_one_lipschitz(setting, seed):
    case = Case(setting, seed, tokens=1)
    step = case.random.exponential(0.3) * case.directions(1)
    before, (_, after, _) = case.upper, case.bounds(case.y + step)
    both = np.isfinite(before) & np.isfinite(after)
    change = np.abs(after[both] - before[both])
    slack = 1e-9 + 2e-6 * (before[both] + after[both])
    np.testing.assert_array_less(change, np.linalg.norm(step) + slack)
