"""Oracles: HiGHS on the whole linear program, SciPy's assignment, and gates written again in torch."""

from itertools import product

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import linear_sum_assignment, linprog, minimize
from scipy.sparse import csr_array
from scipy.special import expit

from moegeom.core.router import Weights
from moegeom.geometry import balancing as biases
from moegeom.geometry import load, whatif
from moegeom.geometry.balancing import (
    balance_by_updates,
    chosen_counts,
    contenders,
    minimise_smoothed,
)
from moegeom.geometry.selection import SCORES
from moegeom.geometry.selection import top_k as picked
from tests.by_day import by_day

SHAPES = [(1, 4, 2), (7, 5, 2), (50, 8, 1), (97, 12, 11), (160, 16, 4), (250, 48, 8)]
KINDS = ["even", "uneven", "offset", "integers", "saturated", "repeated", "duplicates"]


def scores_of(kind: str, tokens: int, experts: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng([seed, tokens, experts])
    q = random.standard_normal((tokens, experts))
    if kind == "uneven":
        q += 2.0 * random.standard_normal(experts)
    if kind == "offset":
        q += 1e3
    if kind == "integers":
        q = random.integers(0, 4, (tokens, experts)).astype(np.float64)
    if kind == "saturated":  # one expert that every token scores 1, one that none wants
        q = 1.0 / (1.0 + np.exp(-q))
        q[:, 0], q[:, 1] = 1.0, 0.0
    if kind == "repeated":
        q = np.repeat(q[: -(-tokens // 2)], 2, axis=0)[:tokens]
    if kind == "duplicates":
        q[:, -1] = q[:, 0]
    return q


def program(q: np.ndarray, k: int) -> float:
    """The optimum of max sum x q over all shares x, quotas as equalities."""
    tokens, experts = q.shape
    number = np.arange(q.size)
    row = np.concatenate([number // experts, tokens + number % experts])
    table = csr_array((np.ones(2 * q.size), (row, np.tile(number, 2))))
    ends = np.concatenate([np.full(tokens, float(k)), np.full(experts, k * tokens / experts)])
    solved = linprog(-q.ravel(), A_eq=table, b_eq=ends, bounds=(0, 1), method="highs")
    assert solved.status == 0
    return -solved.fun


CASES = list(product(KINDS, SHAPES))
#: Each kind and each shape.
BY_DAY = [(kind, SHAPES[n % len(SHAPES)]) for n, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "shape"), by_day(CASES, BY_DAY))
def test_the_value_is_that_of_the_whole_program_and_counts_miss_by_the_tied_tokens(kind, shape):
    tokens, experts, k = shape
    q = scores_of(kind, tokens, experts)
    result = biases.balancing_bias(q, k)
    assert_allclose(result.value, program(q, k), rtol=1e-9, atol=1e-9 * biases.score_spread(q))
    assert np.abs(result.counts - k * tokens / experts).max() <= result.num_tied + 1e-9
    slots = picked(q + result.bias, k).ravel()
    assert_array_equal(result.counts, np.bincount(slots, minlength=experts))


@pytest.mark.parametrize("kind", ["even", "uneven", "offset", "saturated"])
def test_the_gap_is_the_dual_at_the_bias_less_the_optimum(kind):
    q = scores_of(kind, 160, 16)
    found = biases.balancing_bias(q, 4)
    by_hand = biases.dual_value(q, found.bias, 4, 40.0) - program(q, 4)
    assert by_hand >= -1e-8
    assert_allclose(found.gap * biases.score_spread(q) * 4 * 160, by_hand, atol=1e-7)
    assert found.gap < 1e-3


def test_scores_without_ties_are_balanced_to_a_token_also_by_updates_and_any_bias_bounds_the_program():
    q = scores_of("uneven", 2000, 32)
    found = biases.balancing_bias(q, 4)
    assert found.counts.max() <= 251
    assert found.counts.min() >= 249
    assert chosen_counts(q, 4).max() > 800
    q = scores_of("uneven", 97, 12)
    best, random = program(q, 3), np.random.default_rng(5)
    bounds = [biases.dual_value(q, b, 3, 97 * 3 / 12) for b in random.standard_normal((20, 12))]
    assert min(bounds) >= best - 1e-9
    q = scores_of("uneven", 500, 10)
    bias = balance_by_updates([lambda b: chosen_counts(q + b, 3)] * 2, [np.zeros(10)], 0.5)
    assert load.max_vio(chosen_counts(q + bias, 3)) < 0.05
    assert load.max_vio(chosen_counts(q, 3)) > 0.5


def test_shifts_of_tokens_and_experts_change_nothing_and_a_start_leads_near():
    q, random = scores_of("uneven", 400, 16), np.random.default_rng(6)
    shifts = random.standard_normal(16)
    plain = biases.balancing_bias(q, 4)
    moved = biases.balancing_bias(q + random.standard_normal((400, 1)) + shifts, 4)
    apart = moved.bias + shifts - shifts.mean() - plain.bias
    assert_allclose(apart, 0.0, atol=0.05 * biases.score_spread(q))
    assert moved.counts.max() == plain.counts.max()
    warm = biases.balancing_bias(q, 4, 3.0 * random.standard_normal(16))
    assert_allclose(warm.bias, plain.bias, atol=0.05 * biases.score_spread(q))
    assert max(plain.counts.max(), warm.counts.max()) <= 102
    assert warm.value is None


@pytest.mark.parametrize(("tokens", "experts", "k"), [(9, 5, 5), (9, 1, 1), (0, 4, 2)])
def test_where_every_bias_does_the_same_it_is_zero(tokens, experts, k):
    found = biases.balancing_bias(np.ones((tokens, experts), dtype=np.float32), k)
    assert_array_equal(found.bias, np.zeros(experts))
    assert found.num_tied == 0
    if tokens:
        assert_array_equal(found.counts, np.full(experts, tokens))


def test_equal_tokens_are_ties_dead_experts_come_back_and_duplicates_are_named():
    for value in (0.0, 1.0, -3e5):
        constant = biases.balancing_bias(np.full((40, 6), value), 2)
        assert constant.num_tied == 40
        assert_array_equal(constant.counts, [40, 40, 0, 0, 0, 0])
        assert_allclose(constant.value, 80 * value)
    random = np.random.default_rng(10)
    q = 1.0 / (1.0 + np.exp(-random.standard_normal((600, 8))))
    q[:, 2] = 0.0
    found = biases.balancing_bias(q, 2)
    assert chosen_counts(q, 2)[2] == 0
    assert_array_equal(found.counts, np.full(8, 150))
    row = np.random.default_rng(9).standard_normal(6)
    found = biases.balancing_bias(np.tile(row, (40, 1)), 2)
    assert (found.num_tied, found.counts.max()) == (40, 40)
    assert_allclose(found.value, 80 * row.mean(), rtol=1e-12)
    assert_allclose(found.bias, row.mean() - row, atol=1e-15)
    q = scores_of("even", 50, 8)
    q[:, 5] = q[:, 1] + 0.25
    q[:, 7] = q[:, 5]
    assert biases.duplicate_experts(q) == [(1, 5, 7)]
    q[3, 7] += 1e-3
    assert biases.duplicate_experts(q) == [(1, 5)]
    assert biases.duplicate_experts(q[:1]) == []
    mask = whatif.hard_set(np.random.default_rng(15).standard_normal((1000, 8)), 2)
    counts = load.unit_counts(mask, np.arange(1000))
    assert counts.shape == (256, 8)
    assert_array_equal(counts.sum(axis=0), mask.sum(axis=0))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_mask_is_that_of_sorted_picks(k):
    for kind in KINDS:
        q = scores_of(kind, 50, 8)
        mask = np.zeros(q.shape, dtype=bool)
        np.put_along_axis(mask, picked(q, k).astype(np.int64), True, axis=1)
        assert_array_equal(whatif.hard_set(q, k), mask)


def test_the_smoothed_dual_has_the_minimum_that_scipy_finds():
    q, k, eps = scores_of("uneven", 60, 6), 2, 0.3

    def smoothed(b):
        z = (q + b) / eps
        low, high = z.min(axis=1) - 40.0, z.max(axis=1) + 40.0
        for _ in range(80):
            middle = 0.5 * (low + high)
            above = expit(z - middle[:, None]).sum(axis=1) > k
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        value = eps * (np.logaddexp(0.0, z - low[:, None]).sum() + k * low.sum()) - 20.0 * b.sum()
        return value, expit(z - low[:, None]).sum(axis=0) - 20.0

    theirs = minimize(smoothed, np.zeros(6), jac=True, method="L-BFGS-B", tol=1e-14).x
    ours = minimise_smoothed(contenders(q, np.zeros(6), 6), np.zeros(6), k, 20.0, eps, 1e-9)
    assert_allclose(ours - ours.mean(), theirs - theirs.mean(), atol=1e-5)


def even_choice(random: np.random.Generator, documents: int, own: float) -> np.ndarray:
    """Counts by document of 64 tokens that are even in expectation; documents have preferences."""
    experts, k, length = 32, 4, 64
    taste = own * random.standard_normal((documents, experts))
    draws = random.gumbel(size=(documents * length, experts)) + np.repeat(taste, length, axis=0)
    mask = whatif.hard_set(draws, k)
    return load.unit_counts(mask, np.arange(documents * length) // length)


@pytest.mark.parametrize("own", [0.0, 0.7])
def test_even_routing_stays_below_the_limit_as_often_as_it_says(own):
    """Monte Carlo with 24 documents: 10 % above, alone and for a bias made on other documents."""
    random = np.random.default_rng(11)
    above = np.zeros(2)
    for _ in range(40):
        first, second = (load.scatter(even_choice(random, 24, own)) for _ in range(2))
        above[0] += first.load.max() - 1.0 > load.max_vio_limit([first], 0.1)
        above[1] += (first.load - second.load).max() > load.max_vio_limit([first, second], 0.1)
    assert (above / 40 < 0.21).all()
    assert (above / 40 > 0.01).all()


def test_even_loads_stay_near_the_floor_one_document_has_no_limit_and_reductions_are_rarely_believed():
    first = load.scatter(even_choice(np.random.default_rng(12), 256, 0.0))
    floor = load.max_vio_floor(256 * 64, 32, 4)
    # the mean of the largest of 32 normal deviates is 2.07; the floor has sqrt(2 log 32) = 2.63
    assert 0.7 * floor < load.max_vio_limit([first], 0.5) < 0.9 * floor
    assert floor < load.max_vio_limit([first], 0.01) < 2.0 * floor
    lonely = load.scatter(even_choice(np.random.default_rng(13), 1, 0.0))
    assert load.max_vio_limit([lonely], 0.05) == np.inf
    assert load.cv_squared_reduction(lonely, lonely)[1] == 1.0
    # Before and after are both even: Monte Carlo, at most about 5 % of p values are below 5 %.
    random = np.random.default_rng(14)
    draws = [[load.scatter(even_choice(random, 32, 0.5)) for _ in range(2)] for _ in range(100)]
    assert np.mean([load.cv_squared_reduction(*pair)[1] < 0.05 for pair in draws]) < 0.11


# -------------------------------------------------------------------------------------------- plans
FEW_TOKENS, FEW_EXPERTS = 8, 4


def drawn(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.uniform(-1, 1, (FEW_TOKENS, FEW_EXPERTS)) - random.uniform(0, 1, FEW_EXPERTS)


def assigned(cost: np.ndarray) -> np.ndarray:
    """Expert of each token at least cost, each expert with its fair share of tokens."""
    tokens, experts = cost.shape
    quota = tokens // experts
    token, place = linear_sum_assignment(np.repeat(cost, quota, axis=1))
    expert = np.empty(tokens, dtype=int)
    expert[token] = place // quota
    return expert


def test_one_expert_a_token_has_the_value_of_the_program():
    random = np.random.default_rng(0)
    scores = random.uniform(0, 1, (64, FEW_EXPERTS)) + random.uniform(0, 0.5, FEW_EXPERTS)
    value = biases.balancing_bias(scores, 1).value
    assert_allclose(scores[np.arange(64), assigned(-scores)].sum(), value, rtol=1e-9)


# -------------------------------------------------------------------------------------------- gates
TOKENS, EXPERTS, K = 64, 10, 3


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((TOKENS, EXPERTS))


def faded(q: torch.Tensor, eps: float, a: float = 1.0, b: float = 50.0) -> torch.Tensor:
    last = q.topk(K, dim=-1).values[:, -1:]
    u = (q - last + eps) / eps
    inside = u.clamp(1e-300, 1 - 1e-16)
    s = inside.pow(a) / (inside.pow(a) + (1 - inside).pow(b))
    return torch.where(u <= 0, torch.zeros_like(s), torch.where(u >= 1, torch.ones_like(s), s))


@pytest.mark.parametrize("eps", [0.05, 0.5, 3.0])
def test_the_smoothed_softmax_gate(logits, eps):
    z = torch.tensor(logits)
    powers = z.exp() * faded(z, eps)
    expected = powers / powers.sum(-1, keepdim=True)
    selected = Weights("softmax_of_selected_logits")
    assert_allclose(
        whatif.smooth_gate(logits, logits, logits, K, selected, eps), expected, rtol=1e-12
    )
    # softmax over all, then renormalised, is the same gate; it need not be renormalised
    scores, plain = SCORES["softmax"](logits), z.softmax(-1) * faded(z, eps)
    for weights, gate in ((Weights("scores", True), expected), (Weights("scores"), plain)):
        assert_allclose(
            whatif.smooth_gate(logits, scores, logits, K, weights, eps), gate, rtol=1e-12
        )


@pytest.mark.parametrize("eps", [0.01, 0.1, 0.6])
def test_the_smoothed_sigmoid_gate_has_its_strip_in_biased_scores(logits, eps):
    z = torch.tensor(logits)
    bias = np.random.default_rng(1).uniform(-0.2, 0.2, EXPERTS)
    selection = z.sigmoid() + torch.tensor(bias)
    gates = z.sigmoid() * faded(selection, eps)
    expected = 2.5 * gates / (gates.sum(-1, keepdim=True) + 1e-20)
    weights = Weights("scores", renormalise=True, epsilon=1e-20, scale=2.5)
    scores = SCORES["sigmoid"](logits)
    found = whatif.smooth_gate(logits, scores, scores + bias, K, weights, eps)
    assert_allclose(found, expected, rtol=1e-11)
    selected = Weights("sigmoid_of_selected_logits", renormalise=True, epsilon=1e-20, scale=2.5)
    other = whatif.smooth_gate(logits, logits, scores + bias, K, selected, eps)
    assert_allclose(other, expected, rtol=1e-11)


def test_experts_take_the_tokens_that_torch_ranks_first_and_a_threshold_rectifies(logits):
    best = torch.tensor(logits).topk(7, dim=0).indices
    expected = torch.zeros(TOKENS, EXPERTS).scatter(0, best, 1.0).bool()
    assert_array_equal(whatif.expert_choice(logits, 7), expected)
    assert_array_equal(whatif.relu_gate(logits, 0.4), torch.relu(torch.tensor(logits) - 0.4))
