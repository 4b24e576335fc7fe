"""Gradients of all modules are finite differences, and what no module can mean is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moegeom.core.errors import UsageError
from moegeom.trainable import (
    SMEAR,
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
from moegeom.trainable.expression import orthonormal_rows
from moegeom.trainable.osr import repulsive_cost, sinkhorn


def _experts() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6)) for _ in range(2)]


#: Of an input, and of every parameter.
MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "top-k": (TopKRouter(5, 2, 4, z_coef=0.1), (6, 4)),
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


def test_gradients_of_weights_and_width_are_finite_differences():
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


def test_gradients_of_positive_logits_are_finite_differences_away_from_zero():
    router = ReLURouter(4, 2, 16, strength=0.3).double()
    z = torch.randn(5, 4, dtype=torch.float64)
    z = (z + 0.2 * z.sign()).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: (router.choose(z).dense(), router.choose(z).loss), z)


def test_gradients_of_cost_and_plan_are_finite_differences():
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
