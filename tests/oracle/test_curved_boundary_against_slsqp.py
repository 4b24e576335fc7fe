"""Oracle: SciPy's SLSQP from several starts, for the nearest point of every boundary in turn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, softmax

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance

HIDDEN, STARTS = 3, 2
SCORE = Weights("scores")


def groups_of_two(kind, fill):
    return GroupMask(3, 2, kind, fill)


#: Rule, number of experts, spread of selection biases, tokens.
SEPARABLE = [
    (Rule(1, "sigmoid", SCORE, True), 3, 0.2, 200),
    (Rule(2, "sigmoid", SCORE, True, logit_map=LogitMap(1.0, 3.0)), 3, 0.2, 200),
    (Rule(1, "sqrt_softplus", SCORE, True), 3, 0.3, 200),
    (Rule(1, "sqrt_softplus", SCORE, True, logit_map=LogitMap(0.5, 2.0)), 3, 0.3, 200),
    (Rule(1, "identity", SCORE, True, logit_map=LogitMap(1.0, 2.0)), 3, 0.5, 200),
]
BOUNDED = [
    (Rule(1, "softmax", SCORE, True), 3, 0.05, 200),
    *(
        (Rule(2, score, SCORE, True, groups=groups_of_two(kind, fill)), 6, spread, 60)
        for score, spread in (("sigmoid", 0.2), ("softmax", 0.02), ("identity", 0.2))
        for kind in ("max", "top2_sum")
        for fill in (-np.inf, 0.0)
    ),
]


def sqrt_softplus(t):
    return np.sqrt(np.logaddexp(0.0, t))


SCORES = {"identity": lambda t: t, "sigmoid": expit, "sqrt_softplus": sqrt_softplus}
SLOPES = {
    "identity": np.ones_like,
    "sigmoid": lambda t: expit(t) * expit(-t),
    "sqrt_softplus": lambda t: expit(t) / (2.0 * sqrt_softplus(t)),
}


def derivatives(z, rule):
    """Scores of one token, and their Jacobian in the logits, by hand."""
    if rule.score == "softmax":
        q = softmax(z)
        return q, np.diag(q) - np.outer(q, q)
    if rule.logit_map is None:
        return SCORES[rule.score](z), np.diag(SLOPES[rule.score](z))
    multiplier, cap = rule.logit_map.multiplier, rule.logit_map.soft_cap
    ratio = np.tanh(multiplier * z / cap)
    slope = SLOPES[rule.score](cap * ratio) * multiplier * (1.0 - ratio**2)
    return SCORES[rule.score](cap * ratio), np.diag(slope)


def nearest_on_boundary(weight, bias, rule, y, pair, starts):
    """Nearest points y' with q_i = q_j, one of each start that converged."""
    i, j = pair

    def gap(point):
        q, _ = derivatives(weight @ point, rule)
        return q[i] + bias[i] - q[j] - bias[j]

    def gradient(point):
        _, jacobian = derivatives(weight @ point, rule)
        return (jacobian[i] - jacobian[j]) @ weight

    for start in starts:
        found = minimize(
            lambda point: ((point - y) ** 2).sum(),
            start,
            jac=lambda point: 2.0 * (point - y),
            constraints={"type": "eq", "fun": gap, "jac": gradient},
            method="SLSQP",
            options={"ftol": 1e-13, "maxiter": 50},
        )
        if abs(gap(found.x)) < 1e-10:
            yield found.x


def compare(rule, experts, spread, tokens):
    """Bounds, and for each token the points of its boundaries that were found, behind them by a hair."""
    random = np.random.default_rng([experts, tokens, rule.top_k])
    for _ in range(tokens // 20):
        weight = random.standard_normal((experts, HIDDEN))
        bias = spread * random.standard_normal(experts)
        y = random.standard_normal((20, HIDDEN))
        logits = y @ weight.T
        chosen = route(logits, rule, bias).chosen
        lower, upper, _ = curved_distance(logits, chosen, curved_rows(weight, rule, None, bias))
        for token in range(20):
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
    np.testing.assert_array_less(1.0 - 2e-6, ratios)
    assert np.mean(np.array(ratios) < 1.0 + 2e-6) > 0.97


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("rule", "experts", "spread", "tokens"), BOUNDED)
def test_no_point_behind_a_boundary_is_nearer_than_the_lower_bound(rule, experts, spread, tokens):
    """Of the points found, those count where a step beyond the boundary changes the choice."""
    seen = 0
    for weight, bias, y, chosen, points, lower, upper in compare(rule, experts, spread, tokens):
        assert lower <= upper
        if points:
            steps = (np.array(points) - y) * (1.0 + 1e-6)
            sets = np.sort(route((y + steps) @ weight.T, rule, bias).chosen, axis=1)
            changed = (sets != np.sort(chosen)).any(axis=1)
            seen += changed.any()
            np.testing.assert_array_less(lower, np.linalg.norm(steps[changed], axis=1))
    assert seen > 0.7 * tokens


@pytest.mark.parametrize(("rule", "experts", "spread", "tokens"), BOUNDED[:1])
def test_softmax_without_groups_is_bracketed(rule, experts, spread, tokens):
    """There the nearest boundary is the distance, and the upper bound is no nearer than that."""
    found = [
        (lower, min(np.linalg.norm(point - y) for point in points), upper)
        for _, _, y, _, points, lower, upper in compare(rule, experts, spread, tokens)
        if points
    ]
    lower, nearest, upper = np.array(found).T
    np.testing.assert_array_less(lower, nearest * (1.0 + 1e-7) + 1e-12)
    # from a few starts a minimum may be missed
    assert np.mean(nearest < upper * (1.0 + 1e-6)) > 0.97
    np.testing.assert_array_less(0.6, np.median(lower / nearest))
    np.testing.assert_array_less(np.median(upper / nearest), 1.1)
