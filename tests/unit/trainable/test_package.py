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
from moegeom import trainable
from moegeom.core.errors import UsageError

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
    made = {
        "TopKRouter": trainable.TopKRouter(8, 2, 4096),
        "SmoothTopKRouter": trainable.SmoothTopKRouter(8, 2, 4096),
        "ReLURouter": trainable.ReLURouter(8, 2, 4096),
        "CosineRouter": trainable.CosineRouter(8, 2, 4096, projected=256),
    }
    for name, router in made.items():
        assert costs[name] == str(router.macs_per_token), name


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
