"""The package: its names, what is said without torch, and what its modules cost."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import moegeom.trainable
from moegeom.core.errors import UsageError
from moegeom.geometry.capacity.costs import router_macs
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

ROOT = Path(__file__).resolve().parents[3]


def test_every_name_exists_and_is_documented_and_none_is_that_of_a_module():
    names, modules = (set(part) for part in zip(*moegeom.trainable._PUBLIC.items(), strict=True))
    assert names <= set(dir(moegeom.trainable)) and names & modules == set()
    assert [name for name in names if not inspect.getdoc(getattr(moegeom.trainable, name))] == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = moegeom.trainable.Nothing


def test_without_torch_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"moegeom\.trainable needs torch") as caught:
        importlib.reload(moegeom.trainable)
    assert "[torch]" in caught.value.hint
    monkeypatch.undo()
    importlib.reload(moegeom.trainable)


def test_the_package_alone_loads_no_torch():
    code = "import sys; import moegeom.trainable; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stderr


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
