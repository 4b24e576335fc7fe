"""Oracle: the output of the experts a tiny step on either side of the boundary, SLSQP, and pdist."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.spatial.distance import pdist
from scipy.special import expit, softmax

from moegeom.core.router import GroupMask, LogitMap, Provenance, Router, Rule, Weights
from moegeom.engine.jumps import ExactRouter, set_change, token_jumps
from moegeom.engine.prepared import prepare
from moegeom.geometry.jump import (
    curved_tie,
    exchanged,
    jump,
    linear_tie,
    spread_within,
    tied_weight_of_all,
    tied_weight_of_chosen,
)
from moegeom.geometry.selection import SCORES, mapped_logits, route
from moegeom.kernels.table import load_kernels

EXPERTS, HIDDEN, OUTPUTS, K, TOKENS = 12, 6, 5, 3, 40

_SELECTED = Weights("softmax_of_selected_logits")

#: A rule of each kind whose weights change in another way where a boundary is crossed.
RULES = {
    "softmax of chosen": Rule(K, "softmax", _SELECTED),
    "softmax of all": Rule(K, "softmax", Weights("scores")),
    "softmax renormalised": Rule(K, "softmax", Weights("scores", True, scale=1.5)),
    "sigmoid with bias": Rule(K, "sigmoid", Weights("scores", True, 1e-20, 2.5), True),
    "sigmoid, sums not 1": Rule(K, "sigmoid", Weights("scores"), True),
    "square root of softplus": Rule(K, "sqrt_softplus", Weights("scores", True), True),
    "capped logits": Rule(
        K, "sigmoid", Weights("scores", True), True, logit_map=LogitMap(0.7, 4.0)
    ),
    "groups": Rule(
        K, "sigmoid", Weights("scores", True), True, groups=GroupMask(4, 2, "top2_sum", -np.inf)
    ),
    "sparsemixer": Rule(2, "identity", Weights("sparsemixer", jitter=0.1)),
}


def router_of(name: str, seed: int = 0) -> Router:
    random, rule = np.random.default_rng(seed), RULES[name]
    bias = 0.3 * random.standard_normal(EXPERTS) if rule.has_selection_bias else None
    return Router(
        name="text/0",
        stack="text",
        layer=0,
        weight=random.standard_normal((EXPERTS, HIDDEN)),
        rule=rule,
        provenance=Provenance("made", ("gate.weight",), "made.safetensors", "F64"),
        selection_bias=bias,
    )


def expert(number: int, y: np.ndarray) -> np.ndarray:
    random = np.random.default_rng(100 + number)
    up, down = random.standard_normal((8, HIDDEN)), random.standard_normal((OUTPUTS, 8))
    return np.tanh(y @ up.T) @ down.T


def mixed(inputs, chosen, weights) -> np.ndarray:
    out = np.zeros((len(inputs), OUTPUTS))
    for row, (y, experts, shares) in enumerate(zip(inputs, chosen, weights, strict=True)):
        for number, share in zip(experts, shares, strict=True):
            if number >= 0:
                out[row] += share * expert(int(number), y)
    return out


def output_by_rule(router: Router, y: np.ndarray) -> np.ndarray:
    """The whole rule as the reference has it, expert by expert."""
    found = route(y @ router.weight.T, router.rule, router.selection_bias)
    return mixed(y, found.chosen, found.weights)


def measured(name: str, seed: int = 0):
    router = router_of(name, seed)
    inputs = np.random.default_rng(seed + 1).standard_normal((TOKENS, HIDDEN))
    logits = inputs @ router.weight.T
    chosen = route(logits, router.rule, router.selection_bias).chosen
    kernels = load_kernels("cpu")
    return router, inputs, token_jumps(prepare(router), inputs, logits, chosen, kernels, mixed)


@pytest.mark.parametrize("name", RULES)
def test_a_jump_is_the_difference_of_the_outputs_on_both_sides(name):
    router, _, found = measured(name)
    known = found.is_known
    point, normal = found.tie.point[known], found.tie.normal[known]
    sides = [output_by_rule(router, point + sign * 1e-6 * normal) for sign in (1.0, -1.0)]
    # what the output does anyhow on the way, from a step twice as long
    longer = [output_by_rule(router, point + sign * 2e-6 * normal) for sign in (1.0, -1.0)]
    apart = 2.0 * (sides[0] - sides[1]) - (longer[0] - longer[1])
    np.testing.assert_allclose(found.height[known], np.linalg.norm(apart, axis=1), rtol=1e-4)
    assert known.mean() > (0.3 if name == "groups" else 0.95)


@pytest.mark.parametrize("name", RULES)
def test_the_rule_itself_exchanges_one_expert_at_the_point_and_none_before(name):
    router, inputs, found = measured(name, seed=3)
    for row in np.flatnonzero(found.is_known):
        way = found.tie.point[row] - inputs[row]
        np.testing.assert_allclose(np.linalg.norm(way), found.tie.distance[row], rtol=1e-9)
        before, behind = (
            route(
                (inputs[row] + s * way)[None] @ router.weight.T, router.rule, router.selection_bias
            )
            for s in (0.9999, 1.0001)
        )
        out, into = found.pair[row].tolist()
        own = set(found.chosen[row].tolist())
        assert set(before.chosen[0].tolist()) == own
        assert (
            set(behind.chosen[0].tolist()) == own - {out} | {into} == set(found.after[row].tolist())
        )


def nearest_by_slsqp(y, gap) -> float:
    """Least distance to a point where ``gap`` is 0, of a few beginnings."""
    best = np.inf
    for seed in range(4):
        start = y + 0.2 * seed * np.random.default_rng(seed).standard_normal(len(y))
        found = minimize(
            lambda x: ((x - y) ** 2).sum(),
            start,
            constraints=[{"type": "eq", "fun": gap}],
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 300},
        )
        if found.success and abs(gap(found.x)) < 1e-8:
            best = min(best, float(np.sqrt(found.fun)))
    return best


def test_a_linear_tie_is_the_nearest_one():
    random = np.random.default_rng(5)
    weight, bias = random.standard_normal((EXPERTS, HIDDEN)), random.standard_normal(EXPERTS)
    inputs, pair = random.standard_normal((6, HIDDEN)), np.array([[i, i + 3] for i in range(6)])
    found = linear_tie(inputs, pair, weight, bias)
    for y, (i, j), distance in zip(inputs, pair, found.distance, strict=True):
        wanted = nearest_by_slsqp(
            y, lambda x, i=i, j=j: (weight[i] - weight[j]) @ x + bias[i] - bias[j]
        )
        np.testing.assert_allclose(abs(distance), wanted, rtol=1e-6)
    np.testing.assert_allclose(inputs - found.distance[:, None] * found.normal, found.point)


@pytest.mark.parametrize(
    ("score", "logit_map"),
    [("sigmoid", None), ("sqrt_softplus", None), ("sigmoid", LogitMap(0.8, 3.0))],
)
def test_a_curved_tie_is_the_nearest_one(score, logit_map):
    random = np.random.default_rng(6)
    weight, bias = random.standard_normal((4, HIDDEN)), np.array([0.1, -0.1, 0.0, 0.2])
    inputs, pair = random.standard_normal((4, HIDDEN)), np.array([[0, 1], [1, 2], [3, 1], [2, 0]])

    def value(x, i):
        return SCORES[score](mapped_logits(x @ weight.T, logit_map)[None])[0, i] + bias[i]

    distance = np.array(
        [
            nearest_by_slsqp(y, lambda x, i=i, j=j: value(x, i) - value(x, j))
            for y, (i, j) in zip(inputs, pair, strict=True)
        ]
    )
    found = curved_tie(inputs, pair, weight, score, logit_map, None, bias, distance * (1 + 1e-7))
    np.testing.assert_allclose(found.distance, distance, rtol=1e-5)
    # a point that is farther than the boundary is known to be is not the nearest one
    assert not curved_tie(
        inputs, pair, weight, score, logit_map, None, bias, 0.99 * distance
    ).is_known.any()


def test_closed_forms_are_the_difference_in_general():
    random = np.random.default_rng(7)
    z = random.standard_normal((TOKENS, EXPERTS))
    chosen = np.argsort(-z, axis=1)[:, :K].astype(np.int32)
    pair = np.stack([chosen[:, -1], np.argsort(-z, axis=1)[:, K]], axis=1).astype(np.int32)
    rows = np.arange(TOKENS)
    z[rows, pair[:, 1]] = z[rows, pair[:, 0]]
    y, after = random.standard_normal((TOKENS, HIDDEN)), exchanged(chosen, pair)
    apart = np.array(
        [np.linalg.norm(expert(i, x) - expert(j, x)) for x, (i, j) in zip(y, pair, strict=True)]
    )
    of_chosen = [(e, softmax(np.take_along_axis(z, e, 1), axis=1)) for e in (chosen, after)]
    of_all = [(e, np.take_along_axis(softmax(z, axis=1), e, 1)) for e in (chosen, after)]
    for form, sides in (
        (tied_weight_of_chosen(z, chosen, pair), of_chosen),
        (tied_weight_of_all(z, pair), of_all),
    ):
        np.testing.assert_allclose(form * apart, jump(y, *sides, mixed), rtol=1e-12)


def test_experts_that_both_sides_weigh_alike_are_not_applied():
    asked = []

    def counted(inputs, chosen, weights):
        asked.append(set(chosen[chosen >= 0].tolist()))
        return mixed(inputs, chosen, weights)

    chosen, after = np.array([[0, 1, 2]]), np.array([[0, 1, 5]])
    weights, y = np.array([[0.5, 0.3, 0.2]]), np.ones((1, HIDDEN))
    jump(y, (chosen, weights), (after, weights), counted)
    assert asked == [{2, 5}]


def test_another_set_at_the_same_input_moves_the_output_by_the_difference():
    router = router_of("sigmoid with bias")
    y = np.random.default_rng(8).standard_normal((9, HIDDEN))
    chosen, others = (
        np.tile(np.arange(3, dtype=np.int32), (9, 1)),
        np.full((9, 3), [7, 1, 4], np.int32),
    )
    found, length = set_change(router, y, chosen, others, mixed)
    score = expit(y @ router.weight.T)

    def output(experts):
        own = np.take_along_axis(score, experts.astype(int), 1)
        return mixed(y, experts, 2.5 * own / own.sum(axis=1, keepdims=True))

    one, other = output(chosen), output(others)
    np.testing.assert_allclose(found, np.linalg.norm(one - other, axis=1), rtol=1e-9)
    np.testing.assert_allclose(length, np.linalg.norm(one, axis=1), rtol=1e-9)


def test_an_exact_router_chooses_and_weighs_as_the_reference():
    for name in RULES:
        router = router_of(name)
        y = np.random.default_rng(9).standard_normal((TOKENS, HIDDEN))
        wanted = route(y @ router.weight.T, router.rule, router.selection_bias)
        exact = ExactRouter(router)
        logits = exact.logits(y)
        np.testing.assert_array_equal(exact.chosen(logits), wanted.chosen)
        np.testing.assert_allclose(exact.weights(y, logits, wanted.chosen), wanted.weights)


def test_the_spread_is_the_largest_distance_of_two_points_within_the_radius():
    random = np.random.default_rng(10)
    offset = random.uniform(-1.0, 1.0, 60)
    output = np.cumsum(random.standard_normal((60, OUTPUTS)), axis=0)[
        np.argsort(np.argsort(offset))
    ]
    radius = np.array([1e-4, 0.05, 0.3, 0.7, 1.0])
    found = spread_within(offset, output, radius)
    for place, r in enumerate(radius):
        inside = output[np.abs(offset) <= r]
        wanted = pdist(inside).max() if len(inside) > 1 else 0.0
        np.testing.assert_allclose(found.whole[place], wanted)
        one = np.ptp(inside[:, found.coordinate]) if len(inside) else 0.0
        np.testing.assert_allclose(found.one[place], one)


def test_a_step_has_slope_0_and_a_line_slope_1():
    offset, radius = np.linspace(-1.0, 1.0, 2001), np.logspace(-2, 0, 9)
    for output, slope in ((np.sign(offset), 0.0), (3.0 * offset, 1.0)):
        found = spread_within(offset, output[:, None], radius)
        np.testing.assert_allclose(found.slope[1:], slope, atol=0.12)  # points stand beside r
    assert np.isnan(spread_within(offset, 0.0 * offset[:, None], radius).slope).all()
