"""Oracles: attention and derivatives of regression functions by torch, losses by loops."""

import dataclasses
import math
from itertools import permutations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.optimize import curve_fit
from scipy.spatial.distance import cdist

from benchmarks import gated_attention as mixtures
from benchmarks import least_squares_finds_the_function_before_the_parameters as fits
from benchmarks import slopes_of_descents_are_those_of_their_starts as descents

IN_TORCH = {
    "identity": lambda z: z,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
}

#: Tokens, their width, heads: width / heads channels.
TOKENS, WIDTH, HEADS = 3, 4, 2

INPUTS = np.random.default_rng(5).uniform(-1.0, 1.0, (40, 2))


def gated(position: str) -> mixtures.Mixture:
    """The published parameters, with rows of gates where the position has them."""
    truth = mixtures.published_truth()
    rows = {"none": None, "head": 1, "channel": truth.weights.shape[1]}[
        mixtures.PLACEMENTS[position].gates
    ]
    gates = None if rows is None else np.random.default_rng(2).normal(size=(2, rows, 2))
    return dataclasses.replace(truth, gates=gates)


# --------------------------------------------------------------------------------------- identities
@pytest.fixture(scope="module")
def attention():
    """A multi-head attention of torch in float64, its matrices by head, and tokens."""
    torch.manual_seed(3)
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=False, dtype=torch.float64)
    tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    projections = module.in_proj_weight.detach().reshape(3, HEADS, -1, WIDTH).transpose(2, 3)
    output = module.out_proj.weight.detach().T.reshape(HEADS, -1, WIDTH)
    return module, [*projections, output], tokens


def mixture_of_attention(query, key, value, output, row: int, column: int) -> mixtures.Mixture:
    """One entry of the output as a mixture in all tokens, one after the other (docs/theory.md C1)."""
    scores = np.zeros((HEADS, TOKENS, TOKENS, WIDTH, TOKENS, WIDTH))
    experts = np.zeros((HEADS, TOKENS, value.shape[2], TOKENS, WIDTH))
    for other in range(TOKENS):
        scores[:, other, row, :, other] = query @ key.transpose(0, 2, 1) / math.sqrt(key.shape[2])
        experts[:, other, :, other] = value.transpose(0, 2, 1)
    scores = scores.reshape(HEADS, TOKENS, TOKENS * WIDTH, TOKENS * WIDTH)
    return mixtures.Mixture(
        output[:, :, column],
        (scores + scores.transpose(0, 1, 3, 2)) / 2.0,
        experts.reshape(HEADS, TOKENS, -1, TOKENS * WIDTH),
    )


def entries(matrices, tokens, position: str, gates=lambda row: None) -> np.ndarray:
    """The output, each entry by a mixture of its own."""
    text, output = tokens.numpy().reshape(1, -1), np.empty((TOKENS, WIDTH))
    for row, column in np.ndindex(output.shape):
        mixture = mixture_of_attention(*(m.numpy() for m in matrices), row, column)
        mixture = dataclasses.replace(mixture, gates=gates(row))
        output[row, column] = mixtures.regression(mixture, text, position)[0]
    return output


def by_heads(matrices, tokens, on_value, on_sdpa) -> np.ndarray:
    query, key, value = (tokens @ matrix for matrix in matrices[:3])
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, on_value(value))
    return (on_sdpa(mixed) @ matrices[3]).sum(dim=0).numpy()


def test_attention_is_a_mixture_also_with_an_activation_behind_values_or_around(attention):
    module, matrices, tokens = attention
    plain = module(tokens, tokens, tokens, need_weights=False)[0].detach().numpy()
    one = by_heads(matrices, tokens, torch.sigmoid, lambda z: z)
    two = by_heads(matrices, tokens, lambda z: z, torch.sigmoid)
    for position, expected in (("none", plain), ("value", one), ("sdpa", two)):
        assert_allclose(entries(matrices, tokens, position), expected, rtol=0, atol=1e-12)
    assert abs(one - two).max() > 0.01


@pytest.mark.parametrize("position", ["gate_per_head", "gate_per_channel"])
def test_the_gates_of_released_models_multiply_and_are_no_activation(attention, position):
    _, matrices, tokens = attention
    rows = 1 if position == "gate_per_head" else WIDTH // HEADS
    weight = torch.randn(HEADS, rows, WIDTH, dtype=torch.float64)
    gate = torch.sigmoid(tokens @ weight.transpose(1, 2))

    def rows_of(row: int) -> np.ndarray:
        """Gates read the token that asks, not the whole text."""
        found = np.zeros((HEADS, rows, TOKENS, WIDTH))
        found[:, :, row] = weight
        return found.reshape(HEADS, rows, -1)

    expected = by_heads(matrices, tokens, lambda z: z, lambda mixed: gate * mixed)
    found = entries(matrices, tokens, position, rows_of)
    assert_allclose(found, expected, rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------- derivatives
def in_torch(weights, scores, experts, gates, x, position, activation):
    """The regression function, from its definition in the documentation."""
    place, act = mixtures.PLACEMENTS[position], IN_TORCH[activation]
    if place.on_score:
        score = torch.einsum("hian,an->hin", act(torch.einsum("hiab,bn->hian", scores, x)), x)
    else:
        score = torch.einsum("an,hiab,bn->hin", x, scores, x)
    value = torch.einsum("hika,an->hikn", experts, x)
    value = act(value) if place.on_value else value
    channel = torch.einsum("hin,hikn->hkn", torch.softmax(score, dim=1), value)
    channel = act(channel) if place.on_sdpa else channel
    if gates is not None:
        channel = channel * torch.sigmoid(gates @ x)
    found = torch.einsum("hk,hkn->n", weights, channel)
    return act(found) if place.on_output else found


def parts(mixture: mixtures.Mixture):
    arrays = (mixture.weights, mixture.scores, mixture.experts, mixture.gates)
    return [None if a is None else torch.tensor(a, requires_grad=True) for a in arrays]


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "tanh"])
@pytest.mark.parametrize("position", mixtures.PLACEMENTS)
def test_the_function_is_that_of_torch(position, activation):
    mixture = gated(position)
    expected = in_torch(*parts(mixture), torch.tensor(INPUTS.T), position, activation)
    found = mixtures.regression(mixture, INPUTS, position, mixtures.ACTIVATIONS[activation])
    assert_allclose(found, expected.detach(), rtol=0, atol=1e-12)


def random_mixture(seed: int, channels: int, experts: int = 3, dims: int = 2, size: float = 1.0):
    """As many heads as dimensions."""
    generator = np.random.default_rng(seed)
    scores = size * generator.normal(size=(dims, experts, dims, dims))
    return mixtures.Mixture(
        generator.uniform(0.1, 1.0, (dims, channels)),
        scores + scores.transpose(0, 1, 3, 2),
        size * generator.normal(size=(dims, experts, channels, dims)),
    )


@pytest.mark.parametrize("position", mixtures.PLACEMENTS)
def test_the_jacobian_is_that_of_autograd_in_the_entries_of_symmetric_matrices(position):
    mixture, x = gated(position), torch.tensor(INPUTS.T)
    weights, scores, experts, gates = parts(mixture)
    rows, columns = np.triu_indices(2)
    upper = scores.detach()[:, :, rows, columns].requires_grad_()

    def function(weights, upper, experts, *gates):
        matrix = torch.zeros(scores.shape, dtype=torch.float64)
        matrix[:, :, rows, columns] = upper
        full = matrix + matrix.transpose(2, 3) - torch.diag_embed(matrix.diagonal(dim1=2, dim2=3))
        return in_torch(weights, full, experts, *(gates or (None,)), x, position, "sigmoid")

    asked = [weights, upper, experts, *([] if gates is None else [gates])]
    expected = torch.autograd.functional.jacobian(function, tuple(asked))
    expected = torch.cat([part.reshape(len(INPUTS), -1) for part in expected], dim=1)
    assert_allclose(mixtures.jacobian(mixture, INPUTS, position), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", mixtures.ACTIVATIONS)
def test_activations_have_the_derivatives_of_autograd(name):
    z = torch.linspace(-3.0, 3.0, 50, dtype=torch.float64, requires_grad=True)
    expected = IN_TORCH[name](z)
    (slope,) = torch.autograd.grad(expected.sum(), z)
    value, found = mixtures.ACTIVATIONS[name].at(z.detach().numpy())
    assert_allclose(value, expected.detach(), atol=1e-14)
    assert_allclose(found, slope.detach(), atol=1e-14)


# ------------------------------------------------------------------------------------------- losses
SAMPLE = np.random.default_rng(1).uniform(-1.0, 1.0, (300, 2))


def by_hand(fitted: mixtures.Mixture, true: mixtures.Mixture, position: str, power) -> float:
    """From the definition: ``power`` of a cell's number of members."""
    fitted, true = descents.centred(fitted), descents.centred(true)
    ours, theirs = (
        descents.channel_functions(some, SAMPLE, position).reshape(len(SAMPLE), -1)
        for some in (fitted, true)
    )
    cell = cdist(ours.T, theirs.T, "sqeuclidean").argmin(axis=1)
    norm, total = np.linalg.norm, 0.0
    for number in range(theirs.shape[1]):
        h, k = divmod(number, true.weights.shape[1])
        members = [divmod(int(m), fitted.weights.shape[1]) for m in np.flatnonzero(cell == number)]
        total += abs(sum(fitted.weights[at] for at in members) - true.weights[h, k])
        for head, channel in members:
            pairs = []
            for order in permutations(range(len(true.scores[0]))):
                score = [
                    norm(fitted.scores[head, j] - true.scores[h, i]) for i, j in enumerate(order)
                ]
                experts = fitted.experts[head, list(order), channel] - true.experts[h, :, k]
                parts = np.array([*score, *norm(experts, axis=1)])
                pairs.append(((parts**2).sum(), (parts ** power(len(members))).sum()))
            total += fitted.weights[head, channel] * min(pairs)[1]
    return float(total)


@pytest.mark.parametrize("position", ["none", "value", "sdpa"])
@pytest.mark.parametrize("seed", range(4))
def test_losses_are_those_of_every_channel_and_permutation(position, seed):
    fitted, true = random_mixture(seed, 3), random_mixture(seed + 100, 2)
    for r in (1.0, 2.0, 3.0):
        found = descents.loss_1(fitted, true, SAMPLE, r, position)
        assert_allclose(found, by_hand(fitted, true, position, lambda _, r=r: r))
    expected = by_hand(fitted, true, position, lambda members: 1.0 if members == 1 else 2.0)
    assert_allclose(descents.loss_2(fitted, true, SAMPLE, position), expected)


@pytest.mark.parametrize("position", ["none", "value", "sdpa"])
def test_the_same_function_in_another_order_gauge_or_in_copies_has_no_loss(position):
    true = random_mixture(7, 2)
    order, gauge = [2, 0, 1], np.array([[1.0, 0.3], [0.3, -2.0]])
    same = mixtures.Mixture(
        true.weights[::-1, ::-1],
        true.scores[::-1][:, order] + gauge,
        true.experts[::-1][:, order][:, :, ::-1],
    )
    expected = mixtures.regression(true, SAMPLE, position)
    assert_allclose(mixtures.regression(same, SAMPLE, position), expected, atol=1e-12)
    assert descents.loss_2(same, true, SAMPLE, position) < 1e-12
    raw = np.linalg.norm(same.scores[::-1][:, np.argsort(order)] - true.scores)
    assert raw > 1.0, "without the gauge it would count"
    truth = mixtures.published_truth()
    expected = mixtures.regression(truth, INPUTS, position)
    if position != "sdpa":  # there the activation is between the channels and their sum
        channels = descents.channel_functions(truth, INPUTS, position)
        assert_allclose(np.einsum("nhk,hk->n", channels, truth.weights), expected, atol=1e-14)
    copies = [descents.with_channels(truth, channels) for channels in (2, 3, 4, 5)]
    same = [
        mixtures.regression(copy, INPUTS, position)
        for copy in [*copies, descents.split(truth, np.zeros(2))]
    ]
    assert_allclose(same, [expected] * 5, atol=1e-13)


# ---------------------------------------------------------------------------------------- estimates
def test_least_deviations_are_those_of_curve_fit():
    truth = fits.one_head()
    generator = np.random.default_rng(0)
    inputs = generator.uniform(-1.0, 1.0, (1000, 2))
    noise = 1e-4
    targets = mixtures.regression(truth, inputs, "value") + noise * generator.normal(
        size=len(inputs)
    )
    _, covariance = curve_fit(
        lambda x, *vector: mixtures.regression(fits.filled(np.array(vector), truth), x, "value"),
        inputs,
        targets,
        p0=fits.free(truth),
        sigma=np.full(len(inputs), noise),
        absolute_sigma=True,
    )
    kept = np.ones(11, dtype=bool)
    kept[4:7] = False
    derivatives = mixtures.jacobian(truth, inputs, "value")[:, kept]
    found = mixtures.cramer_rao_sd(derivatives, noise, len(inputs))
    assert_allclose(found, np.sqrt(np.diag(covariance)), rtol=0.02)
