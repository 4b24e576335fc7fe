"""Oracle: the parameters and the fake quantisation of compressed-tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

from moegeom.geometry.weight_schemes import WEIGHT_STORAGE, stored_as

SHAPES = ((64, 256), (130, 384))


def weights(shape: tuple[int, int]) -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.standard_normal(shape) * random.uniform(0.01, 3.0, shape[0])[:, None]).astype(
        "f4"
    )


def theirs(weight: np.ndarray, kind: str, **options: object) -> np.ndarray:
    tensor = torch.from_numpy(weight)
    args = QuantizationArgs(symmetric=True, type=kind, **options)
    if args.strategy == "group":
        grouped = tensor.reshape(len(tensor), -1, args.group_size)
        low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    elif args.strategy == "channel":
        low, high = tensor.amin(dim=1, keepdim=True), tensor.amax(dim=1, keepdim=True)
    else:
        low, high = tensor.min().reshape(1), tensor.max().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    return fake_quantize(tensor, scale, zero, args).numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("storage", "kind", "options"),
    [
        ("int8_rows", "int", {"num_bits": 8, "strategy": "channel"}),
        ("int4_groups_of_128", "int", {"num_bits": 4, "strategy": "group", "group_size": 128}),
        ("fp8_tensor", "float", {"num_bits": 8, "strategy": "tensor"}),
    ],
)
def test_what_is_left_is_what_compressed_tensors_leaves(
    shape: tuple[int, int], storage: str, kind: str, options: dict[str, object]
) -> None:
    weight = weights(shape)
    np.testing.assert_array_equal(stored_as(weight, storage), theirs(weight, kind, **options))


def test_each_block_is_a_tensor_of_its_own() -> None:
    weight = weights((130, 384))
    found = stored_as(weight, "fp8_blocks_of_128")
    np.testing.assert_array_equal(
        found[:128, 128:256], stored_as(np.ascontiguousarray(weight[:128, 128:256]), "fp8_tensor")
    )
    np.testing.assert_array_equal(
        found[128:, 256:], stored_as(np.ascontiguousarray(weight[128:, 256:]), "fp8_tensor")
    )


@pytest.mark.parametrize("storage", sorted(WEIGHT_STORAGE))
def test_nothing_is_made_of_zeros_and_the_dtype_stays(storage: str) -> None:
    for dtype in (np.float32, np.float64):
        found = stored_as(np.zeros((3, 200), dtype), storage)
        assert found.dtype == dtype
        assert not found.any()
