"""Experts and heads as functions: blocks, mixtures, overlap, ranks, products, gates;
what data can tell of gated attention: ranks by position, splits, exchanges of channels.

Oracles: torch, the activations of transformers, scikit-learn, SciPy, explicit products and loops.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import scipy.stats
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.metrics.pairwise import cosine_similarity
from transformers.activations import ACT2FN

from moegeom.geometry.attention_heads import (
    FIGURES,
    SUMS,
    alike_heads,
    dead_heads,
    gate_pull,
    gating_figures,
    product_spectra,
    spectrum_rank,
)
from moegeom.geometry.experts import (
    ACTIVATIONS,
    MatrixSample,
    Neurons,
    adding_up,
    centred_by_expert,
    expert_output,
    is_known,
    mean_pair_cosine,
    mixed_output,
    near_copies,
    neurons,
    tokens_by_expert,
)
from moegeom.geometry.number_formats import NUMBER_FORMATS

X = np.r_[np.linspace(-30.0, 30.0, 2001), 0.0, -1e4, 1e4]

#: Names that transformers has another word for, or none.
OTHER = {"relu_squared": "relu2", "gelu_python_tanh": "gelu_pytorch_tanh"}


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


# ------------------------------------------------------------------------------------------ blocks
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_that_of_transformers(name: str) -> None:
    expected = ACT2FN[OTHER.get(name, name)](torch.tensor(X)).numpy()
    # transformers' fast form has rounded constants
    rtol = 1e-7 if name in ("gelu_fast", "gelu_accurate") else 1e-12
    assert_allclose(ACTIVATIONS[name](X), expected, rtol=rtol, atol=rtol)
    assert ACTIVATIONS[name](X.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_expert_is_three_linear_layers(dtype: type) -> None:
    gate, up, down = drawn(5, 8), drawn(5, 8) + 1.0, drawn(8, 5)
    biases = drawn(5), drawn(5) + 1.0, drawn(8)
    inputs = drawn(20, 8).astype(dtype)
    y, linear = torch.tensor(inputs), torch.nn.functional.linear
    weights = [torch.tensor(m).to(y.dtype) for m in (gate, up, down, *biases)]
    active = torch.nn.functional.silu(linear(y, weights[0], weights[3]))
    expected = linear(active * linear(y, weights[1], weights[4]), weights[2], weights[5])
    output = expert_output(inputs, gate, up, down, Neurons("silu"), *biases)
    assert output.dtype == dtype
    assert_allclose(output, expected, rtol=1e-4 if dtype == np.float32 else 1e-12)


def test_limits_bound_the_gate_from_above_and_up_on_both_sides_and_a_product_needs_both():
    gate, up = torch.tensor(10.0 * drawn(40, 6)), torch.tensor(10.0 * drawn(6, 40).T)
    silu, limited = torch.nn.functional.silu, up.clamp(-3.0, 3.0)
    for how, expected in (
        (Neurons("silu", 3.0), silu(gate.clamp(max=3.0)) * limited),
        (Neurons("silu", 3.0, limits_activation=True), silu(gate).clamp(max=3.0) * limited),
    ):
        assert_allclose(neurons(gate.numpy(), up.numpy(), how), expected, rtol=1e-12, atol=1e-12)
    names = (("clamped_swiglu", True), ("clamped_swiglu", False), ("relu2", False), ("", True))
    assert [is_known(Neurons(name), gated) for name, gated in names] == [True, False, True, False]


def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts() -> None:
    inputs, matrices = drawn(30, 4), drawn(6, 7, 4)
    draw = np.random.default_rng(0)
    chosen = np.stack([draw.permutation(6)[:3] for _ in range(30)]).astype(np.int32)
    chosen[::4, 1] = -1
    weights = draw.random((30, 3))
    calls = []

    def contribution(expert: int, some: np.ndarray, by: np.ndarray) -> np.ndarray:
        calls.append(expert)
        return by[:, None] * (some @ matrices[expert].T)

    mixed = mixed_output(contribution, inputs, chosen, weights)
    for token in range(30):
        slots = zip(chosen[token], weights[token], strict=True)
        expected = sum(g * matrices[e] @ inputs[token] for e, g in slots if e >= 0)
        assert_allclose(mixed[token], expected, rtol=1e-12)
    assert calls == sorted(set(calls))
    empty = np.full((3, 2), -1, np.int32)
    assert list(tokens_by_expert(empty)) == []
    nothing = mixed_output(lambda e, y, g: y, drawn(3, 4), empty, np.ones((3, 2)))
    assert_array_equal(nothing, np.zeros((3, 4)))


# ----------------------------------------------------------------------------------------- overlap
OUTPUTS = np.random.default_rng(0).standard_normal((7, 4, 5))


def test_cosines_are_those_of_pairs_and_outputs_add_up_as_their_directions_say() -> None:
    above = np.triu_indices(4, 1)
    expected = [cosine_similarity(rows)[above].mean() for rows in OUTPUTS]
    assert_allclose(mean_pair_cosine(OUTPUTS), expected, rtol=1e-12)
    outputs = OUTPUTS.copy()
    outputs[:, 1] = 0.0
    rest = mean_pair_cosine(OUTPUTS[:, [0, 2, 3]])
    assert_allclose(mean_pair_cosine(outputs), rest, rtol=1e-12)
    outputs[0, 2:] = 0.0
    assert_array_equal(np.isnan(mean_pair_cosine(outputs)), [True] + 6 * [False])
    opposite = np.array([[1.0, 2.0], [-1.0, -2.0]])
    outputs = (np.ones((4, 3)), np.eye(4), opposite, np.zeros((2, 2)))
    assert_allclose([adding_up(o[None])[0] for o in outputs], [1.0, 0.5, 0.0, np.nan])


def test_each_expert_is_centred_over_its_own_tokens() -> None:
    draw = np.random.default_rng(1)
    experts = np.stack([draw.permutation(6)[:4] for _ in range(7)])
    experts[experts == 5] = 6  # and one that only one token chose
    experts[0, 0] = 9
    outputs = OUTPUTS.astype(np.float32)
    centred = centred_by_expert(outputs, experts)
    for expert in np.unique(experts):
        rows = outputs[experts == expert]
        assert_allclose(centred[experts == expert], rows - rows.mean(axis=0), atol=1e-6)
    assert_array_equal(centred[0, 0], 0.0)


# --------------------------------------------------------------- products of output and value matrices
def heads(seed: int, values: int, number: int, channels: int, hidden: int, inputs: int):
    random = np.random.default_rng(seed)
    of_values = random.standard_normal((values, channels, inputs))
    return of_values, random.standard_normal((number, hidden, channels))


def products(values, outputs):
    group = len(outputs) // len(values)
    return [outputs[h] @ values[h // group] for h in range(len(outputs))]


@pytest.mark.parametrize(
    ("hidden", "inputs"), [(20, 30), (5, 30), (20, 3)], ids=["wide", "few rows", "few columns"]
)
def test_spectra_are_those_of_the_explicit_product(hidden, inputs):
    values, outputs = heads(1, 2, 6, 8, hidden, inputs)
    spectra = product_spectra(values, outputs)
    for spectrum, product in zip(spectra, products(values, outputs), strict=True):
        explicit = np.zeros(8)
        singular = np.linalg.svd(product, compute_uv=False)[:8]
        explicit[: len(singular)] = singular
        assert_allclose(spectrum, explicit, atol=1e-12 * singular[0])


def test_ranks_are_those_of_explicit_products_and_a_small_head_is_dead():
    values, outputs = heads(2, 3, 3, 8, 40, 40)
    values[1, 5:] = values[1, :3]
    outputs[2, :, 1:] = outputs[2, :, :1]
    ranks = [spectrum_rank(spectrum)[0] for spectrum in product_spectra(values, outputs)]
    explicit = [np.linalg.matrix_rank(p, rtol=1e-7) for p in products(values, outputs)]
    assert ranks == explicit == [8, 5, 1]
    share = np.array([4.0, 2.0, 1.0]) / 7.0
    entropy = -sum(p * math.log(p) for p in share)
    spectra = ([3.0, 3.0, 3.0, 0.0], [4.0, 2.0, 1.0], [0.0] * 4)
    both = [spectrum_rank(np.array(spectrum)) for spectrum in spectra]
    assert_allclose(both, [(3, 3.0), (3, math.exp(entropy)), (0, 0.0)], rtol=1e-6)
    norms = np.array([1.0, 1.0, 1.0, 0.0099, 0.0101])
    assert dead_heads(norms).tolist() == [False, False, False, True, False]
    assert dead_heads(np.array([0.0, 0.0, 0.0, 5.0])).tolist() == [True, True, True, False]


def test_heads_with_one_product_are_alike_by_the_cosine_of_explicit_products():
    values, outputs = heads(3, 5, 5, 6, 30, 30)
    mixing = np.random.default_rng(4).standard_normal((6, 6))
    values[4] = mixing @ values[1]
    outputs[4] = -3.0 * outputs[1] @ np.linalg.inv(mixing)
    outputs[2] *= 0.0
    pairs = alike_heads(values, outputs, least=-1.0)
    assert all(pair[2] > 0.8 for pair in pairs)  # only those that agree on probes are looked at
    assert alike_heads(values, outputs) == []  # the opposite is not alike
    outputs[4] *= -1.0
    ((*pair, cosine),) = alike_heads(values, outputs)
    assert pair == [1, 4]
    assert cosine == pytest.approx(1.0, abs=1e-12)
    values, outputs = heads(5, 2, 4, 6, 30, 30)
    outputs[1] = outputs[0] + 0.1 * np.random.default_rng(6).standard_normal((30, 6))
    ((one, two, cosine),) = alike_heads(values, outputs, least=0.9)
    first, second = (products(values, outputs)[h].ravel() for h in (one, two))
    explicit = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert 0.99 < cosine < 0.999
    assert cosine == pytest.approx(explicit, abs=1e-12)


# ------------------------------------------------------------------------------------------- gates
BLOCKS, HEADS = 16, 3


def mean_gate(blocks: int, each: int, gates: np.ndarray):
    """Of gates (tokens, heads), ``each`` tokens in the first blocks; the means of these too."""
    shaped = gates.reshape(blocks, each, -1)
    sums = {name: np.zeros((BLOCKS, gates.shape[1])) for name in SUMS}
    sums["gate"][:blocks] = shaped.sum(axis=1)
    tokens = np.where(np.arange(BLOCKS) < blocks, each, 0)
    return gating_figures(sums, tokens, tokens)["gate_mean"], shaped.mean(axis=1)


def test_the_error_of_a_mean_of_equal_blocks_is_that_of_the_blocks():
    for blocks, each in ((BLOCKS, 5), (2, 4)):
        gates = np.random.default_rng(0).random((blocks * each, HEADS))
        figure, means = mean_gate(blocks, each, gates)
        assert_allclose(figure.value, gates.mean(axis=0))
        assert figure.mean == pytest.approx(gates.mean())
        assert figure.mean_error == pytest.approx(scipy.stats.sem(means.mean(axis=1)))
    one, _ = mean_gate(1, 8, gates)
    assert np.isnan(one.mean_error) and np.isfinite(one.value).all()
    none = np.zeros(BLOCKS, int)
    figures = gating_figures({name: np.zeros((BLOCKS, HEADS)) for name in SUMS}, none, none)
    assert figures.keys() == FIGURES.keys()
    assert all(np.isnan(f.value).all() and np.isnan(f.mean) for f in figures.values())


def test_the_pull_of_gates_is_what_was_planted():
    inner = 3.0 + np.random.default_rng(0).normal(size=(4000, HEADS, 8))
    pull = gate_pull(inner.sum(axis=0), (inner**2).sum(axis=0), len(inner))
    assert_allclose(pull, 3.0, rtol=0.05)
    assert np.isinf(gate_pull(np.full((1, 8), 10.0), np.full((1, 8), 10.0), 10))
    assert np.isnan(gate_pull(np.zeros((1, 8)), np.zeros((1, 8)), 10))


# -------------------------------------------------- noise around a common start is told from growth
BF16 = NUMBER_FORMATS["bfloat16"].unit


def trained(seed: int, experts: int, common: float = 0.0) -> list[np.ndarray]:
    """Three matrices with heavy tails, and a direction that all experts have in common."""
    draw = np.random.default_rng(seed)
    return [0.02 * (draw.standard_t(6, (experts, 2048)) + common * draw.standard_t(6, 2048))
            for _ in range(3)]  # fmt: skip


def groups_of(
    matrices: list[np.ndarray], dtype: type = ml_dtypes.bfloat16
) -> list[tuple[int, ...]]:
    unit = {ml_dtypes.bfloat16: BF16, np.float32: 2.0**-24}[dtype]
    stored = [MatrixSample(one.astype(dtype).astype(np.float64), unit) for one in matrices]
    return sorted(one.experts for one in near_copies(stored))


def component(links: np.ndarray, first: int) -> tuple[int, ...]:
    """Experts that are reached from one over links, one step after the other."""
    reached = {first}
    while new := {b for a in reached for b in np.flatnonzero(links[a])} - reached:
        reached |= new
    return tuple(sorted(map(int, reached)))


@pytest.mark.parametrize("common", [0.0, 0.7])
@pytest.mark.parametrize("noise", [1e-2, 1e-3, 1e-6])
def test_copies_with_noise_are_the_components_of_pairs_that_correlate(noise, common):
    draw = np.random.default_rng(1)
    matrices = trained(2, 24, common)
    for one in matrices:
        one[5] = one[1] + noise * draw.standard_normal(2048)
        one[[7, 8, 20]] = one[3] + noise * draw.standard_normal((3, 2048))
    alike = np.minimum.reduce([np.corrcoef(one) for one in matrices])
    links = alike > (0.6 if common else 0.3)
    expected = {component(links, expert) for expert in range(24)}
    assert groups_of(matrices) == sorted(group for group in expected if len(group) > 1)
    assert groups_of(matrices) == [(1, 5), (3, 7, 8, 20)]


def test_figures_of_a_group_are_their_definitions_and_hidden_noise_says_so():
    draw = np.random.default_rng(3)
    matrices = [one[:1] + 1e-3 * draw.standard_normal((5, 2048)) for one in trained(4, 1)]
    (group,) = near_copies([MatrixSample(one) for one in matrices])
    pairs = [np.corrcoef(one) - np.eye(5) for one in matrices]
    assert_allclose(group.correlation, np.minimum.reduce(pairs).max(axis=1).min(), rtol=1e-12)
    apart = [np.mean((one[:, None] - one) ** 2) * 5 / 4 / np.mean(one**2) for one in matrices]
    assert_allclose(group.deviation, np.sqrt(max(apart)), rtol=1e-9)
    assert (group.experts, group.is_resolved) == ((0, 1, 2, 3, 4), True)
    below = [one[:1] + 1e-6 * draw.standard_normal((2, 2048)) for one in trained(4, 1)]
    stored = [one.astype(ml_dtypes.bfloat16).astype(np.float64) for one in below]
    (group,) = near_copies([MatrixSample(one, BF16) for one in stored])
    assert not group.is_resolved


#: What training leaves, of experts that are trained apart, and of noise around a common start.
LEAVINGS = {
    "drawn apart": lambda draw, e: trained(draw.integers(99), e),
    "a common direction": lambda draw, e: trained(draw.integers(99), e, 2.0),
    "columns": lambda draw, e: grown(draw, e, np.exp(0.4 * draw.standard_normal(2048))),
    "heavy tails": lambda draw, e: grown(draw, e, draw.laplace(size=(e, 2048))),
    "one matrix alone is common": lambda draw, e: [
        *grown(draw, e, 1.0)[:1], *trained(draw.integers(99), e)[1:]
    ],
    "directions of their own": lambda draw, e: grown(
        draw, e, 1.0, 0.5 * draw.standard_normal((e, 3)) @ draw.standard_normal((3, 2048))
    ),
}  # fmt: skip


def grown(draw, experts: int, size, along=0.0) -> list[np.ndarray]:
    return [
        one + 2e-3 * (size * draw.standard_normal((experts, 2048)) + along)
        for one in trained(int(draw.integers(99)), 1)
    ]


@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize("name", LEAVINGS)
def test_what_training_leaves_is_no_copy(name, experts):
    draw = np.random.default_rng(7)
    assert groups_of(grown(draw, experts, 1.0)) == [tuple(range(experts))]
    assert groups_of(LEAVINGS[name](draw, experts)) == []


def test_experts_without_variation_are_in_no_group():
    matrices = trained(5, 4)
    for one in matrices:
        one[:2] = 0.0
    assert groups_of(matrices) == []
