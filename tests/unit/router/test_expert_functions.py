"""Experts as functions, on a sample checkpoint; families are held against their library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.router import expert_functions
from moegeom.router.expert_functions import ExpertFunctions, open_expert_functions
from moegeom.router.load import load_routers
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf

SAMPLE = Path(__file__).resolve().parents[3] / "sample_ckpts" / "olmoe-balanced" / "step_1500"


def opened(folder: Path = SAMPLE, layer: int = 1) -> ExpertFunctions:
    store = open_checkpoint(folder)
    return open_expert_functions(store, load_routers(store).routers[layer])


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


def test_a_mixture_is_made_of_weighted_experts_and_reads_each_once():
    experts, inputs = opened(), drawn(12, 64)
    chosen = np.stack([np.random.default_rng(t).permutation(16)[:4] for t in range(12)])
    chosen[0, 2:] = -1
    weights = np.abs(drawn(12, 4))
    store = experts.tensors.store
    before = store.bytes_read
    found = experts.mixed(inputs, chosen, weights)
    assert store.bytes_read - before == experts.bytes_of(set(chosen[chosen >= 0].tolist()))
    expected = [
        sum(
            g * experts.apply(int(e), inputs[[t]])[0]
            for e, g in zip(chosen[t], weights[t], strict=True)
            if e >= 0
        )
        for t in range(12)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


def test_single_precision_is_near_double():
    experts, inputs = opened(), drawn(12, 64)
    found = experts.apply(3, inputs.astype(np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, experts.apply(3, inputs), rtol=1e-4, atol=1e-6)


def test_few_experts_stay_in_memory(monkeypatch):
    experts = opened()
    monkeypatch.setattr(expert_functions, "_MOST_HELD", 2 * 3 * 32 * 64 * 4)
    for expert in (0, 1, 0, 2):
        experts.apply(expert, drawn(1, 64))
    assert list(experts._held) == [0, 2]


def test_an_unknown_activation_is_an_error_that_names_those_that_are_known(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SAMPLE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "mish"}))
    with pytest.raises(RouterError, match="is 'mish'; known are .*silu"):
        opened(folder)


def test_experts_of_gpt_oss_in_gguf_give_what_the_library_gives(tmp_path):
    experts, hidden, width = 4, 64, 32
    draw = torch.Generator().manual_seed(0)
    config = GptOssConfig(
        num_local_experts=experts, hidden_size=hidden, intermediate_size=width, hidden_act="silu"
    )
    module = GptOssExperts(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=draw)
        both, bias = module.gate_up_proj.transpose(1, 2), module.gate_up_proj_bias
        tensors = {
            "ffn_gate_inp.weight": torch.randn(experts, hidden, generator=draw),
            "ffn_gate_inp.bias": torch.zeros(experts),
            "post_attention_norm.weight": torch.ones(hidden),
            "ffn_gate_exps.weight": both[:, ::2],
            "ffn_gate_exps.bias": bias[:, ::2],
            "ffn_up_exps.weight": both[:, 1::2],
            "ffn_up_exps.bias": bias[:, 1::2],
            "ffn_down_exps.weight": module.down_proj.transpose(1, 2),
            "ffn_down_exps.bias": module.down_proj_bias,
        }
    stored = {f"blk.0.{n}": t.detach().contiguous().numpy() for n, t in tensors.items()}
    write_gguf(tmp_path / "m.gguf", "gpt-oss", stored, keys=moe_keys(experts, hidden))
    read = opened(tmp_path / "m.gguf", 0)
    inputs = torch.randn(20, hidden, generator=draw)
    for expert in range(experts):
        with torch.no_grad():
            expected = module(inputs, torch.full((20, 1), expert), torch.ones(20, 1)).numpy()
        mine = read.apply(expert, inputs.double().numpy())
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
