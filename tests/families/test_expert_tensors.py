"""Oracle: the modules of transformers that hold the experts, on tiny random models."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.expert_tensors import ExpertTensors, ExpertWeights, open_experts
from tests.families.tiny_models import model_of, read, saved

#: One family for each way to lay out experts, and the module that holds those of a layer.
LAYOUTS = {
    "olmoe": "gate_proj, up_proj, down_proj of each expert",
    "mixtral": "w1, w3, w2 of each expert",
    "deepseek_v3": "group-limited, with shared experts beside",
    "gpt_oss": "one transposed matrix, gate and up alternating, with biases, cut off",
    "openai_privacy_filter": "one transposed matrix of two halves, with biases, cut off",
    "llama4_text": "one transposed matrix of two halves",
    "aria_text": "fc1 and fc2 of all experts, transposed",
    "granitemoe": "input_linear and output_linear of all experts",
    "gemma4_text": "one matrix of two halves, beside the router",
    "nemotron_h": "no gate",
    "inkling": "w13_weight, gate and up alternating",
    "dbrx": "all experts in the rows of one matrix",
}

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def output(tensors: ExpertTensors, expert: ExpertWeights, inputs: torch.Tensor) -> torch.Tensor:
    """The formula of ``ExpertWeights``, with the product of gpt-oss where the family says it."""

    def linear(weight: np.ndarray, bias: np.ndarray | None, x: torch.Tensor) -> torch.Tensor:
        found = x @ torch.tensor(weight, dtype=torch.float64).T
        return found if bias is None else found + torch.tensor(bias)

    gate = linear(expert.gate, expert.gate_bias, inputs)
    up = None if expert.up is None else linear(expert.up, expert.up_bias, inputs)
    if up is not None:
        limit = tensors.neurons.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if tensors.activation == "clamped_swiglu":
        assert up is not None
        inner = gate * torch.sigmoid(tensors.neurons.slope * gate) * (up + 1.0)
    else:
        inner = ACTIVATIONS[tensors.activation](gate) * (1.0 if up is None else up)
    return linear(expert.down, expert.down_bias, inner)


def of_module(module: torch.nn.Module, inputs: torch.Tensor, expert: int) -> torch.Tensor:
    """What the library makes of tokens that all choose one expert with weight 1."""
    tokens, kind = len(inputs), type(module).__name__
    if kind == "Llama4TextExperts":  # every expert reads its own copy
        stacked = inputs.float().repeat(module.num_experts, 1)
        return module(stacked).reshape(module.num_experts, tokens, -1)[expert].double()
    chosen = torch.full((tokens, 1), expert)
    return module(inputs.float(), chosen, torch.ones(tokens, 1)).reshape(tokens, -1).double()


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_expert_computes_what_its_module_does(name: str) -> None:
    model, store, router = model_of(name), open_checkpoint(saved(name)), read(name).routers[-1]
    tensors = open_experts(store, router, of_router_inputs=False)
    modules = [
        module
        for path, module in model.named_modules()
        if re.search(rf"\.{router.layer}\.", f".{path}")
        and re.search("(?<!Shared)Experts$", type(module).__name__)
    ]
    before, few = store.bytes_read, (0, router.num_experts - 1)
    inputs = 3.0 * torch.randn(
        64, router.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        for expert in few:
            expected = of_module(modules[-1], inputs, expert)
            found = output(tensors, tensors.read(expert), inputs)
            np.testing.assert_allclose(found, expected, atol=1e-5 * expected.abs().max().item())
    assert store.bytes_read - before == tensors.bytes_of(few) > 0
