"""Oracle: the products that torch counts while a module runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from moegeom.trainable import (
    SMEAR,
    CentredRouter,
    CosineRouter,
    GRURouter,
    OSRRouter,
    ReLURouter,
    SmoothTopKRouter,
    SoftMoE,
    TopKRouter,
)

EXPERTS, K, HIDDEN, R, BATCH, LENGTH = 6, 2, 40, 5, 3, 7
TOKENS = BATCH * LENGTH


def counted(module: nn.Module) -> int:
    """Multiply-accumulates of a pass: torch counts two operations each."""
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


@pytest.mark.parametrize("kind", ROUTERS)
def test_products_of_a_router_are_those_of_the_formula(kind):
    assert counted(ROUTERS[kind]) == TOKENS * ROUTERS[kind].macs_per_token


def test_products_of_the_recurrent_router_are_its_parameters():
    """Fused kernels count nothing: every weight of torch's own cell is used once a token."""
    router = GRURouter(EXPERTS, K, HIDDEN, router_dim=R)
    assert router.macs_per_token == sum(p.numel() for p in router.gru.parameters())


def test_products_of_sinkhorn_routing_are_two_projections_and_what_a_batch_needs_once():
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
