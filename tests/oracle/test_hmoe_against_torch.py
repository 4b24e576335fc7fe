"""Oracle: attention, its gated forms and derivatives of the regression functions by torch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.special import expit

from moegeom.geometry.hmoe.activation import ACTIVATIONS, homogeneity_residual
from moegeom.geometry.hmoe.attention import mixture_of_attention
from moegeom.geometry.hmoe.descent import mean_square
from moegeom.geometry.hmoe.identifiability import component_family
from moegeom.geometry.hmoe.mixture import Mixture, published_truth, split, with_channels
from moegeom.geometry.hmoe.regression import (
    PLACEMENTS,
    channel_functions,
    gradient,
    jacobian,
    regression,
    traced,
)
from moegeom.kernels.cpu import mixture as kernels

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

GENERATOR = np.random.default_rng(5)
INPUTS = GENERATOR.uniform(-1.0, 1.0, (40, 2))


def gated(position: str) -> Mixture:
    """The published parameters, with rows of gates where the position has them."""
    truth = published_truth()
    rows = {"none": None, "head": 1, "channel": truth.num_channels}[PLACEMENTS[position].gates]
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


def entry(matrices, tokens, position: str, row: int, column: int, gates=None) -> float:
    mixture = mixture_of_attention(*(m.numpy() for m in matrices), TOKENS, row, column)
    mixture = dataclasses.replace(mixture, gates=gates)
    return float(regression(mixture, tokens.numpy().reshape(1, -1), position)[0])


def entries(matrices, tokens, position: str, gates=lambda row: None) -> np.ndarray:
    return np.array(
        [
            [entry(matrices, tokens, position, row, column, gates(row)) for column in range(WIDTH)]
            for row in range(TOKENS)
        ]
    )


def test_attention_is_a_mixture(attention):
    module, matrices, tokens = attention
    expected = module(tokens, tokens, tokens, need_weights=False)[0].detach().numpy()
    np.testing.assert_allclose(entries(matrices, tokens, "none"), expected, rtol=0, atol=1e-12)


def by_heads(matrices, tokens, on_value, on_sdpa) -> np.ndarray:
    query, key, value = (tokens @ matrix for matrix in matrices[:3])
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, on_value(value))
    return (on_sdpa(mixed) @ matrices[3]).sum(dim=0).numpy()


def test_attention_with_an_activation_behind_values_or_around_is_a_mixture(attention):
    _, matrices, tokens = attention
    one = by_heads(matrices, tokens, torch.sigmoid, lambda z: z)
    two = by_heads(matrices, tokens, lambda z: z, torch.sigmoid)
    np.testing.assert_allclose(entries(matrices, tokens, "value"), one, rtol=0, atol=1e-12)
    np.testing.assert_allclose(entries(matrices, tokens, "sdpa"), two, rtol=0, atol=1e-12)
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
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------- derivatives
def in_torch(weights, scores, experts, gates, x, position, activation):
    """The regression function, from its definition in the documentation."""
    place, act = PLACEMENTS[position], IN_TORCH[activation]
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


def parts(mixture: Mixture):
    arrays = (mixture.weights, mixture.scores, mixture.experts, mixture.gates)
    return [None if a is None else torch.tensor(a, requires_grad=True) for a in arrays]


SMOOTH = ("sigmoid", "silu", "tanh")


@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("position", PLACEMENTS)
def test_the_function_and_its_gradient_are_those_of_autograd(position, activation):
    mixture = gated(position)
    arrays = parts(mixture)
    factor = np.linspace(-1.0, 2.0, len(INPUTS))
    expected = in_torch(*arrays, torch.tensor(INPUTS.T), position, activation)
    trace = traced(mixture, INPUTS, position, ACTIVATIONS[activation])
    np.testing.assert_allclose(trace.output, expected.detach(), rtol=0, atol=1e-12)
    (expected * torch.tensor(factor)).sum().backward()
    found = gradient(mixture, trace, factor)
    for name, array in zip(("weights", "scores", "experts"), arrays, strict=False):
        np.testing.assert_allclose(getattr(found, name), array.grad, rtol=0, atol=1e-11)


def random_mixture(seed: int, experts: int, size: float) -> Mixture:
    """Three heads of five channels, in three dimensions."""
    generator = np.random.default_rng(seed)
    return Mixture(
        generator.normal(size=(3, 5)),
        size * generator.normal(size=(3, experts, 3, 3)),
        size * generator.normal(size=(3, experts, 5, 3)),
    )


#: Samples of less than a block, of whole blocks, and of blocks and a rest.
@pytest.mark.parametrize("samples", [3, 512, 700])
@pytest.mark.parametrize("position", ["none", "value", "sdpa"])
@pytest.mark.parametrize("squares", [mean_square, kernels.mean_square])
def test_mean_squares_and_their_gradients_are_those_of_autograd(squares, position, samples):
    generator = np.random.default_rng(samples)
    x, y = generator.uniform(-1.0, 1.0, (samples, 3)), generator.normal(size=samples)
    for experts, size in ((2, 1.0), (4, 1.0), (2, 30.0), (4, 30.0)):
        mixture = random_mixture(samples, experts, size)
        arrays = parts(mixture)
        apart = in_torch(*arrays, torch.tensor(x.T), position, "sigmoid") - torch.tensor(y)
        expected = (apart**2).mean()
        expected.backward()
        loss, found = squares(x, y, position)(mixture)
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-12)
        for name, array in zip(("weights", "scores", "experts"), arrays, strict=False):
            grad = array.grad.numpy()
            atol = 1e-12 * abs(grad).max()
            np.testing.assert_allclose(getattr(found, name), grad, rtol=0, atol=atol)


def test_the_polynomial_of_the_compiled_pass_is_the_exponential_function():
    """By the sigmoid of one number, squared; where that is below every number, 0."""
    at = np.concatenate([np.linspace(-340.0, 50.0, 1500), np.linspace(-1.0, 1.0, 500)])
    one = Mixture(np.ones((1, 1)), np.zeros((1, 1, 1, 1)), np.ones((1, 1, 1, 1)))

    def squared(z: float) -> float:
        return kernels.mean_square(np.array([[z]]), np.zeros(1), "value")(one)[0]

    np.testing.assert_allclose([*map(squared, at)], expit(at) ** 2, rtol=5e-15)
    assert [*map(squared, (-1e4, -710.0, 710.0, 1e4))] == [0.0, 0.0, 1.0, 1.0]
    assert math.isnan(squared(math.nan))


@pytest.mark.parametrize("position", PLACEMENTS)
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
    np.testing.assert_allclose(jacobian(mixture, INPUTS, position), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_the_derivatives_of_autograd(name):
    z = torch.linspace(-3.0, 3.0, 50, dtype=torch.float64, requires_grad=True)
    expected = IN_TORCH[name](z)
    (slope,) = torch.autograd.grad(expected.sum(), z, create_graph=True)
    activation = ACTIVATIONS[name]
    value, found = activation.at(z.detach().numpy())
    np.testing.assert_allclose(value, expected.detach(), atol=1e-14)
    np.testing.assert_allclose(found, slope.detach(), atol=1e-14)
    curvature = activation.curvature(z.detach().numpy())
    if slope.requires_grad:
        (second,) = torch.autograd.grad(slope.sum(), z, allow_unused=True)
        np.testing.assert_allclose(
            curvature, 0.0 * z.detach() if second is None else second, atol=1e-13
        )
    else:
        np.testing.assert_array_equal(curvature, 0.0)
    residual = torch.linalg.norm(z * slope - expected) / torch.linalg.norm(expected)
    found = homogeneity_residual(activation, z.detach().numpy())
    np.testing.assert_allclose(found, residual.detach(), atol=1e-13)


def test_the_family_of_a_component_spans_every_derivative_up_to_the_second():
    """Of u = exp(x'Mx) sigmoid(a.x) in M and a, by autograd, and no function more than those."""
    truth = published_truth()
    score, expert = truth.scores[0, 0], truth.experts[0, 0, 0]
    points = np.random.default_rng(0).uniform(-1.0, 1.0, (60, 2))
    family = component_family(score, expert, ACTIVATIONS["sigmoid"], points)

    def component(x):
        def at(parameters):
            matrix = parameters[:4].reshape(2, 2)
            return torch.exp(x @ matrix @ x) * torch.sigmoid(parameters[4:] @ x)

        return at

    at = torch.tensor([*score.ravel(), *expert])
    derivatives = []
    for point in torch.tensor(points):
        one = component(point)
        first = torch.autograd.functional.jacobian(one, at)
        second = torch.autograd.functional.hessian(one, at)
        derivatives.append(torch.cat([one(at)[None], first, second.ravel()]))
    expected = torch.stack(derivatives).numpy()
    assert expected.shape[1] == 43
    rank = np.linalg.matrix_rank(expected / np.linalg.norm(expected, axis=0), tol=1e-10)
    both = np.concatenate([expected, family], axis=1)
    assert family.shape[1] == rank == 18
    assert np.linalg.matrix_rank(both / np.linalg.norm(both, axis=0), tol=1e-10) == rank


def test_no_activation_satisfies_the_second_definition_as_it_is_printed():
    """Its family has u_M and u_Ma of u = exp(x'Mx) (a.x), and a . u_Ma = u_M (F-23)."""
    truth = published_truth()
    at = torch.tensor([*truth.scores[0, 0].ravel(), *truth.experts[0, 0, 0]])
    for point in torch.tensor(INPUTS[:5]):

        def component(parameters, x=point):
            matrix = parameters[:4].reshape(2, 2)
            return torch.exp(x @ matrix @ x) * (parameters[4:] @ x)

        first = torch.autograd.functional.jacobian(component, at)[:4]
        mixed = torch.autograd.functional.hessian(component, at)[:4, 4:]
        np.testing.assert_allclose(mixed @ at[4:], first, rtol=1e-12)


def test_channels_are_what_weights_add_up():
    truth = published_truth()
    for position in ("none", "value"):
        channels = channel_functions(truth, INPUTS, position)
        summed = np.einsum("nhk,hk->n", channels, truth.weights)
        np.testing.assert_allclose(summed, regression(truth, INPUTS, position), atol=1e-14)


@pytest.mark.parametrize("position", ["none", "value", "sdpa"])
def test_copies_of_channels_with_split_weights_are_the_same_function(position):
    truth = published_truth()
    expected = regression(truth, INPUTS, position)
    for channels in (2, 3, 4, 5):
        found = regression(with_channels(truth, channels), INPUTS, position)
        np.testing.assert_allclose(found, expected, atol=1e-13)
    none = split(truth, np.zeros(2))
    np.testing.assert_allclose(regression(none, INPUTS, position), expected, atol=1e-13)
