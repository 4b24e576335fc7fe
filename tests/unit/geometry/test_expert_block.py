"""Oracle: torch and the activations of transformers; mixtures by a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from moegeom.geometry.expert_block import (
    ACTIVATIONS,
    Neurons,
    expert_output,
    is_known,
    mixed_output,
    neurons,
    tokens_by_expert,
)

X = np.r_[np.linspace(-30.0, 30.0, 2001), 0.0, -1e4, 1e4]

#: Names that transformers has another word for, or none.
OTHER = {"relu_squared": "relu2", "gelu_python_tanh": "gelu_pytorch_tanh"}


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_that_of_transformers(name: str) -> None:
    expected = ACT2FN[OTHER.get(name, name)](torch.tensor(X)).numpy()
    # transformers' fast form has rounded constants
    rtol = 1e-7 if name in ("gelu_fast", "gelu_accurate") else 1e-12
    found = ACTIVATIONS[name](X)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)
    assert ACTIVATIONS[name](X.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_expert_is_three_linear_layers(dtype: type) -> None:
    gate, up, down = drawn(5, 8), drawn(5, 8) + 1.0, drawn(8, 5)
    biases = drawn(5), drawn(5) + 1.0, drawn(8)
    inputs = drawn(20, 8).astype(dtype)
    kind = torch.tensor(inputs).dtype
    weights = [torch.tensor(m).to(kind) for m in (gate, up, down, *biases)]
    y, linear = torch.tensor(inputs), torch.nn.functional.linear
    active = torch.nn.functional.silu(linear(y, weights[0], weights[3]))
    expected = linear(active * linear(y, weights[1], weights[4]), weights[2], weights[5])
    found = expert_output(inputs, gate, up, down, Neurons("silu"), *biases)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=1e-4 if dtype == np.float32 else 1e-12)


def test_limits_bound_the_gate_from_above_and_up_on_both_sides() -> None:
    gate, up = torch.tensor(10.0 * drawn(40, 6)), torch.tensor(10.0 * drawn(6, 40).T)
    silu = torch.nn.functional.silu
    for how, expected in (
        (Neurons("silu", 3.0), silu(gate.clamp(max=3.0)) * up.clamp(-3.0, 3.0)),
        (
            Neurons("silu", 3.0, limits_activation=True),
            silu(gate).clamp(max=3.0) * up.clamp(-3.0, 3.0),
        ),
    ):
        found = neurons(gate.numpy(), up.numpy(), how)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_a_product_needs_gate_and_up() -> None:
    assert is_known(Neurons("clamped_swiglu"), True)
    assert not is_known(Neurons("clamped_swiglu"), False)
    assert is_known(Neurons("relu2"), False)
    assert not is_known(Neurons(""), True)


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

    found = mixed_output(contribution, inputs, chosen, weights)
    for token in range(30):
        expected = sum(
            g * matrices[e] @ inputs[token]
            for e, g in zip(chosen[token], weights[token], strict=True)
            if e >= 0
        )
        np.testing.assert_allclose(found[token], expected, rtol=1e-12)
    assert calls == sorted(set(calls))


def test_nothing_chosen_gives_nothing() -> None:
    empty = np.full((3, 2), -1, np.int32)
    assert list(tokens_by_expert(empty)) == []
    found = mixed_output(lambda e, y, g: y, drawn(3, 4), empty, np.ones((3, 2)))
    np.testing.assert_array_equal(found, np.zeros((3, 4)))
