"""Routers of GGUF files are those of safetensors, and blocks are decoded by the store.

Routers of PyTorch files and of distributed checkpoints: ``tests/families``.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.load import load_routers
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf

_STEP = Path(__file__).parents[3] / "sample_ckpts/olmoe-balanced/step_1500"

#: Names in GGUF files of what a router needs.
_NAMES = {"mlp.gate.weight": "ffn_gate_inp", "post_attention_layernorm.weight": "ffn_norm"}


def test_routers_in_gguf_are_those_in_safetensors(tmp_path):
    tensors = load_file(_STEP / "model.safetensors")
    config = json.loads((_STEP / "config.json").read_text())
    layers, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    keys = moe_keys(config["num_experts"], config["hidden_size"], layers, eps)
    keys["expert_used_count"] = config["num_experts_per_tok"]
    of_routers = {
        f"blk.{layer}.{name}.weight": tensors[f"model.layers.{layer}.{tail}"].float().numpy()
        for layer in range(layers)
        for tail, name in _NAMES.items()
    }
    write_gguf(tmp_path / "model.gguf", "olmoe", of_routers, keys=keys)
    mine, theirs = (load_routers(open_checkpoint(folder)) for folder in (tmp_path, _STEP))
    for one, other in zip(mine.routers, theirs.routers, strict=True):
        assert (one.name, one.rule) == (other.name, other.rule)
        np.testing.assert_array_equal(one.weight, other.weight, strict=True)
        np.testing.assert_array_equal(one.gain, other.gain, strict=True)


def test_a_block_quantised_router_is_decoded(tmp_path):
    weight = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    kind, gate = gguf.GGMLQuantizationType.Q8_0, "blk.0.ffn_gate_inp.weight"
    packed = gguf.quants.quantize(weight, kind)
    tensors = {gate: packed, "blk.0.ffn_norm.weight": np.ones(64, np.float32)}
    write_gguf(tmp_path / "model.gguf", "olmoe", tensors, {gate: kind}, keys=moe_keys(8, 64))
    (router,) = load_routers(open_checkpoint(tmp_path)).routers
    assert router.provenance.stored_dtype == "Q8_0"
    np.testing.assert_array_equal(router.weight, gguf.quants.dequantize(packed, kind))
