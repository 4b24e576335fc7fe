"""Experts of files that are written here: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.router.expert_tensors import ExpertTensors, open_experts
from moegeom.router.load import load_routers
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf
from tests.unit.router.conftest import CONFIG, write_arrays

SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"
EXPERTS, HIDDEN, WIDTH = 4, 64, 32


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def opened(folder: Path, tensors: dict[str, np.ndarray]) -> ExpertTensors:
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


def test_four_bit_experts_of_gpt_oss_are_decoded_one_by_one(tmp_path):
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


def test_matrices_of_all_experts_may_lie_on_their_side(tmp_path):
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
def test_what_cannot_be_read_is_refused(tmp_path, tensors, said):
    with pytest.raises(RouterError, match=said):
        opened(tmp_path, tensors)


def test_values_that_are_not_finite_are_refused(tmp_path):
    tensors = each("up_proj", WIDTH, HIDDEN) | each("down_proj", HIDDEN, WIDTH)
    tensors["experts.1.up_proj.weight"][0, 0] = np.inf
    found = opened(tmp_path, tensors)
    found.read(0)
    with pytest.raises(RouterError, match="not finite"):
        found.read(1)
