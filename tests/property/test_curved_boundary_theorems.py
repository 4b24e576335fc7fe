"""Nothing switches nearer than the lower bound, something does after a step of the upper one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_boundary
from moegeom.geometry.boundary.curved_rows import curved_rows
from moegeom.geometry.boundary.grouped import grouped_boundary
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.selection.route import route


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
SEEDS = st.integers(0, 2**32 - 1)


class Case:
    """A random router of a rule, and some inputs."""

    experts = 12

    def __init__(self, setting: Setting, seed: int, tokens: int = 4) -> None:
        self.random = np.random.default_rng(seed)
        hidden = int(self.random.integers(2, 6))
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
        boundary = curved_boundary if self.rows.is_separable else grouped_boundary
        self.found = boundary(self.logits(self.y), self.chosen(self.y), self.rows)

    def logits(self, y):
        return y @ self.weight.T

    def chosen(self, y):
        return route(self.logits(y), self.rule, self.bias).chosen

    def sets(self, y):
        return np.sort(self.chosen(y), axis=1)

    def directions(self, count):
        drawn = self.random.standard_normal((count, self.y.shape[1]))
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    def steps(self):
        """The least steps of the router input that change logits as the witness says."""
        weight, step = self.weight * self.rows.multiplier, self.found.step
        if self.rule.score == "softmax":
            weight, step = weight - weight.mean(axis=0), step - step.mean(axis=1, keepdims=True)
        return np.linalg.lstsq(weight, step.T, rcond=None)[0].T


@every_rule
@settings(max_examples=8)
@given(SEEDS)
def test_no_direction_switches_within_the_lower_bound(setting, seed):
    """4 tokens, 500 directions: 480 000 trials over all rules and seeds."""
    case = Case(setting, seed)
    reach = np.minimum(case.found.lower, 1e6)
    before = case.sets(case.y)
    for token in range(len(case.y)):
        moved = case.y[token] + 0.999 * reach[token] * case.directions(500)
        expected = np.tile(before[token], (500, 1))
        np.testing.assert_array_equal(case.sets(moved), expected)


@separable
@settings(max_examples=12)
@given(SEEDS)
def test_a_step_of_the_distance_along_the_witness_switches(setting, seed):
    case = Case(setting, seed)
    exists = np.isfinite(case.found.upper) & (case.found.upper > 0.0)
    steps = case.steps()[exists]
    length = np.linalg.norm(steps, axis=1)
    np.testing.assert_allclose(length, case.found.upper[exists], rtol=1e-6)
    before, y = case.sets(case.y)[exists], case.y[exists]
    np.testing.assert_array_equal((case.sets(y + 1.001 * steps) != before).any(axis=1), True)
    np.testing.assert_array_equal(case.sets(y + 0.999 * steps), before)


@bounded
@settings(max_examples=8)
@given(SEEDS)
def test_the_rule_chooses_another_set_after_a_step_of_the_upper_bound(setting, seed):
    case = Case(setting, seed)
    exists = np.isfinite(case.found.upper) & (case.found.upper > 1e-9)
    steps = case.steps()[exists]
    np.testing.assert_array_less(
        np.linalg.norm(steps, axis=1), case.found.upper[exists] * (1.0 + 1e-6)
    )
    # the step ends a hair behind the wall; the logits of this test are rounded anew
    moved = case.sets(case.y[exists] + steps * (1.0 + 1e-7))
    np.testing.assert_array_equal((moved != case.sets(case.y)[exists]).any(axis=1), True)


@separable
@settings(max_examples=12)
@given(SEEDS)
def test_the_bracket_of_a_separable_rule_is_closed(setting, seed):
    found = Case(setting, seed).found
    finite = np.isfinite(found.upper)
    np.testing.assert_array_less(
        found.upper[finite] * (1.0 - 1.0000001e-6) - 1e-300, found.lower[finite]
    )
    np.testing.assert_array_equal(found.lower[~finite], np.inf)


@bounded
@settings(max_examples=8)
@given(SEEDS)
def test_the_bounds_are_in_order_and_the_pair_is_one_that_swaps(setting, seed):
    case = Case(setting, seed)
    found = case.found
    np.testing.assert_array_equal(found.lower <= found.upper, True)
    known = found.pair[:, 0] >= 0
    chosen = np.zeros((len(case.y), case.experts), dtype=bool)
    np.put_along_axis(chosen, case.chosen(case.y), True, axis=1)
    out, entering = found.pair[known].T
    np.testing.assert_array_equal(chosen[known, out], True)
    np.testing.assert_array_equal(chosen[known, entering], False)


@separable
@settings(max_examples=10)
@given(SEEDS)
def test_equal_selection_biases_leave_the_straight_walls_of_the_logits(setting, seed):
    case = Case(Setting(setting.score, None, setting.logit_map, 0.0, 0.25), seed)
    logits = case.logits(case.y)
    straight = boundary_distance(logits, case.chosen(case.y), row_distances(case.weight))
    np.testing.assert_allclose(case.found.upper, straight.distance, rtol=1e-12)
    np.testing.assert_allclose(case.found.lower, straight.distance, rtol=1e-12)


@separable
@settings(max_examples=10)
@given(SEEDS)
def test_the_distance_is_one_lipschitz(setting, seed):
    case = Case(setting, seed, tokens=1)
    step = case.random.exponential(0.3) * case.directions(1)
    logits = case.logits(case.y + step)
    other = curved_boundary(logits, case.chosen(case.y + step), case.rows)
    before, after = case.found.upper, other.upper
    both = np.isfinite(before) & np.isfinite(after)
    change = np.abs(after[both] - before[both])
    slack = 1e-9 + 2e-6 * (before[both] + after[both])
    np.testing.assert_array_less(change, np.linalg.norm(step) + slack)
