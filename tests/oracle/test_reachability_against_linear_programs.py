"""Oracles: linear programs, nearest points of cells, and routed inputs; of jumps the outputs of
experts a tiny step on either side of the boundary, SLSQP, and pdist.

An affine rule chooses expert i for some input exactly when a set of k experts with i is the chosen
set there. Every set is asked, so nothing about dominance goes in: without a radius by a linear
program (scipy's, by HiGHS), inside a ball by its nearest point (Lawson and Hanson). Rules with
curved scores are asked by routing inputs.
"""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.linalg import null_space
from scipy.spatial.distance import pdist
from scipy.special import expit, softmax

from moegeom.core.router import GroupMask, LogitMap, Router, Rule, Weights
from moegeom.engine.jumps import ExactRouter, set_change, token_jumps
from moegeom.engine.prepared import prepare
from moegeom.geometry import jump as jumps
from moegeom.geometry.boundary.reachability import Proof, Reachability, reachability
from moegeom.geometry.gram import effective_rows
from moegeom.geometry.selection import SCORES, mapped_logits, route
from moegeom.kernels.table import load_kernels
from tests.oracle.helpers import (
    ahead,
    distance_to_boundary,
    largest_margin,
    shortest_move,
    tied_weight,
)
from tests.unit.scan.made import router_with

INF = np.inf


def cells_with(expert, weight, bias, k):
    """What leads in ``normals @ x + levels > 0``, for every chosen set with the expert."""
    others = [i for i in range(len(weight)) if i != expert]
    for rest in itertools.combinations(others, k - 1):
        yield ahead(weight, bias, (expert, *rest), [j for j in others if j not in rest])


def is_reached_by_program(expert, weight, bias, k) -> bool:
    return any(largest_margin(*cell) > 1e-7 for cell in cells_with(expert, weight, bias, k))


def nearest_input(expert, weight, bias, k) -> float:
    """Length of the shortest input whose closed cell has the expert; inf when there is none."""
    return min(shortest_move(*cell) for cell in cells_with(expert, weight, bias, k))


def is_reached(proof) -> bool:
    return proof in (Proof.point, Proof.independence)


def affine(k, score="softmax"):
    return Rule(k, score, Weights("scores"), has_logit_bias=True)


def affine_router(seed, experts, hidden, spread):
    random = np.random.default_rng([seed, experts, hidden])
    weight = random.standard_normal((experts, hidden)) * random.uniform(0.2, 1.5, (experts, 1))
    weight += 3.0 * random.standard_normal(hidden)
    return weight, spread * random.standard_normal(experts)


#: experts, hidden, k
AFFINE = [(2, 3, 1), (5, 2, 1), (5, 8, 1), (6, 3, 2), (6, 9, 3), (7, 2, 3), (6, 1, 2), (5, 5, 4)]


@pytest.mark.parametrize(("experts", "hidden", "k"), AFFINE)
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_without_a_radius_no_linear_program_contradicts(experts, hidden, k, spread):
    for seed in (0, 3):
        weight, bias = affine_router(seed, experts, hidden, spread)
        if seed == 3:
            weight[1] = weight[0]  # equal rows: the bias decides for ever
        found = reachability(effective_rows(weight, None), affine(k), INF, bias)
        for expert, proof in enumerate(found.proofs):
            if proof is not Proof.open:
                by_program = is_reached_by_program(expert, weight, bias, k)
                assert is_reached(proof) == by_program, (seed, expert, proof)


@pytest.mark.parametrize(("experts", "hidden", "k"), AFFINE)
def test_inside_a_ball_no_nearest_point_contradicts(experts, hidden, k):
    verdicts = []
    for seed, radius in itertools.product(range(4), (0.3, 1.0, 3.0)):
        weight, bias = affine_router(seed, experts, hidden, 1.5)
        found = reachability(effective_rows(weight, None), affine(k), radius, bias)
        for expert, proof in enumerate(found.proofs):
            if proof is not Proof.open:
                nearest = nearest_input(expert, weight, bias, k)
                assert is_reached(proof) == (nearest < radius), (seed, expert, proof, nearest)
        verdicts += found.proofs
    assert Proof.point in verdicts


@pytest.mark.parametrize("radius", [0.1, 0.3, 1.0, 3.0])
def test_of_two_experts_both_are_always_decided(radius):
    """Two experts and one boundary: the certificate is necessary as well as sufficient."""
    verdicts = []
    for seed in range(20):
        weight, bias = affine_router(seed, 2, 4, 1.5)
        found = reachability(effective_rows(weight, None), affine(1), radius, bias)
        nearest = [nearest_input(expert, weight, bias, 1) for expert in (0, 1)]
        expected = [Proof.point if r < radius else Proof.beaten for r in nearest]
        assert list(found.proofs) == expected
        verdicts += found.proofs
    assert set(verdicts) == {Proof.point, Proof.beaten}


def on_the_sphere(points, weight, radius):
    """The same logits on the sphere: something that no row sees is added."""
    unseen = null_space(weight)[:, 0]
    missing = radius**2 - (points**2).sum(axis=1)
    return points + np.sqrt(np.maximum(missing, 0.0))[:, None] * unseen


def structured(weight, radius, size):
    """Rows, their differences and sums within groups of ``size``, at several lengths."""
    centred = weight - weight.mean(axis=0)
    number = np.arange(len(weight))
    partners = [number // size * size + (number + step) % size for step in range(1, size)]
    ways = [centred, -centred, *(centred + centred[p] for p in partners)]
    ways += [centred - centred[p] for p in partners]
    ways = np.concatenate(ways)
    long = np.linalg.norm(ways, axis=1) > 1e-9
    ways = ways[long] / np.linalg.norm(ways[long], axis=1, keepdims=True)
    return np.concatenate([length * radius * ways for length in (1.0, 0.3, 0.1, 1e-6)])


def is_chosen(weight, rule, points, logit_bias, selection_bias) -> np.ndarray:
    """[points, experts]"""
    logits = points @ weight.T + (0.0 if logit_bias is None else logit_bias)
    chosen = route(logits, rule, selection_bias).chosen
    has = np.zeros(logits.shape, dtype=bool)
    np.put_along_axis(has, chosen, True, axis=1)
    return has


def with_proof(result: Reachability, proof: Proof) -> np.ndarray:
    return np.array([one is proof for one in result.proofs])


GROUPS = {
    "max": GroupMask(4, 2, "max", -INF),
    "top2_sum": GroupMask(4, 2, "top2_sum", -INF),
    "filled": GroupMask(4, 2, "top2_sum", 0.0),
}
#: name: score, groups, radius, spread of the selection bias, of the logit bias
CURVED = {
    "identity": ("identity", None, 0.5, 2.0, 0.0),
    "sigmoid": ("sigmoid", None, 0.4, 0.25, 0.0),
    "sigmoid far": ("sigmoid", None, 40.0, 2.0, 0.0),
    "sigmoid with both": ("sigmoid", None, 0.4, 0.25, 0.4),
    "root of softplus": ("sqrt_softplus", None, 0.4, 0.3, 0.0),
    "softmax": ("softmax", None, 2.0, 1.5, 0.0),
    "groups by maximum": ("sigmoid", "max", 0.4, 0.3, 0.0),
    "groups by sum": ("sigmoid", "top2_sum", 0.4, 0.3, 0.3),
    "groups of raw logits": ("identity", "top2_sum", 0.3, 1.0, 0.0),
    "groups filled with 0": ("sigmoid", "filled", 0.4, 0.3, 0.0),
}


@pytest.mark.parametrize("common", [1.0, 6.0])
@pytest.mark.parametrize("name", CURVED)
def test_every_point_is_a_routed_input_of_the_sphere(name, common):
    """Through the router itself, not through Gram matrices; 24 dimensions leave one unseen.

    Scores bend: which expert wins depends on the row that all have in common.
    """
    score, groups, radius, spread, logit_spread = CURVED[name]
    random = np.random.default_rng(sorted(CURVED).index(name))
    weight = (random.standard_normal((16, 24)) + common * random.standard_normal(24)) / np.sqrt(24)
    bias = spread * random.standard_normal(16)
    if groups == "filled":
        bias -= bias.min()  # else the fill may overtake, and nothing is proved
    logit_bias = logit_spread * random.standard_normal(16) if logit_spread else None
    rule = Rule(4, score, Weights("scores"), True, bool(logit_spread), GROUPS.get(groups or ""))
    proofs = reachability(effective_rows(weight, None), rule, radius, logit_bias, bias)
    points = on_the_sphere(structured(weight, radius, 4 if groups else 16), weight, radius)
    assert_allclose(np.linalg.norm(points, axis=1), radius, rtol=1e-9)
    proved = with_proof(proofs, Proof.point)
    assert proved.any()
    assert is_chosen(weight, rule, points, logit_bias, bias)[:, proved].any(axis=0).all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gain_and_a_common_row_are_part_of_the_router(with_bias):
    """Inputs y = g u with u of the ball: the effective router decides, not the stored one."""
    random = np.random.default_rng(17)
    weight, gain = random.standard_normal((12, 20)), random.uniform(0.1, 3.0, 20)
    weight += 5.0
    bias = 0.2 * random.standard_normal(12) if with_bias else None
    rule = Rule(3, "sigmoid", Weights("scores"), with_bias)
    found = reachability(effective_rows(weight, gain), rule, 0.005, None, bias)
    points = random.standard_normal((12_000, 20))
    points *= 0.005 / np.linalg.norm(points, axis=1, keepdims=True)
    points = np.concatenate([points, structured(weight * gain, 0.005, 12)])
    reached = is_chosen(weight * gain, rule, points, None, bias).any(axis=0)
    beaten = with_proof(found, Proof.beaten)
    assert not (beaten & reached).any()
    assert beaten.any() == with_bias
    assert with_bias or (reached.all() and Proof.open not in found.proofs)


def test_independence_is_confirmed_by_programs_where_no_point_is_found():
    """A row in the shadow of another: no row points where it is the largest, yet some input does."""
    weight = np.array([[-1.0, 0.0], [0.2, 0.01], [1.0, 0.0]])
    found = reachability(effective_rows(weight, None), affine(1), 3.0)
    assert found.proofs == (Proof.point, Proof.independence, Proof.point)
    assert is_reached_by_program(1, weight, np.zeros(3), 1)
    line = weight[:, :1]
    assert reachability(effective_rows(line, None), affine(1), 3.0).proofs[1] is Proof.open
    assert not is_reached_by_program(1, line, np.zeros(3), 1)


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
    weight = random.standard_normal((EXPERTS, HIDDEN))
    return router_with(weight, rule, selection_bias=bias)


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
    assert_allclose(found.height[known], np.linalg.norm(apart, axis=1), rtol=1e-4)
    assert known.mean() > (0.3 if name == "groups" else 0.95)


@pytest.mark.parametrize("name", RULES)
def test_the_rule_itself_exchanges_one_expert_at_the_point_and_none_before(name):
    router, inputs, found = measured(name, seed=3)
    for row in np.flatnonzero(found.is_known):
        way = found.tie.point[row] - inputs[row]
        assert_allclose(np.linalg.norm(way), found.tie.distance[row], rtol=1e-9)
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


def test_ties_are_the_nearest_ones_and_closed_forms_the_difference():
    random = np.random.default_rng(5)
    weight, bias = random.standard_normal((EXPERTS, HIDDEN)), random.standard_normal(EXPERTS)
    inputs, pair = random.standard_normal((6, HIDDEN)), np.array([[i, i + 3] for i in range(6)])
    found = jumps.linear_tie(inputs, pair, weight, bias)
    for y, (i, j), distance in zip(inputs, pair, found.distance, strict=True):
        row, level = weight[i] - weight[j], bias[i] - bias[j]
        nearest = distance_to_boundary(y, lambda x, row=row, level=level: row @ x + level)
        assert_allclose(abs(distance), nearest, rtol=1e-6)
    assert_allclose(inputs - found.distance[:, None] * found.normal, found.point)
    random = np.random.default_rng(7)
    z = random.standard_normal((TOKENS, EXPERTS))
    chosen = np.argsort(-z, axis=1)[:, :K].astype(np.int32)
    pair = np.stack([chosen[:, -1], np.argsort(-z, axis=1)[:, K]], axis=1).astype(np.int32)
    rows = np.arange(TOKENS)
    z[rows, pair[:, 1]] = z[rows, pair[:, 0]]
    y, after = random.standard_normal((TOKENS, HIDDEN)), jumps.exchanged(chosen, pair)
    apart = np.array(
        [np.linalg.norm(expert(i, x) - expert(j, x)) for x, (i, j) in zip(y, pair, strict=True)]
    )
    of_chosen = [(e, softmax(np.take_along_axis(z, e, 1), axis=1)) for e in (chosen, after)]
    of_all = [(e, np.take_along_axis(softmax(z, axis=1), e, 1)) for e in (chosen, after)]
    every = np.tile(np.arange(EXPERTS), (TOKENS, 1))
    for form, sides in (
        (tied_weight(z, chosen, pair), of_chosen),
        (tied_weight(z, every, pair), of_all),
    ):
        assert_allclose(form * apart, jumps.jump(y, *sides, mixed), rtol=1e-12)


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
            distance_to_boundary(y, lambda x, i=i, j=j: value(x, i) - value(x, j))
            for y, (i, j) in zip(inputs, pair, strict=True)
        ]
    )
    given = inputs, pair, weight, score, logit_map, None, bias
    tie = jumps.curved_tie(*given, distance * (1 + 1e-7))
    assert_allclose(tie.distance, distance, rtol=1e-5)
    # a point that is farther than the boundary is known to be is not the nearest one
    assert not jumps.curved_tie(*given, 0.99 * distance).is_known.any()


def test_another_set_moves_the_output_by_the_difference_and_routers_are_exact():
    router = router_of("sigmoid with bias")
    y = np.random.default_rng(8).standard_normal((9, HIDDEN))
    chosen = np.tile(np.arange(3, dtype=np.int32), (9, 1))
    others = np.full((9, 3), [7, 1, 4], np.int32)
    apart, length = set_change(router, y, chosen, others, mixed)
    score = expit(y @ router.weight.T)

    def output(experts):
        own = np.take_along_axis(score, experts.astype(int), 1)
        return mixed(y, experts, 2.5 * own / own.sum(axis=1, keepdims=True))

    one, other = output(chosen), output(others)
    assert_allclose(apart, np.linalg.norm(one - other, axis=1), rtol=1e-9)
    assert_allclose(length, np.linalg.norm(one, axis=1), rtol=1e-9)
    for name in RULES:
        router = router_of(name)
        y = np.random.default_rng(9).standard_normal((TOKENS, HIDDEN))
        wanted = route(y @ router.weight.T, router.rule, router.selection_bias)
        exact = ExactRouter(router)
        logits = exact.logits(y)
        assert_array_equal(exact.chosen(logits), wanted.chosen)
        assert_allclose(exact.weights(y, logits, wanted.chosen), wanted.weights)
    asked = []

    def counted(inputs, chosen, weights):
        asked.append(set(chosen[chosen >= 0].tolist()))
        return mixed(inputs, chosen, weights)

    chosen, after = np.array([[0, 1, 2]]), np.array([[0, 1, 5]])
    weights, y = np.array([[0.5, 0.3, 0.2]]), np.ones((1, HIDDEN))
    jumps.jump(y, (chosen, weights), (after, weights), counted)
    assert asked == [{2, 5}]


def test_the_spread_is_the_largest_distance_within_the_radius_and_a_line_has_slope_1():
    random = np.random.default_rng(10)
    offset = random.uniform(-1.0, 1.0, 60)
    places = np.argsort(np.argsort(offset))
    output = np.cumsum(random.standard_normal((60, OUTPUTS)), axis=0)[places]
    radius = np.array([1e-4, 0.05, 0.3, 0.7, 1.0])
    found = jumps.spread_within(offset, output, radius)
    for place, r in enumerate(radius):
        inside = output[np.abs(offset) <= r]
        wanted = pdist(inside).max() if len(inside) > 1 else 0.0
        assert_allclose(found.whole[place], wanted)
        one = np.ptp(inside[:, found.coordinate]) if len(inside) else 0.0
        assert_allclose(found.one[place], one)
    offset, radius = np.linspace(-1.0, 1.0, 2001), np.logspace(-2, 0, 9)
    for output, slope in ((np.sign(offset), 0.0), (3.0 * offset, 1.0)):
        found = jumps.spread_within(offset, output[:, None], radius)
        assert_allclose(found.slope[1:], slope, atol=0.12)  # points stand beside r
    assert np.isnan(jumps.spread_within(offset, 0.0 * offset[:, None], radius).slope).all()
