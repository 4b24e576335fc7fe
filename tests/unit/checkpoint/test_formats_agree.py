"""The same weights give the same tables, whatever format they are stored in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.load import load_routers
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_STEP = Path(__file__).parents[3] / "sample_ckpts/olmoe-balanced/step_1500"
_RECORDING = _STEP.parent / "rec/step_1500"

Tensors = dict[str, torch.Tensor]


def _tensors() -> Tensors:
    return load_file(_STEP / "model.safetensors")


def _pytorch(tensors: Tensors, folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def _pytorch_shards(tensors: Tensors, folder: Path) -> None:
    names = sorted(tensors)
    shard_of = {name: f"pytorch_model-{1 + i % 3:05}-of-00003.bin" for i, name in enumerate(names)}
    for shard in set(shard_of.values()):
        torch.save({n: tensors[n] for n in names if shard_of[n] == shard}, folder / shard)
    index = {"weight_map": shard_of}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _dcp(tensors: Any, folder: Path) -> None:
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


#: Names in GGUF files of what a router needs.
_GGUF_NAMES = {"mlp.gate.weight": "ffn_gate_inp", "post_attention_layernorm.weight": "ffn_norm"}


def _gguf(tensors: Tensors, folder: Path) -> None:
    config = json.loads((_STEP / "config.json").read_text())
    layers, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    keys = moe_keys(config["num_experts"], config["hidden_size"], layers, eps)
    keys["expert_used_count"] = config["num_experts_per_tok"]
    of_routers = {
        f"blk.{layer}.{name}.weight": tensors[f"model.layers.{layer}.{tail}"].float().numpy()
        for layer in range(layers)
        for tail, name in _GGUF_NAMES.items()
    }
    write_gguf(folder / "model.gguf", "olmoe", of_routers, keys=keys)


FORMATS: dict[str, Callable[[Tensors, Path], None]] = {
    "bin": _pytorch,
    "bin, sharded": _pytorch_shards,
    "dcp": _dcp,
    "dcp, nested": lambda tensors, folder: _dcp({"model": tensors, "step": 7}, folder),
    "gguf": _gguf,
}


def _stored(name: str, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(_STEP / "config.json", folder)
    FORMATS[name](_tensors(), folder)
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_the_routers_are_equal(name, tmp_path):
    mine, theirs = (
        load_routers(open_checkpoint(folder)) for folder in (_stored(name, tmp_path / "m"), _STEP)
    )
    for one, other in zip(mine.routers, theirs.routers, strict=True):
        assert (one.name, one.rule) == (other.name, other.rule)
        np.testing.assert_array_equal(one.weight, other.weight, strict=True)
        np.testing.assert_array_equal(one.gain, other.gain, strict=True)
