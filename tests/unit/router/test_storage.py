"""Stored floats, scaled floats, and storage that is refused with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.router.load import load_routers

_GATE = "model.layers.1.mlp.gate"
_BLOCKS = {"quantization_config": {"weight_block_size": [4, 5]}}


def _router(folder: Any) -> Router:
    return load_routers(open_checkpoint(folder)).routers[1]


def _refusal(folder: Any) -> str:
    with pytest.raises(RouterError) as caught:
        load_routers(open_checkpoint(folder))
    assert caught.value.exit_code == 3
    return caught.value.message


def _fp8(dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [(torch.float64, np.float64), (torch.float32, np.float32), (torch.bfloat16, np.float32),
     (torch.float16, np.float32)],
)  # fmt: skip
def test_plain_floats_keep_every_digit(stored: torch.dtype, loaded: type, make_olmoe: Any) -> None:
    weight = torch.randn(6, 16, dtype=torch.float64).to(stored)
    router = _router(make_olmoe({f"{_GATE}.weight": weight}))
    assert router.weight.dtype == loaded
    np.testing.assert_array_equal(router.weight, weight.to(torch.float64).numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_blocks_are_multiplied_by_their_scale(dtype: torch.dtype, make_olmoe: Any) -> None:
    weight, scale = _fp8(dtype), torch.rand(2, 4) + 0.5
    folder = make_olmoe(
        {f"{_GATE}.weight": weight, f"{_GATE}.weight_scale_inv": scale}, config=_BLOCKS
    )
    expected = weight.float().numpy().copy()
    for row in range(6):
        for column in range(16):
            expected[row, column] *= scale[row // 4, column // 5].numpy()
    router = _router(folder)
    np.testing.assert_array_equal(router.weight, expected, strict=True)
    assert f"{_GATE}.weight_scale_inv" in router.provenance.tensors


def test_fp8_blocks_are_128_by_128_unless_the_config_says_otherwise(make_olmoe: Any) -> None:
    weight, scale = _fp8(), torch.tensor([[0.5]])
    folder = make_olmoe({f"{_GATE}.weight": weight, f"{_GATE}.weight_scale_inv": scale})
    np.testing.assert_array_equal(_router(folder).weight, weight.float().numpy() * 0.5)


@pytest.mark.parametrize("shape", [(), (1,), (6, 1)])
def test_fp8_rows_are_multiplied_by_their_scale(shape: tuple[int, ...], make_olmoe: Any) -> None:
    weight, scale = _fp8(), torch.rand(shape) + 0.5
    folder = make_olmoe({f"{_GATE}.weight": weight, f"{_GATE}.weight_scale": scale})
    expected = (weight.float() * scale).numpy()
    np.testing.assert_array_equal(_router(folder).weight, expected, strict=True)


def test_fp8_without_a_scale_is_refused(make_olmoe: Any) -> None:
    assert _refusal(make_olmoe({f"{_GATE}.weight": _fp8()})) == (
        f"model.safetensors: tensor '{_GATE}.weight' is stored as F8_E4M3 without a scale, "
        f"expected '{_GATE}.weight_scale_inv' or '{_GATE}.weight_scale'."
    )


@pytest.mark.parametrize("shape", [(2, 4), (16,), (6, 16)])
def test_a_scale_of_another_shape_is_refused(shape: tuple[int, ...], make_olmoe: Any) -> None:
    scale = torch.ones(shape)
    folder = make_olmoe({f"{_GATE}.weight": _fp8(), f"{_GATE}.weight_scale_inv": scale})
    assert _refusal(folder) == (
        f"model.safetensors: tensor '{_GATE}.weight_scale_inv' has shape {shape} of F32, "
        "which is no scale for a weight of shape (6, 16) in blocks of (128, 128)."
    )


@pytest.mark.parametrize("block", [[0, 1], [128], "128", [1.5, 2], [True, True]])
def test_a_block_size_that_makes_no_sense_is_refused(block: object, make_olmoe: Any) -> None:
    folder = make_olmoe(
        {f"{_GATE}.weight": _fp8(), f"{_GATE}.weight_scale_inv": torch.ones(1, 1)},
        config={"quantization_config": {"weight_block_size": block}},
    )
    assert "expected two positive integers" in _refusal(folder)


@pytest.mark.parametrize(
    "leaf", ["weight_scale_inv", "scales", "weight.absmax", "qzeros", "bias", "input_scale"]
)
def test_an_unknown_tensor_beside_a_router_is_refused_by_name(leaf: str, make_olmoe: Any) -> None:
    assert _refusal(make_olmoe({f"{_GATE}.{leaf}": torch.ones(1)})) == (
        f"model.safetensors: tensor '{_GATE}.{leaf}' stands beside the router weight "
        f"'{_GATE}.weight' (F32), and what it means is not known."
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int32])
def test_integers_are_no_router(dtype: torch.dtype, make_olmoe: Any) -> None:
    message = _refusal(make_olmoe({f"{_GATE}.weight": torch.ones(6, 16).to(dtype)}))
    assert message.startswith(f"model.safetensors: tensor '{_GATE}.weight' (router weight) is")
    assert message.endswith("expected one of BF16, F16, F32, F64.")


def test_a_gain_in_fp8_is_refused(make_olmoe: Any) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    message = _refusal(make_olmoe({name: torch.ones(16).to(torch.float8_e4m3fn)}))
    assert message.startswith(f"model.safetensors: tensor '{name}' (gain of the norm in front)")
