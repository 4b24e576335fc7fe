"""Oracle: the parameters and the fake quantisation of compressed-tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch.ao.quantization import PerChannelMinMaxObserver

from moegeom.geometry.codes import Code, decoded
from moegeom.geometry.number_formats import WEIGHT_STORAGE, stored_as

SHAPES = ((64, 256), (130, 384))


def weights(shape: tuple[int, int]) -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.standard_normal(shape) * random.uniform(0.01, 3.0, shape[0])[:, None]).astype(
        "f4"
    )


def theirs(weight: np.ndarray, kind: str, **options: object) -> np.ndarray:
    tensor = torch.from_numpy(weight)
    args = QuantizationArgs(type=kind, **{"symmetric": True} | options)
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
    ("code", "kind", "options"),
    [
        (Code("int8", 1, 0, 127.5), "int", {"num_bits": 8, "strategy": "channel"}),
        (Code("int4", 1, 128, 7.5), "int", {"num_bits": 4, "strategy": "group", "group_size": 128}),
        (
            Code("uint8", 1, 0, None),
            "int",
            {"num_bits": 8, "strategy": "channel", "symmetric": False},
        ),
        (
            Code("uint4", 1, 128, None),
            "int",
            {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
        ),
        (Code("e4m3", 0, 0, 448.0), "float", {"num_bits": 8, "strategy": "tensor"}),
    ],
)
def test_what_is_left_is_what_compressed_tensors_leaves(
    shape: tuple[int, int], code: Code, kind: str, options: dict[str, object]
) -> None:
    weight = weights(shape)
    np.testing.assert_array_equal(decoded(weight, code), theirs(weight, kind, **options))


def test_each_block_is_a_tensor_of_its_own() -> None:
    weight = weights((130, 384))
    found = stored_as(weight, "fp8_blocks_of_128")
    np.testing.assert_array_equal(
        found[:128, 128:256], stored_as(np.ascontiguousarray(weight[:128, 128:256]), "fp8_tensor")
    )
    np.testing.assert_array_equal(
        found[128:, 256:], stored_as(np.ascontiguousarray(weight[128:, 256:]), "fp8_tensor")
    )


@pytest.mark.parametrize(("width", "bits"), [(0, 8), (128, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scale_by_the_largest_code_is_that_of_torch(shape, width, bits):
    weight, largest = weights(shape), 2 ** (bits - 1) - 1
    groups = weight.reshape(-1, weight.shape[1] if bits == 8 else 128)
    observer = PerChannelMinMaxObserver(
        qscheme=torch.per_channel_symmetric,
        dtype=torch.qint8,
        quant_min=-largest,
        quant_max=largest,
    )
    observer(torch.from_numpy(groups))
    scale, zero = observer.calculate_qparams()
    found = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(groups), scale, zero.to(torch.int32), 0, -largest, largest
    )
    expected = found.numpy().reshape(weight.shape)
    # torch multiplies by the reciprocal of the scale: a value at half a step may fall otherwise
    code = Code(f"int{bits}", 1, width, float(largest))
    steps = np.abs(decoded(weight, code) - expected).reshape(groups.shape)
    is_other = steps > 1e-6 * np.abs(groups).max(axis=1, keepdims=True)
    assert is_other.mean() < 1e-4


@pytest.mark.parametrize("storage", sorted(WEIGHT_STORAGE))
def test_nothing_is_made_of_zeros_and_the_dtype_stays(storage: str) -> None:
    for dtype in (np.float32, np.float64):
        found = stored_as(np.zeros((3, 200), dtype), storage)
        assert found.dtype == dtype
        assert not found.any()
