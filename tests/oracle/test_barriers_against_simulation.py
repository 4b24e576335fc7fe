"""Barriers of curved and grouped rules: inputs in small steps, gradients by differences, SLSQP.

The rule itself says at every step who is chosen; no distance and no tangent is used there.
"""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import minimize

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.paths import exit_boundaries, simulate_exit
from moegeom.geometry.selection import SCORES, mapped_logits, route, score_slopes, selection_scores
from moegeom.kernels.cpu.barriers import CompiledBarriers
from tests.by_day import by_day

EXPERTS, HIDDEN = 16, 10
BIASED = Rule(3, "sigmoid", Weights("scores"), has_selection_bias=True)
GROUPED = dataclasses.replace(BIASED, groups=GroupMask(4, 2, "top2_sum", 0.0))
RULES = {
    "sigmoid with a bias": BIASED,
    "sigmoid with a bias in groups": GROUPED,
    "root of softplus, capped": dataclasses.replace(
        BIASED, score="sqrt_softplus", logit_map=LogitMap(1.3, 4.0)
    ),
    "softmax with a bias": dataclasses.replace(BIASED, score="softmax"),
    "softmax in groups": Rule(3, "softmax", Weights("scores"), groups=GroupMask(4, 2, "max", 0.0)),
    "groups without a fill": dataclasses.replace(GROUPED, groups=GroupMask(4, 2, "max", -np.inf)),
}
each_rule = pytest.mark.parametrize("name", RULES)
some_rules = pytest.mark.parametrize("name", by_day([*RULES], [*RULES][:3]))


class Made:
    """Some inputs at a router of a rule, and the noise that moves them."""

    def __init__(self, rule, inputs=1, seed=3):
        random = np.random.default_rng(seed)
        self.rule, self.weight = rule, 0.5 * random.standard_normal((EXPERTS, HIDDEN))
        self.bias = 0.1 * random.standard_normal(EXPERTS) if rule.has_selection_bias else None
        self.factor = 0.3 * random.standard_normal((HIDDEN, HIDDEN - 2))
        self.inputs = random.standard_normal((inputs, HIDDEN))
        self.logits = self.inputs @ self.weight.T
        chosen, rows = self.chosen(self.logits), self.weight @ self.factor
        self.barriers = CompiledBarriers.of(rule, self.bias, chosen, rows, row_distances(rows))

    def chosen(self, logits):
        return route(logits, self.rule, self.bias).chosen

    def moved(self, paths, horizon, steps, seed):
        """The sets of inputs in small steps, until each of them has left its cell."""
        random = np.random.default_rng(seed)
        z, live = np.repeat(self.logits, paths, axis=0), np.arange(paths)
        before = np.sort(self.chosen(self.logits)[0])
        for number in range(1, steps + 1):
            noise = random.standard_normal((len(live), self.factor.shape[1])) @ self.factor.T
            z = z + np.sqrt(horizon / steps) * noise @ self.weight.T
            after = np.sort(self.chosen(z), axis=1)
            left = (after != before).any(axis=1)
            yield number, before, live[left], after[left]
            live, z = live[~left], z[~left]


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus", "identity"])
@pytest.mark.parametrize("logit_map", [None, LogitMap(1.7), LogitMap(0.8, 3.0)])
def test_slopes_are_differences_of_scores(score, logit_map):
    rule = dataclasses.replace(BIASED, score=score, logit_map=logit_map)
    z = np.linspace(-9.0, 9.0, 41)[None]
    ends = [SCORES[score](mapped_logits(z + step, logit_map)) for step in (1e-6, -1e-6)]
    assert_allclose(score_slopes(z, rule), (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-9)


@each_rule
def test_a_barrier_is_a_difference_of_scores_over_its_slope_along_the_noise(name):
    """To first order a step of its distance along its normal closes it, and no other is nearer."""
    made = Made(RULES[name], 40)
    every = np.arange(len(made.logits))
    sigmas = made.barriers.sigmas(every, made.logits)
    assert (sigmas >= 0.0).all()
    nearest = sigmas.argmin(axis=1)
    normal = made.barriers.normals(every, made.logits, nearest)
    assert_allclose(np.linalg.norm(normal, axis=1), 1.0, rtol=1e-12)
    for share in (0.01, 0.02):
        step = made.barriers.moved(every, -share * sigmas.min(axis=1)[:, None] * normal)
        after = made.barriers.sigmas(every, made.logits + step)[every, nearest]
        left = after / sigmas[every, nearest]
        is_there = np.isfinite(left)  # a change of groups may take the pair away
        assert is_there.mean() > 0.8
        # distances are those of tangents: the nearer, the better
        error = np.abs(left - 1.0 + share)[is_there] / share
        assert (error <= 1e-3 + 4.0 * sigmas.min(axis=1)[is_there]).all()
        assert np.median(error) < 0.2


COMPILED = {
    **RULES,
    "logits": Rule(3, "softmax", Weights("scores")),
    "softmax times 1.7 with a bias": dataclasses.replace(
        BIASED, score="softmax", logit_map=LogitMap(1.7)
    ),
    "one group of two": Rule(3, "sigmoid", Weights("scores"), groups=GroupMask(2, 1, "max", 0.0)),
    "groups of one": dataclasses.replace(GROUPED, groups=GroupMask(16, 9, "top2_sum", 0.0)),
}


def differences(made, cell, logits):
    """The gap of each barrier over the length of its slope along the noise, by differences of scores.

    Who is masked stays as at the point. Of the masked others the first stands for all.
    """
    rule, bias, experts = made.barriers.rule, made.barriers.bias, np.arange(EXPERTS)
    groups = rule.groups or GroupMask(1, 1, "max", 0.0)
    size, best = EXPERTS // groups.num_groups, 1 + (groups.score == "top2_sum")

    def scores(z):
        return selection_scores(z, rule, bias)

    moves, h = made.barriers.moves, 1e-5
    for c, z in zip(cell, logits, strict=True):
        ours, others = made.barriers.inside[c], made.barriers.outside[c]
        value = scores(z[None])[0]
        slope = (scores(z + h * moves.T) - scores(z - h * moves.T)).T / (2.0 * h)
        by_group = np.sort(value.reshape(-1, size), axis=1)[:, -best:].sum(axis=1)
        order = np.argsort(value.reshape(-1, size), axis=1)[:, -best:]
        kept = np.isin(
            np.arange(groups.num_groups), np.argsort(-by_group, kind="stable")[: groups.num_kept]
        )
        masked = np.where(kept[experts // size], value, groups.fill)
        row = np.where(kept[experts // size], slope.T, 0.0).T
        behind, hidden = masked[others], ~kept[others // size]
        behind[hidden & (np.cumsum(hidden) > 1)] = -np.inf
        gaps = [*np.subtract.outer(masked[ours], behind).ravel()]
        slopes = [*(row[ours][:, None] - row[others]).reshape(-1, moves.shape[1])]
        tops = [slope[g * size + order[g]].sum(axis=0) for g in range(groups.num_groups)]
        last = masked[ours].min()
        for g, h_ in np.ndindex((groups.num_groups,) * 2) if rule.groups else ():
            is_there = (ours // size == g).any() or value[h_ * size : (h_ + 1) * size].max() > last
            gaps.append(by_group[g] - by_group[h_] if kept[g] > kept[h_] and is_there else np.inf)
            slopes.append(tops[g] - tops[h_])
        ratio = np.array(gaps) / np.linalg.norm(slopes, axis=1)  # 0 / 0: both are masked
        yield np.where(np.isnan(ratio), 0.0, ratio) / made.barriers.scale[c]


@pytest.mark.parametrize("name", COMPILED)
def test_barriers_are_gaps_over_slopes_by_differences(name):
    made, random = Made(COMPILED[name], 6), np.random.default_rng(1)
    made.barriers = dataclasses.replace(made.barriers, scale=random.uniform(0.5, 2.0, 6))
    cell = random.integers(0, 6, 200)
    z = made.logits[cell] + random.choice([0.0, 0.05, 0.6], (200, 1)) * random.normal(
        size=(200, EXPERTS)
    )
    ahead = made.barriers.sigmas(cell, z)
    with np.errstate(all="ignore"):
        expected = [*differences(made, cell, z)]
    assert_allclose(ahead, expected, rtol=3e-5, atol=1e-8)
    assert np.isinf(ahead).any() == (made.barriers.rule.groups is not None)


@pytest.mark.parametrize("step", [0.0, 1e-4, 0.3])
def test_staying_is_bracketed_by_the_sum_and_the_largest_of_the_bridges(step):
    random = np.random.default_rng(2)
    before, after = random.uniform(-0.1, 2.0, (2, 300, 40))
    before[0], after[0] = np.inf, np.inf
    with np.errstate(divide="ignore", over="ignore"):
        crossing = np.exp(-2.0 * before * after / np.float64(step))
    crossing[(before <= 0.0) | (after <= 0.0)] = 1.0
    bounds = np.maximum(1.0 - crossing.sum(axis=1), 0.0), 1.0 - crossing.max(axis=1)
    barriers = Made(BIASED).barriers
    assert_allclose(barriers.staying(before, after, step), bounds, rtol=1e-9, atol=1e-12)


def test_the_two_least_are_one_where_they_coincide_but_at_the_start():
    ahead = np.array([[3.0, 1.0, 1.0 + 1e-9, 2.0], [np.inf, 5.0, 7.0, 6.0], [4.0, 4.0, 4.0, 4.0]])
    barriers = Made(BIASED).barriers
    for is_start, following in ((True, [1.0 + 1e-9, 6.0, 4.0]), (False, [2.0, 6.0, np.inf])):
        number, least, after = barriers.two_least(ahead, is_start)
        assert_allclose(number, [1, 1, 0])
        assert_allclose(least, [1.0, 5.0, 4.0])
        assert_allclose(after, following, rtol=0.0)


@each_rule
def test_the_set_is_another_exactly_where_a_barrier_is_behind(name):
    made = Made(RULES[name])
    random = np.random.default_rng(0)
    z = made.logits + 0.5 * random.standard_normal((4000, EXPERTS))
    is_same = (np.sort(made.chosen(z), axis=1) == np.sort(made.chosen(made.logits))).all(axis=1)
    ahead = made.barriers.sigmas(np.zeros(len(z), np.int64), z).min(axis=1)
    assert ((ahead > 0.0) == is_same).all()
    assert 0.01 < is_same.mean() < 0.99


@some_rules
def test_curves_are_what_inputs_in_small_steps_do(name):
    made, paths, steps = Made(RULES[name]), 3000, 1024
    (first,) = made.barriers.sigmas(np.zeros(1, np.int64), made.logits).min(axis=1)
    horizon = 3.0 * first**2
    left = np.zeros(steps + 1)
    for number, _, out, _ in made.moved(paths, horizon, steps, 5):
        left[number] = len(out) / paths
    share = np.cumsum(left)
    times = np.linspace(0.0, horizon, 65)[None, 1:]
    curve = simulate_exit(
        made.logits, made.barriers, np.zeros(1, np.int64), times, 3000, [np.random.default_rng(1)]
    )
    # steps that are not looked between miss the crossings of 0.58 of a step's deviation
    missed = 0.04
    for at in (15, 31, 63):
        seen = share[(at + 1) * steps // 64]
        error = 4.0 * np.hypot(np.sqrt(seen * (1 - seen) / paths), curve.upper_error[0, at])
        error += curve.step_error[0]
        assert curve.lower[0, at] - error - 0.005 <= seen + missed
        assert seen <= curve.upper[0, at] + error + 0.005
    assert curve.step_error[0] < 0.03
    assert 0.2 < share[-1] < 0.98


@some_rules
def test_walks_leave_through_the_exchanges_of_inputs_in_small_steps(name):
    made, paths, walks = Made(RULES[name]), 400, 3000
    (first,) = made.barriers.sigmas(np.zeros(1, np.int64), made.logits).min(axis=1)
    out, into = np.zeros(EXPERTS), np.zeros(EXPERTS)
    number = 0
    for _, before, ours, after in made.moved(paths, 400.0 * first**2, 20_000, 7):
        number += len(ours)
        for one in after:
            gone, come = np.setdiff1d(before, one), np.setdiff1d(one, before)
            if len(gone) == 1:  # of a change of groups the first of several stands for all
                out[gone] += 1.0
                into[come] += 1.0
        if number > 0.97 * paths:
            break
    exits = exit_boundaries(
        made.logits, made.barriers, np.zeros(1, np.int64), walks, np.random.default_rng(2)
    )
    pair = exits.pair[0]
    assert (pair[:, 0] >= 0).mean() > 0.99
    several = 1.0 - out.sum() / number
    for counts, column in ((out, 0), (into, 1)):
        walked = np.bincount(pair[pair[:, column] >= 0, column], minlength=EXPERTS) / walks
        error = np.sqrt(np.maximum(walked, 1e-3) * (1.0 / number + 1.0 / walks))
        assert (np.abs(walked - counts / number) < 4.0 * error + 0.02 + several).all()


def test_the_nearest_barrier_of_a_biased_sigmoid_is_nearly_that_of_slsqp():
    made = Made(BIASED, 12)
    plain = CompiledBarriers.of(
        BIASED, made.bias, made.chosen(made.logits), made.weight, row_distances(made.weight)
    )
    sigmas = plain.sigmas(np.arange(12), made.logits)
    pairs = plain.exchange(np.arange(12), made.logits, sigmas.argmin(axis=1))
    for y, (i, j), near in zip(made.inputs, pairs, sigmas.min(axis=1), strict=True):

        def gap(step, y=y, i=i, j=j):
            score = SCORES["sigmoid"]((y + step) @ made.weight.T) + made.bias
            return score[i] - score[j]

        found = minimize(
            lambda step: step @ step,
            1e-3 * np.ones(HIDDEN),
            constraints=[{"type": "eq", "fun": gap}],
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 300},
        )
        assert found.success
        assert abs(np.linalg.norm(found.x) / near - 1.0) < 0.6 * near + 1e-4
