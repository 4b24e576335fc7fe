"""Oracles: linear programs, nearest points of cells, and routed inputs.

An affine rule chooses expert i for some input exactly when a set of k experts with i is the chosen
set there. Every set is asked, so nothing about dominance goes in: without a radius by a linear
program (scipy's, by HiGHS), inside a ball by its nearest point (Lawson and Hanson). Rules with
curved scores are asked by routing inputs.
"""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.linalg import null_space

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry.boundary.reachability import Proof, Reachability, reachability
from moegeom.geometry.gram import effective_rows
from moegeom.geometry.selection import route
from tests.oracle.helpers import ahead, largest_margin, shortest_move

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
