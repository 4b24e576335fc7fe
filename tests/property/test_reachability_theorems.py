"""A certificate about an expert holds for every token: behind every map, score, bias and group."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.metric import RouterFacts
from moegeom.core.router import GroupMask, LogitMap, Projection, Rule, Weights
from moegeom.geometry.boundary.reachability import Proof, num_decided, reachability
from moegeom.geometry.gram import effective_rows
from moegeom.geometry.rows import composed_rows
from moegeom.geometry.selection import SCORES, route
from moegeom.metrics import METRICS
from moegeom.router.family import families, load_family
from tests.unit.scan.made import router_with

SEEDS = st.integers(0, 2**32 - 1)
EXPERTS = 8


def of_families() -> dict[str, LogitMap | None]:
    """The map of every stack of every family: as it is by default, and as a config may set it."""
    maps: dict[str, LogitMap | None] = {"none": None}
    for name in families():
        for stack in load_family(name).stacks:
            multipliers, caps = {stack.multiplier.value}, {np.inf}
            if stack.multiplier.keys:
                multipliers |= {4.0, 0.1}
            if stack.soft_cap.keys:
                caps |= {0.5, 3.0, 30.0}
            for multiplier in multipliers - {None}:
                for cap in caps:
                    if (multiplier, cap) != (1.0, np.inf):
                        made = LogitMap(float(multiplier), cap)
                        maps[f"{name} x {multiplier:g} capped at {cap:g}"] = made
    return maps


MAPS = of_families()
GROUPS = (None, GroupMask(4, 2, "max", -np.inf), GroupMask(4, 2, "top2_sum", 0.0))


def drawn(seed: int, logit_map: LogitMap | None):
    """A random router behind a norm, its rule, its biases, and 400 inputs of its ball."""
    random = np.random.default_rng(seed)
    hidden = int(random.integers(2, 12))
    weight = random.standard_normal((EXPERTS, hidden)) * random.uniform(0.02, 1.0)
    weight += random.standard_normal(hidden) * random.uniform(0.0, 0.5)
    score, groups = random.choice(sorted(SCORES)), GROUPS[random.integers(len(GROUPS))]
    offset = random.standard_normal(EXPERTS) * random.choice([0.0, 0.5])
    bias = random.standard_normal(EXPERTS) * random.uniform(0.0, 2.0)
    top_k = int(random.integers(1, 5))
    rule = Rule(top_k, score, Weights("scores"), True, True, groups, logit_map)
    radius = float(np.sqrt(hidden))
    points = random.standard_normal((400, hidden))
    points *= radius / np.linalg.norm(points, axis=1, keepdims=True)
    points[200:] *= random.random((200, 1))
    centred = weight - weight.mean(axis=0)
    ends = np.concatenate([weight, -weight, centred, -centred])
    ends *= radius / np.linalg.norm(ends, axis=1, keepdims=True)
    return weight, rule, radius, offset, bias, np.concatenate([points, ends])


@pytest.mark.parametrize("name", MAPS)
@given(seed=SEEDS)
def test_an_expert_that_a_token_chooses_is_never_certified_unreachable(name, seed):
    weight, rule, radius, offset, bias, points = drawn(seed, MAPS[name])
    certificates = reachability(effective_rows(weight, None), rule, radius, offset, bias)
    chosen = route(points @ weight.T + offset, rule, bias).chosen
    beaten = np.array([proof is Proof.beaten for proof in certificates.proofs])
    assert not beaten[chosen].any()
    has = np.zeros((len(points), EXPERTS), dtype=bool)
    np.put_along_axis(has, chosen, True, axis=1)
    assert has[:, certificates.is_certain].all()
    for expert, others in enumerate(certificates.beaten_by):
        assert has[has[:, expert]][:, others].all()


@pytest.mark.parametrize("name", MAPS)
def test_the_certificates_of_random_routers_are_not_empty(name):
    decided = 0
    for seed in range(100):
        weight, rule, radius, offset, bias, _ = drawn(seed, MAPS[name])
        decided += sum(num_decided(effective_rows(weight, None), rule, radius, offset, bias))
    assert decided > 50


@pytest.mark.parametrize("score", ["identity", "sigmoid", "sqrt_softplus"])
@given(seed=SEEDS)
def test_behind_a_map_the_certificate_of_two_opposite_rows_is_sharp(score, seed):
    """Both extremes come with one input, so that the least bias that beats is known."""
    random = np.random.default_rng(seed)
    row, radius = random.standard_normal(4), random.uniform(0.1, 2.0)
    weight = np.stack([row, -random.uniform(0.3, 3.0) * row])
    logit_map = LogitMap(random.uniform(0.1, 5.0), random.choice([np.inf, 3.0]))
    rule = Rule(1, score, Weights("scores"), True, True, logit_map=logit_map)
    end, offset = radius * row / np.linalg.norm(row), random.standard_normal(2)
    mapped = logit_map.multiplier * (end @ weight.T + offset)
    if np.isfinite(logit_map.soft_cap):
        mapped = logit_map.soft_cap * np.tanh(mapped / logit_map.soft_cap)
    lead = -np.diff(SCORES[score](mapped[None]))[0, 0]
    for more, expected in ((-1e-6, Proof.point), (1e-6, Proof.beaten)):
        bias = np.array([0.0, lead + more])
        chosen = route((end @ weight.T + offset)[None], rule, bias).chosen
        assert (chosen[0, 0] == 0) == (expected is Proof.point)
        certificates = reachability(effective_rows(weight, None), rule, radius, offset, bias)
        assert certificates.proofs[0] is expected


# ------------------------------------------------- cosines, by a dense search with their definition
HIDDEN, PROJECTED, INPUTS, SCALE = 6, 5, 20_000, 14.3


def router_of_cosines(seed: int):
    """Rows, projection and bias; the less the input turns the projection, the more is decided."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((EXPERTS, PROJECTED)) * random.uniform(0.1, 9.0, (EXPERTS, 1))
    turn = 10.0 ** random.uniform(-2.0, 0.0)
    projection = turn * random.standard_normal((PROJECTED, HIDDEN))
    return rows, projection, random.standard_normal(PROJECTED), random


def searched(rows, projection, bias, top_k, radius, random) -> np.ndarray:
    """For inputs all over the ball, most at its surface, which experts have the largest cosines."""
    inputs = random.standard_normal((INPUTS, HIDDEN))
    inputs *= radius / np.linalg.norm(inputs, axis=1, keepdims=True)
    inputs[: INPUTS // 4] *= random.random((INPUTS // 4, 1))
    seen = inputs @ projection.T + bias
    lengths = np.linalg.norm(seen, axis=1)[:, None] * np.linalg.norm(rows, axis=1)
    probabilities = np.exp(SCALE * (seen @ rows.T) / lengths)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    has = np.zeros(probabilities.shape, dtype=bool)
    np.put_along_axis(has, np.argsort(-probabilities, axis=1)[:, :top_k], True, axis=1)
    return has


@pytest.mark.parametrize("top_k", [1, 3])
def test_no_input_contradicts_a_certificate_about_cosines(top_k):
    rule, radius = Rule(top_k, "softmax", Weights("scores"), has_logit_bias=True), HIDDEN**0.5
    numbers = np.zeros(4, int)
    for seed in range(60):
        rows, projection, bias, random = router_of_cosines(seed)
        weight, offset = composed_rows(rows, projection, bias)
        certificates = reachability(effective_rows(weight, None), rule, radius, offset)
        has = searched(rows, projection, bias, top_k, radius, random)
        beaten = np.array([proof is Proof.beaten for proof in certificates.proofs])
        reached = np.array([proof is Proof.point for proof in certificates.proofs])
        assert not has[:, beaten].any()
        assert has[:, certificates.is_certain].all()
        for expert, others in enumerate(certificates.beaten_by):
            assert has[has[:, expert]][:, others].all()
        met = has.any(axis=0)[reached]
        numbers += [beaten.sum(), certificates.is_certain.sum(), reached.sum(), met.sum()]
    assert numbers.min() > 20
    # an expert is hardly ever reached so narrowly that 20 000 inputs miss it
    assert numbers[3] >= 0.95 * numbers[2]


def test_nothing_is_certified_where_cosines_are_scored_before_a_bias_is_added():
    """The range of a cosine is not that of the product that stands for it."""
    rows, projection, bias, _ = router_of_cosines(3)
    weight, offset = composed_rows(rows, projection, bias)
    rule = Rule(1, "softmax", Weights("scores"), has_logit_bias=True)
    projected = Projection(projection, bias, SCALE)
    plain = router_with(weight, rule, logit_bias=offset, projection=projected)
    rule = replace(plain.rule, score="sigmoid", has_selection_bias=True)
    biased = replace(plain, rule=rule, selection_bias=np.linspace(0.0, 9.0, EXPERTS))
    metric, quantities = METRICS["reachability"], {"effective_rows": effective_rows(weight, None)}
    row = metric.finish(quantities, RouterFacts(plain, 0))["layers"]
    assert row["num_unreachable"] + row["num_reachable"] + row["num_reach_open"] == EXPERTS
    assert metric.finish(quantities, RouterFacts(biased, 0))["layers"] == {}
