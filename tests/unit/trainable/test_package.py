"""The package: its names, what is said without torch, what its modules cost, gradients, refusals."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import moegeom.trainable
from moegeom.core.errors import UsageError
from moegeom.geometry.capacity import router_macs
from moegeom.trainable import (
    SMEAR,
    CentredRouter,
    CosineRouter,
    ExpressionProjector,
    GRURouter,
    OSRRouter,
    ReLURouter,
    SmoothTopKRouter,
    SoftMoE,
    TopKRouter,
    update_strength,
)
from moegeom.trainable.osr import orthonormal_rows, repulsive_cost, sinkhorn

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
    macs, cosine = router_macs(8, 4096, 128), router_macs(8, 4096, 256).cosine
    assert (
        costs["TopKRouter"] == costs["SmoothTopKRouter"] == costs["ReLURouter"] == str(macs.linear)
    )
    assert costs["CosineRouter"] == str(cosine)
    assert costs["GRURouter"] == str(macs.gru)
    assert costs["OSRRouter"] == str(2 * macs.projector + 64)
    assert costs["SoftMoE(experts, hidden)"] == str(3 * 8 * 4096)


#: Oracle: the products that torch counts while a module runs.
EXPERTS, K, HIDDEN, R, BATCH, LENGTH = 6, 2, 40, 5, 3, 7
TOKENS = BATCH * LENGTH


def counted(module: nn.Module) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module.eval()(torch.randn(BATCH, LENGTH, HIDDEN))
    return counter.get_total_flops() // 2


ROUTERS = {
    "top-k": TopKRouter(EXPERTS, K, HIDDEN),
    "smooth": SmoothTopKRouter(EXPERTS, K, HIDDEN),
    "relu": ReLURouter(EXPERTS, K, HIDDEN),
    "cosine": CosineRouter(EXPERTS, K, HIDDEN, projected=R),
    "centred": CentredRouter(CosineRouter(EXPERTS, K, HIDDEN, projected=R)),
}


def test_products_of_routers_are_those_of_the_formula_and_of_their_parts():
    for kind, router in ROUTERS.items():
        assert counted(router) == TOKENS * router.macs_per_token, kind
    # fused kernels count nothing: every weight of torch's own cell is used once a token
    recurrent = GRURouter(EXPERTS, K, HIDDEN, router_dim=R)
    assert recurrent.macs_per_token == sum(p.numel() for p in recurrent.gru.parameters())
    router = OSRRouter(EXPERTS, K, HIDDEN, router_dim=R)
    rows = EXPERTS * R
    once = EXPERTS**2 * R + rows**2 * HIDDEN  # who is alike, and the loss of the rows
    assert counted(router) == TOKENS * router.macs_per_token + once


def test_products_of_mixtures_are_those_of_the_formula_beside_their_experts():
    one = 2 * HIDDEN * 8
    experts = [
        nn.Sequential(nn.Linear(HIDDEN, 8, bias=False), nn.Linear(8, HIDDEN, bias=False))
        for _ in range(4)
    ]
    soft = SoftMoE(experts, HIDDEN, slots=2)
    assert counted(soft) == TOKENS * soft.macs_per_token + BATCH * 4 * 2 * one
    for causal in (False, True):
        merged = SMEAR(experts, HIDDEN, causal=causal)
        assert counted(merged) == BATCH * merged.macs(LENGTH) + TOKENS * one


def _experts() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6)) for _ in range(2)]


#: Of an input, and of every parameter.
MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "top-k": (TopKRouter(5, 2, 4, z_coef=0.1, has_bias=True), (6, 4)),
    "cosine": (CosineRouter(5, 2, 4, z_coef=0.1, projected=3), (6, 4)),
    "recurrent": (GRURouter(4, 2, 6, router_dim=3, balance_coef=0.1), (1, 3, 6)),
    "soft": (SoftMoE(_experts(), 6), (3, 6)),
    "merged": (SMEAR(_experts(), 6, causal=True), (3, 6)),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_finite_differences_and_reach_every_parameter(name):
    module, shape = MODULES[name]
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
        small = SmoothTopKRouter(4, 2, 16, boundary_coef=0.0).double()
        del small.theta
        small.theta = theta
        return small.choose(z).dense()

    theta = SmoothTopKRouter(4, 2, 16, eps=0.8).double().theta.detach().requires_grad_()
    assert torch.autograd.gradcheck(weights, (z.requires_grad_(), theta))
    router = ReLURouter(4, 2, 16, strength=0.3).double()
    z = torch.randn(5, 4, dtype=torch.float64)
    z = (z + 0.2 * z.sign()).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: (router.choose(z).dense(), router.choose(z).loss), z)
    similarity = (torch.rand(5, 4, dtype=torch.float64) * 0.5 + 0.1).requires_grad_()
    rows = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s, r: sinkhorn(-repulsive_cost(s, r, 0.5, 0.5, 0.2) / 0.2, 3), (similarity, rows)
    )


def _narrow_bias() -> None:
    router = TopKRouter(4, 2, 8, bias_rate=0.1)
    router.selection_bias = router.selection_bias.bfloat16()
    router.update_bias(torch.ones(4, dtype=torch.int64))


def _narrow_strength() -> None:
    router = ReLURouter(4, 1, 8)
    router(torch.randn(3, 8))
    router.strength = router.strength.half()
    update_strength([router])


REFUSED: dict[str, Callable[[], Any]] = {
    "top_k is 5, expected 1 to 4": lambda: TopKRouter(4, 5, 8),
    "hidden is 0": lambda: TopKRouter(4, 2, 0),
    "score is 'relu', expected softmax or sigmoid": lambda: TopKRouter(4, 2, 8, score="relu"),
    "no selection bias": lambda: TopKRouter(4, 2, 8).update_bias(torch.ones(4).long()),
    "bfloat16, in which updates are lost": _narrow_bias,
    "budget is 1.5, expected 2 to 8": lambda: SmoothTopKRouter(8, 2, 16, budget=1.5),
    "controller is 'none', expected loss or exact": lambda: SmoothTopKRouter(
        8, 2, 16, controller="none"
    ),
    "expected positive numbers": lambda: SmoothTopKRouter(8, 2, 16, eps=0.0),
    "expected a layer, a positive strength": lambda: ReLURouter(4, 1, 8, strength=0.0),
    "no batch was routed": lambda: update_strength([ReLURouter(4, 1, 8)]),
    "a strength is 0 in torch.float16": _narrow_strength,
    "33 rows of 32 numbers": lambda: ExpressionProjector(32, 33),
    "keep is 'never'": lambda: ExpressionProjector(32, 3, keep="never"),
    "rows are dependent": lambda: orthonormal_rows(torch.ones(2, 5)),
    "expected a positive eps": lambda: OSRRouter(6, 2, 32, router_dim=5, eps=0.0),
    "different parameters": lambda: SMEAR([nn.Linear(3, 3), nn.Linear(3, 4)], 3),
    "buffers": lambda: SMEAR([nn.BatchNorm1d(3)], 3),
    "0 experts of 1 slot": lambda: SoftMoE([], 3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_meant_is_refused(message):
    with pytest.raises(UsageError, match=message):
        REFUSED[message]()
