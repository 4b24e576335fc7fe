"""Megatron-Core checkpoints: arguments of the run as config, layers in one tensor or one each."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core import limits
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Router
from moegeom.router.load import load_routers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LAYERS, EXPERTS, HIDDEN = 3, 6, 16


class Backend(enum.Enum):
    """Arguments hold such things."""

    auto = 1


ARGUMENTS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_experts": EXPERTS, "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": None, "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_load_balancing_type": "seq_aux_loss",
    "norm_epsilon": 1e-5, "normalization": "RMSNorm", "apply_layernorm_1p": True,
    "add_bias_linear": False, "attention_backend": Backend.auto, "params_dtype": torch.bfloat16,
    "nested": {"a": [1, 2]},
}  # fmt: skip


def _tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "mlp.router.weight": torch.randn(LAYERS, EXPERTS, HIDDEN, generator=draw),
        "mlp.router.expert_bias": torch.randn(LAYERS, EXPERTS, generator=draw),
        "pre_mlp_layernorm.weight": torch.rand(LAYERS, HIDDEN, generator=draw),
    }


def write_megatron(folder: Path, is_stacked: bool, **arguments: Any) -> Path:
    named = {
        f"decoder.layers.{tail}" if is_stacked else f"decoder.layers.{layer}.{tail}": (
            stacked if is_stacked else stacked[layer].clone()
        )
        for tail, stacked in _tensors().items()
        for layer in range(1 if is_stacked else LAYERS)
        if tail != "mlp.router.expert_bias" or "moe_router_score_function" not in arguments
    }
    dcp.save(named, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    args = argparse.Namespace(**(ARGUMENTS | arguments))
    torch.save({"args": args, "iteration": 7, "checkpoint_version": 3.0}, folder / "common.pt")
    return folder


@pytest.mark.parametrize("is_stacked", [True, False])
def test_every_layer_is_a_router_in_both_layouts(is_stacked, tmp_path):
    found = load_routers(open_checkpoint(write_megatron(tmp_path, is_stacked)))
    assert [router.name for router in found.routers] == ["text/0", "text/1", "text/2"]
    stored = _tensors()
    for layer, router in enumerate(found.routers):
        assert router.rule.weights.scale == 2.5
        assert (router.rule.score, router.rule.has_selection_bias) == ("sigmoid", True)
        parts = {
            "mlp.router.weight": router.weight,
            "mlp.router.expert_bias": router.selection_bias,
            "pre_mlp_layernorm.weight": router.gain,
        }
        for tail, values in parts.items():
            offset = 1.0 if tail.startswith("pre_mlp") else 0.0
            np.testing.assert_array_equal(values, stored[tail][layer].numpy() + np.float32(offset))


def test_the_arguments_decide_the_rule_and_layers_are_read_from_their_places(tmp_path):
    store = open_checkpoint(write_megatron(tmp_path, is_stacked=True))
    name = "decoder.layers.2.mlp.router.weight"
    expected = _tensors()["mlp.router.weight"][2].numpy().tobytes()
    assert store.read_bytes(name, 8, 40) == expected[8:48]
    assert store.info(name).shape == (EXPERTS, HIDDEN)
    softmax = {"moe_router_score_function": "softmax"}
    for arguments, expected in (
        (softmax, ("identity", "softmax_of_selected_logits")),
        (softmax | {"moe_router_pre_softmax": True}, ("softmax", "scores")),
        ({}, ("sigmoid", "scores")),
    ):
        rule = _routers(tmp_path, **arguments)[0].rule
        assert (rule.score, rule.weights.source) == expected


def _routers(folder: Path, **arguments: Any) -> Sequence[Router]:
    new = folder / f"{len(list(folder.iterdir()))}"
    return load_routers(open_checkpoint(write_megatron(new, True, **arguments))).routers


def test_arguments_of_another_rule_and_none_are_refused(tmp_path):
    groups = {"moe_router_topk": 6, "moe_router_num_groups": 3, "moe_router_group_topk": 2}
    for arguments, sentence in (
        ({"normalization": "LayerNorm"}, "normalization"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        (groups, "sum of their 3 largest"),
    ):
        with pytest.raises(RouterError, match=sentence):
            _routers(tmp_path, **arguments)
    folder = write_megatron(tmp_path, True)
    torch.save({"iteration": 7}, folder / "common.pt")
    with pytest.raises(CheckpointError, match="holds no arguments of the run"):
        load_routers(open_checkpoint(folder))


def test_nothing_that_the_arguments_name_is_called(tmp_path):
    folder = write_megatron(tmp_path, True)
    canary = tmp_path / "canary"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(canary),)

    args = argparse.Namespace(**ARGUMENTS, trap=Trap())
    torch.save({"args": args}, folder / "common.pt")
    assert len(load_routers(open_checkpoint(folder)).routers) == LAYERS
    assert not canary.exists()


def test_names_of_all_layers_are_counted_before_they_are_made(tmp_path, monkeypatch):
    layers, tensors = 500, 61
    monkeypatch.setattr(limits, "TENSORS", 30_000)
    properties = TensorProperties(torch.float32)
    described: Any = {
        f"decoder.layers.a{i}": TensorStorageMetadata(properties, torch.Size([layers, 0]), [])
        for i in range(tensors)
    }
    places = {MetadataIndex("x", torch.Size([0]), 0): _StorageInfo("__0_0.distcp", 0, 10)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(described, {}, places)))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(10))
    args = argparse.Namespace(num_layers=layers, num_experts=4)
    torch.save({"args": args}, tmp_path / "common.pt")
    store = open_checkpoint(tmp_path)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"of 500 layers each have more than 30000 names"):
        store.names()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
