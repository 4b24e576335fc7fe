"""Experts of a layer: what is read, what is refused, and what they are as functions.

Families are held against their library in tests/families.
"""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.router import expert_functions
from moegeom.router.expert_functions import ExpertFunctions, open_expert_functions
from moegeom.router.expert_tensors import ExpertTensors, open_experts
from moegeom.router.load import load_routers
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf
from tests.unit.router.conftest import CONFIG, write_arrays

SAMPLE = Path(__file__).resolve().parents[3] / "sample_ckpts/olmoe-balanced/step_1500"
EXPERTS, HIDDEN, WIDTH = 4, 64, 32


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def written(folder: Path, tensors: dict[str, np.ndarray]) -> ExpertTensors:
    at = "model.layers.0."
    stored = {f"{at}mlp.{name}": values for name, values in tensors.items()}
    stored[f"{at}mlp.gate.weight"] = drawn(EXPERTS, HIDDEN)
    stored[f"{at}post_attention_layernorm.weight"] = drawn(HIDDEN)
    config = {"num_experts": EXPERTS, "num_hidden_layers": 1, "hidden_act": "silu"}
    store = open_checkpoint(write_arrays(folder, stored, CONFIG | config))
    return open_experts(store, load_routers(store).routers[0])


def each(leaf: str, *shape: int, experts: int = EXPERTS) -> dict[str, np.ndarray]:
    return {f"experts.{e}.{leaf}.weight": drawn(*shape) + e for e in range(experts)}


def test_an_expert_of_a_sample_is_what_its_file_holds():
    store = open_checkpoint(SAMPLE)
    tensors = open_experts(store, load_routers(store).routers[1])
    assert (tensors.num_experts, tensors.width, tensors.hidden) == (16, 32, 64)
    assert (tensors.is_gated, tensors.activation) == (True, "silu")
    assert tensors.bytes_of() == 16 * 3 * 32 * 64 * 2
    assert tensors.bytes_of([3], gate_alone=True) == 32 * 64 * 2
    stored = load_file(SAMPLE / "model.safetensors")
    found = tensors.read(3)
    for part in ("gate", "up", "down"):
        expected = stored[f"model.layers.1.mlp.experts.3.{part}_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(getattr(found, part), expected)
    before = store.bytes_read
    np.testing.assert_array_equal(tensors.read_gate(3)[0], found.gate)
    assert store.bytes_read - before == tensors.bytes_of([3], gate_alone=True)


def test_four_bit_experts_of_gpt_oss_are_decoded_one_by_one(tmp_path):
    draw = np.random.default_rng(0)
    tensors = {}
    for leaf, rows, columns in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        shape = (EXPERTS, rows, columns // 32)
        tensors[f"experts.{leaf}_blocks"] = draw.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"experts.{leaf}_scales"] = draw.integers(120, 130, shape, np.uint8)
        tensors[f"experts.{leaf}_bias"] = drawn(EXPERTS, rows)
    found = written(tmp_path, tensors)
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    packed = tensors["experts.down_proj_blocks"][2].reshape(HIDDEN, WIDTH // 2)
    scale = 2.0 ** (tensors["experts.down_proj_scales"][2].astype(np.float32) - 127.0)
    expected = value[np.stack([packed & 15, packed >> 4], -1)].reshape(HIDDEN, WIDTH) * scale
    expert = found.read(2)
    np.testing.assert_array_equal(expert.down, expected)
    np.testing.assert_array_equal(expert.up_bias, tensors["experts.gate_up_proj_bias"][2, WIDTH:])
    assert expert.gate.shape == (WIDTH, HIDDEN)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_of_gguf_are_those_that_its_package_reads(tmp_path, kind):
    quantised = gguf.GGMLQuantizationType[kind]
    tensors = {
        "blk.0.ffn_gate_inp.weight": drawn(EXPERTS, HIDDEN),
        "blk.0.ffn_norm.weight": drawn(HIDDEN),
    }
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    names = {part: f"blk.0.ffn_{part}_exps.weight" for part in shapes}
    for part, shape in shapes.items():
        tensors[names[part]] = gguf.quants.quantize(drawn(EXPERTS, *shape), quantised)
    types = dict.fromkeys(names.values(), quantised)
    path = write_gguf(
        tmp_path / "m.gguf", "qwen3moe", tensors, types, keys=moe_keys(EXPERTS, HIDDEN)
    )
    store = open_checkpoint(path)
    expert = open_experts(store, load_routers(store).routers[0]).read(1)
    for part, name in names.items():
        expected = gguf.quants.dequantize(tensors[name], quantised)[1]
        np.testing.assert_array_equal(getattr(expert, part), expected)


def test_values_must_be_finite(tmp_path):
    tensors = each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, WIDTH)
    tensors["experts.1.up_proj.weight"][0, 0] = np.inf
    found = written(tmp_path, tensors)
    found.read(0)
    with pytest.raises(RouterError, match="not finite"):
        found.read(1)


FUSED = ("experts.up_proj", "experts.down_proj")
PACKED = [
    f"experts.{e}.{leaf}.qweight" for e in range(EXPERTS) for leaf in ("up_proj", "down_proj")
]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "no tensors of experts"),
        (each("up_proj", WIDTH, HIDDEN), "no tensors of experts"),
        (each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, WIDTH, experts=3), "3 experts"),
        (each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, 48), "contradict"),
        (each("up_proj", WIDTH, 48) | each("down_proj", HIDDEN, WIDTH), "reads inputs of 64"),
        (dict.fromkeys(FUSED, drawn(EXPERTS, HIDDEN, HIDDEN)), "square"),
        (dict.fromkeys(PACKED, np.zeros((8, HIDDEN), np.int32)), "no storage known"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, tensors, words):
    with pytest.raises(RouterError, match=words):
        written(tmp_path, tensors)


def opened(folder: Path = SAMPLE, layer: int = 1) -> ExpertFunctions:
    store = open_checkpoint(folder)
    return open_expert_functions(store, load_routers(store).routers[layer])


def test_a_mixture_reads_each_of_its_experts_once():
    experts, inputs = opened(), drawn(12, 64).astype(np.float64)
    chosen = np.stack([np.random.default_rng(t).permutation(16)[:4] for t in range(12)])
    chosen[0, 2:] = -1
    weights = np.abs(drawn(12, 4))
    store = experts.tensors.store
    before = store.bytes_read
    experts.mixed(inputs, chosen, weights)
    assert store.bytes_read - before == experts.bytes_of(set(chosen[chosen >= 0].tolist()))


def test_what_is_applied_is_near_in_single_precision_and_few_experts_stay_in_memory(monkeypatch):
    experts, inputs = opened(), drawn(12, 64).astype(np.float64)
    found = experts.apply(3, inputs.astype(np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, experts.apply(3, inputs), rtol=1e-4, atol=1e-6)
    experts = opened()
    monkeypatch.setattr(expert_functions, "_CACHE_BYTES", 2 * 3 * 32 * 64 * 4)
    for expert in (0, 1, 0, 2):
        experts.apply(expert, drawn(1, 64))
    assert list(experts._cache) == [0, 2]


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
