"""Routers are exchanged; experts, load, dtype and hooks stay, and a change of experts is found."""

import copy
import functools

import numpy as np
import pytest
import torch

from moegeom.core.errors import RouterError, UsageError
from moegeom.trainable.replacement import replace_router
from moegeom.trainable.upcycling import SoftmaxGate, upcycle

transformers = pytest.importorskip("transformers")

SIZES = {
    **dict.fromkeys(("num_attention_heads", "num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("num_hidden_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
}
LATENT = {
    **dict.fromkeys(("n_routed_experts", "num_key_value_heads"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
MODELS = {
    "mixtral": ("MixtralConfig", SIZES),
    "olmoe": ("OlmoeConfig", SIZES),
    "qwen2_moe": ("Qwen2MoeConfig", SIZES),
    "deepseek_v3": ("DeepseekV3Config", SIZES | LATENT),
}
IDS = torch.arange(20).reshape(2, 10)


@functools.cache
def _made(name: str) -> torch.nn.Module:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def made(name: str = "mixtral") -> torch.nn.Module:
    return copy.deepcopy(_made(name))


def block(model: torch.nn.Module, layer: int = 0) -> torch.nn.Module:
    return model.model.layers[layer].mlp


def drawn(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(3))


class First(torch.nn.Module):
    """Without a matrix: experts 0 and 1 for all."""

    def forward(self, tokens):
        weights = tokens.new_full((len(tokens), 2), 0.5)
        chosen = torch.tensor([0, 1]).expand(len(tokens), 2)
        return tokens.new_zeros(len(tokens), 4), weights, chosen


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_exchanged_and_every_other_tensor_is_bit_equal(name):
    model, before = made(name), made(name).state_dict()
    logits = model(IDS).logits
    replace_router(model, lambda layer, old: copy.deepcopy(old))
    assert torch.equal(model(IDS).logits, logits)
    assert replace_router(model, drawn()) is model
    for tensor, value in model.state_dict().items():
        assert torch.equal(value, drawn() if ".gate.weight" in tensor else before[tensor]), tensor
    # only the layers that were asked for
    model, old = made(name), made(name)
    replace_router(model, drawn().numpy(), layers="1")
    assert torch.equal(block(model).gate.weight, block(old).gate.weight)
    assert torch.equal(block(model, 1).gate.weight, drawn())


def test_hooks_of_both_routers_fire_on_the_new_one_and_their_handles_take_them_off():
    model, seen = made(), []
    old = block(model).gate
    handles = [
        old.register_forward_hook(lambda *given: seen.append("old")),
        old.register_forward_pre_hook(
            lambda module, args, named: seen.append("before"), with_kwargs=True
        ),
    ]

    def new(layer, old):
        gate = SoftmaxGate(32, 4, 2)
        gate.register_forward_hook(lambda *given: seen.append("new"))
        return gate

    replace_router(model, new, layers=[0])
    assert isinstance(block(model).gate, SoftmaxGate)
    model(IDS)
    assert sorted(seen) == ["before", "new", "old"]
    for handle in handles:
        handle.remove()
    model(IDS)
    assert sorted(seen) == ["before", "new", "new", "old"]


def test_dtype_mode_load_and_selection_bias_are_those_of_the_old_router():
    class Counting(SoftmaxGate):
        def __init__(self) -> None:
            super().__init__(32, 4, 2)
            self.register_buffer("load", torch.zeros(4))

        def forward(self, tokens):
            found = super().forward(tokens)
            self.load += torch.bincount(found[2].flatten(), minlength=4).to(self.load.dtype)
            return found

    model = made().to(torch.bfloat16).train()
    replace_router(model, Counting())
    model(IDS)
    counted = block(model).gate.load.clone()
    assert counted.sum() == 40
    replace_router(model, lambda layer, old: Counting().eval())
    gate = block(model).gate
    assert (gate.weight.dtype, gate.training) == (torch.bfloat16, True)
    assert torch.equal(gate.load, counted)
    model = made("deepseek_v3")
    bias = block(model).gate.e_score_correction_bias
    bias += torch.arange(4.0)

    def new(layer, old):
        gate = copy.deepcopy(old)
        gate.e_score_correction_bias.zero_()
        return gate

    replace_router(model, new)
    assert torch.equal(block(model).gate.e_score_correction_bias, bias)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("mixtral", "experts.down_proj"), ("qwen2_moe", "shared_expert_gate.weight")],
)
def test_an_expert_that_changes_meanwhile_is_found_and_the_old_routers_are_back(name, tensor):
    model, before = made(name), made(name)

    def new(layer, old):
        with torch.no_grad():
            block(model, 1).get_parameter(tensor).view(-1).view(torch.int32)[7] += 1
        return SoftmaxGate(32, 4, 2)

    with pytest.raises(RouterError, match=rf"layers\.1\.mlp: tensor '{tensor}'"):
        replace_router(model, new)
    for layer in (0, 1):
        assert type(block(model, layer).gate) is type(block(before, layer).gate)
        assert torch.equal(block(model, layer).gate.weight, block(before, layer).gate.weight)
    replace_router(model, new, keep_experts=False)
    assert isinstance(block(model).gate, SoftmaxGate)


def test_a_router_that_gives_something_else_is_refused_and_rows_that_were_written_are_back():
    model, before = made(), made()
    for router, layers, message in (
        (torch.nn.Linear(32, 4, bias=False), None, r"Linear gives torch.float32 \(2, 4\)"),
        (drawn(), [5], "in layer 5"),
        (np.full((4, 32), np.nan), None, "all finite"),
        (lambda layer, old: drawn(4 - layer), None, r"shape \(3, 32\); expected \(4, 32\)"),
    ):
        with pytest.raises(UsageError, match=message):
            replace_router(model, router, layers=layers)
        assert torch.equal(block(model).gate.weight, block(before).gate.weight)
    with pytest.raises(UsageError, match="no module with experts and a router"):
        replace_router(torch.nn.Linear(3, 3), drawn())


def test_a_router_without_a_matrix_or_of_another_number_of_experts_takes_the_place_too():
    model = made()
    for router in (SoftmaxGate(32, 4, 3), First()):
        assert torch.isfinite(replace_router(model, router)(IDS).logits).all()
    with pytest.raises(UsageError, match="has no matrix"):
        replace_router(model, drawn())
    # upcycled blocks take other routers, too
    dense = transformers.LlamaConfig(**{k: SIZES[k] for k in SIZES if "experts" not in k})
    model = upcycle(transformers.AutoModelForCausalLM.from_config(dense), None, 4, 2)
    replace_router(model, SoftmaxGate(32, 4, 1))
    assert block(model).gate.top_k == 1
