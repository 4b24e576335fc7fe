"""The package: its names, what is said without torch, what its modules cost, gradients, refusals;
routers are exchanged: experts, load, dtype and hooks stay, and a change of experts is found.
"""

import copy
import functools
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import moegeom.trainable
from moegeom import trainable
from moegeom.core.errors import RouterError, UsageError
from moegeom.geometry.capacity import router_macs
from moegeom.trainable.replacement import replace_router
from moegeom.trainable.upcycling import SoftmaxGate, upcycle

ROOT = Path(__file__).resolve().parents[3]


def test_every_name_exists_and_is_documented_and_none_is_that_of_a_module():
    names, modules = (set(part) for part in zip(*moegeom.trainable._PUBLIC.items(), strict=True))
    assert names <= set(dir(moegeom.trainable)) and names & modules == set()
    assert [name for name in names if not inspect.getdoc(getattr(moegeom.trainable, name))] == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = moegeom.trainable.Nothing


def test_the_package_alone_loads_no_torch_and_without_it_the_error_names_the_extra(monkeypatch):
    code = "import sys; import moegeom.trainable; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stderr
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"moegeom\.trainable needs torch") as caught:
        importlib.reload(moegeom.trainable)
    assert "[torch]" in caught.value.hint
    monkeypatch.undo()
    importlib.reload(moegeom.trainable)


def test_the_page_has_the_costs_of_the_formulas():
    page = (ROOT / "docs/trainable.md").read_text("utf-8")
    costs = {
        line.split("`")[1]: line.split("|")[4].split()[0]
        for line in page.splitlines()
        if line.startswith("| `")
    }
    macs = router_macs(8, 4096, 256)
    assert (
        costs["TopKRouter"] == costs["SmoothTopKRouter"] == costs["ReLURouter"] == str(macs.linear)
    )
    assert costs["CosineRouter"] == str(macs.cosine)


#: Oracle: the products that torch counts while a module runs.
EXPERTS, K, HIDDEN, R, BATCH, LENGTH = 6, 2, 40, 5, 3, 7
TOKENS = BATCH * LENGTH


def counted(module: nn.Module) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module.eval()(torch.randn(BATCH, LENGTH, HIDDEN))
    return counter.get_total_flops() // 2


ROUTERS = {
    "top-k": trainable.TopKRouter(EXPERTS, K, HIDDEN),
    "smooth": trainable.SmoothTopKRouter(EXPERTS, K, HIDDEN),
    "relu": trainable.ReLURouter(EXPERTS, K, HIDDEN),
    "cosine": trainable.CosineRouter(EXPERTS, K, HIDDEN, projected=R),
    "smooth cosine": trainable.SmoothCosineRouter(EXPERTS, K, HIDDEN, projected=R),
    "centred": trainable.CentredRouter(trainable.CosineRouter(EXPERTS, K, HIDDEN, projected=R)),
}


def test_products_of_routers_are_those_of_the_formula_and_of_their_parts():
    for kind, router in ROUTERS.items():
        assert counted(router) == TOKENS * router.macs_per_token, kind
        weights = sum(p.numel() for p in router.parameters() if p.ndim > 1)
        assert weights == router.macs_per_token, kind  # what is stored is used once a token


#: Of an input, and of every parameter.
MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "top-k": (trainable.TopKRouter(5, 2, 4, z_coef=0.1, has_bias=True), (6, 4)),
    "cosine": (trainable.CosineRouter(5, 2, 4, z_coef=0.1, projected=3), (6, 4)),
}


@pytest.mark.parametrize(("module", "shape"), MODULES.values(), ids=MODULES)
def test_gradients_are_finite_differences_and_reach_every_parameter(module, shape):
    module.double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    own = {n: p for n, p in module.named_parameters() if not n.startswith("experts")}

    def outcome(x: torch.Tensor, *values: torch.Tensor) -> Any:
        result = torch.func.functional_call(module, dict(zip(own, values, strict=True)), x)
        return result if isinstance(result, torch.Tensor) else (result.dense(), result.loss)

    assert torch.autograd.gradcheck(outcome, (x, *own.values()))
    results = outcome(x, *own.values())
    sum(part.square().sum() for part in results).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_gradients_of_single_parts_are_finite_differences():
    z = torch.tensor(
        [[1.0, 0.4, 0.36 - 0.72, -2.0], [2.0, 0.9, 0.9 - 0.77, 0.9 - 0.75]], dtype=torch.float64
    )

    def weights(z: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        small = trainable.SmoothTopKRouter(4, 2, 16, boundary_coef=0.0).double()
        del small.theta
        small.theta = theta
        return small.choose(z).dense()

    theta = trainable.SmoothTopKRouter(4, 2, 16, eps=0.8).double().theta.detach().requires_grad_()
    assert torch.autograd.gradcheck(weights, (z.requires_grad_(), theta))
    router = trainable.ReLURouter(4, 2, 16, strength=0.3).double()
    z = torch.randn(5, 4, dtype=torch.float64)
    z = (z + 0.2 * z.sign()).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: (router.choose(z).dense(), router.choose(z).loss), z)


def _narrow_bias() -> None:
    router = trainable.TopKRouter(4, 2, 8, bias_rate=0.1)
    router.selection_bias = router.selection_bias.bfloat16()
    router.update_bias(torch.ones(4, dtype=torch.int64))


def _narrow_strength() -> None:
    router = trainable.ReLURouter(4, 1, 8)
    router(torch.randn(3, 8))
    router.strength = router.strength.half()
    trainable.update_strength([router])


REFUSED: dict[str, Callable[[], Any]] = {
    "top_k is 5, expected 1 to 4": lambda: trainable.TopKRouter(4, 5, 8),
    "hidden is 0": lambda: trainable.TopKRouter(4, 2, 0),
    "score is 'relu', expected softmax or sigmoid": lambda: trainable.TopKRouter(
        4, 2, 8, score="relu"
    ),
    "no selection bias": lambda: trainable.TopKRouter(4, 2, 8).update_bias(torch.ones(4).long()),
    "bfloat16, in which updates are lost": _narrow_bias,
    "budget is 1.5, expected 2 to 8": lambda: trainable.SmoothTopKRouter(8, 2, 16, budget=1.5),
    "controller is 'none', expected loss or exact": lambda: trainable.SmoothTopKRouter(
        8, 2, 16, controller="none"
    ),
    "expected positive numbers": lambda: trainable.SmoothTopKRouter(8, 2, 16, eps=0.0),
    "expected a layer, a positive strength": lambda: trainable.ReLURouter(4, 1, 8, strength=0.0),
    "no batch was routed": lambda: trainable.update_strength([trainable.ReLURouter(4, 1, 8)]),
    "a strength is 0 in torch.float16": _narrow_strength,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_meant_is_refused(message):
    with pytest.raises(UsageError, match=message):
        REFUSED[message]()


# ----------------------------------------------------------------------- routers of another's model
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
