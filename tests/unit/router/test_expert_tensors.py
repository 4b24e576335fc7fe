"""Experts of files that are written here: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.router.expert_tensors import ExpertTensors, open_experts
from moegeom.router.load import load_routers

SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"
EXPERTS, HIDDEN, WIDTH = 4, 64, 32


def config(**other: object) -> dict[str, object]:
    return {
        "model_type": "olmoe", "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "norm_topk_prob": False, "rms_norm_eps": 1e-5, "num_hidden_layers": 1,
        "hidden_act": "silu",
    } | other  # fmt: skip


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def opened(folder: Path, tensors: dict[str, np.ndarray], **other: object) -> ExpertTensors:
    at = "model.layers.0."
    found = {f"{at}mlp.{name}": values for name, values in tensors.items()}
    found |= {f"{at}mlp.gate.weight": drawn(EXPERTS, HIDDEN),
              f"{at}post_attention_layernorm.weight": drawn(HIDDEN)}  # fmt: skip
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(**other)))
    store = open_checkpoint(folder)
    return open_experts(store, load_routers(store).routers[0])


def each(leaf: str, *shape: int, experts: int = EXPERTS) -> dict[str, np.ndarray]:
    return {f"experts.{e}.{leaf}.weight": drawn(*shape) + e for e in range(experts)}


def test_an_expert_of_a_sample_is_what_its_file_holds() -> None:
    folder = SAMPLES / "olmoe-balanced" / "step_1500"
    store = open_checkpoint(folder)
    tensors = open_experts(store, load_routers(store).routers[1])
    assert (tensors.num_experts, tensors.width, tensors.hidden) == (16, 32, 64)
    assert (tensors.is_gated, tensors.activation) == (True, "silu")
    assert tensors.bytes_of() == 16 * 3 * 32 * 64 * 2
    assert tensors.bytes_of([3], gate_alone=True) == 32 * 64 * 2
    stored = load_file(folder / "model.safetensors")
    found = tensors.read(3)
    for part in ("gate", "up", "down"):
        expected = stored[f"model.layers.1.mlp.experts.3.{part}_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(getattr(found, part), expected)
    before = store.bytes_read
    np.testing.assert_array_equal(tensors.read_gate(3)[0], found.gate)
    assert store.bytes_read - before == tensors.bytes_of([3], gate_alone=True)


def test_four_bit_experts_of_gpt_oss_are_decoded_one_by_one(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    tensors = {}
    for leaf, rows, columns in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        shape = (EXPERTS, rows, columns // 32)
        tensors[f"experts.{leaf}_blocks"] = draw.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"experts.{leaf}_scales"] = draw.integers(120, 130, shape, np.uint8)
        tensors[f"experts.{leaf}_bias"] = drawn(EXPERTS, rows)
    found = opened(tmp_path, tensors)
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    packed = tensors["experts.down_proj_blocks"][2].reshape(HIDDEN, WIDTH // 2)
    scale = 2.0 ** (tensors["experts.down_proj_scales"][2].astype(np.float32) - 127.0)
    expected = value[np.stack([packed & 15, packed >> 4], -1)].reshape(HIDDEN, WIDTH) * scale
    expert = found.read(2)
    np.testing.assert_array_equal(expert.down, expected)
    np.testing.assert_array_equal(expert.up_bias, tensors["experts.gate_up_proj_bias"][2, WIDTH:])
    assert expert.gate.shape == (WIDTH, HIDDEN)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_of_gguf_are_those_that_its_package_reads(tmp_path: Path, kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("blk.0.ffn_gate_inp.weight", drawn(EXPERTS, HIDDEN))
    writer.add_tensor("blk.0.ffn_norm.weight", drawn(HIDDEN))
    expected = {}
    for part, rows, columns in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN),
                                ("down", HIDDEN, WIDTH)):  # fmt: skip
        stored = gguf.quants.quantize(drawn(EXPERTS, rows, columns), quantised)
        writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", stored, raw_dtype=quantised)
        expected[part] = gguf.quants.dequantize(stored, quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = open_checkpoint(path)
    found = open_experts(store, load_routers(store).routers[0])
    for part, values in expected.items():
        np.testing.assert_array_equal(getattr(found.read(1), part), values[1])


def test_matrices_of_all_experts_may_lie_on_their_side(tmp_path: Path) -> None:
    tensors = {"experts.gate_up_proj": drawn(EXPERTS, HIDDEN, 2 * WIDTH),
               "experts.down_proj": drawn(EXPERTS, WIDTH, HIDDEN)}  # fmt: skip
    expert = opened(tmp_path, tensors).read(3)
    np.testing.assert_array_equal(expert.gate, tensors["experts.gate_up_proj"][3].T[:WIDTH])
    np.testing.assert_array_equal(expert.down, tensors["experts.down_proj"][3].T)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "no tensors of experts"),
        (each("up_proj", WIDTH, HIDDEN), "no tensors of experts"),
        (each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, WIDTH, experts=3), "3 experts"),
        (each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, 48), "contradict"),
        (each("up_proj", WIDTH, 48) | each("down_proj", HIDDEN, WIDTH), "reads inputs of 64"),
        (
            {"experts.up_proj": drawn(EXPERTS, HIDDEN, HIDDEN),
             "experts.down_proj": drawn(EXPERTS, HIDDEN, HIDDEN)},
            "square",
        ),
        (
            {f"experts.{e}.{leaf}.qweight": np.zeros((8, HIDDEN), np.int32)
             for e in range(EXPERTS) for leaf in ("up_proj", "down_proj")},
            "no storage known",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(tmp_path: Path, tensors: dict, said: str) -> None:
    with pytest.raises(RouterError, match=said):
        opened(tmp_path, tensors)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, WIDTH)
    tensors["experts.1.up_proj.weight"][0, 0] = np.inf
    found = opened(tmp_path, tensors)
    found.read(0)
    with pytest.raises(RouterError, match="not finite"):
        found.read(1)
