"""Rows as codes are what each group gives by itself, and what compressed-tensors and torch leave."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from numpy.testing import assert_allclose, assert_array_equal
from torch.ao.quantization import PerChannelMinMaxObserver

from moegeom.geometry.codes import FLOATS, Code, decoded, in_eight_bits
from moegeom.geometry.number_formats import WEIGHT_STORAGE, stored_as


def rows(seed: int = 0, experts: int = 5, hidden: int = 37) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((experts, hidden)).astype(np.float32)


def groups(weight: np.ndarray, height: int, width: int):
    height, width = height or len(weight), width or weight.shape[1]
    for top in range(0, len(weight), height):
        for left in range(0, weight.shape[1], width):
            yield slice(top, top + height), slice(left, left + width)


@pytest.mark.parametrize(("bits", "largest"), [(8, 127.0), (8, 127.5), (4, 7.0), (4, 8.0)])
def test_signed_integers_are_rounded_group_by_group(bits, largest):
    weight, half = rows(), 2 ** (bits - 1)
    for height, width in ((0, 0), (1, 0), (0, 1), (1, 16), (2, 8)):
        coded = decoded(weight, Code(f"int{bits}", height, width, largest))
        for part in groups(weight, height, width):
            scale = np.abs(weight[part]).max() / np.float32(largest)
            expected = np.clip(np.round(weight[part] / scale), -half, half - 1) * scale
            assert_allclose(coded[part], expected, rtol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(0, 0), (1, 0), (1, 8)])
def test_unsigned_integers_take_as_many_values_as_they_have_and_are_half_a_step_off(height, width):
    weight = rows(1)
    coded = decoded(weight, Code("uint4", height, width, None))
    for part in groups(weight, height, width):
        values = weight[part]
        # a group that the border cuts holds a zero beside its own numbers
        step = (max(values.max(), 0.0) - min(values.min(), 0.0)) / 15.0
        assert len(np.unique(coded[part])) <= 16
        assert np.abs(coded[part] - values).max() <= 1.01 * step


@pytest.mark.parametrize(
    ("name", "kind"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_eight_bit_floats_are_casts_of_scaled_rows(name, kind):
    weight = rows(2)
    plain = decoded(weight, Code(name, 0, 0, None))
    assert_array_equal(plain, weight.astype(kind).astype(np.float32))
    most = float(ml_dtypes.finfo(kind).max)
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(most)
    expected = (weight / scale).astype(kind).astype(np.float32) * scale
    assert_allclose(decoded(weight, Code(name, 1, 0, most)), expected, rtol=1e-6)
    stored = decoded(weight, Code(name, 1, 0, most, is_stored=True))
    assert_array_equal(stored, expected.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_nothing_is_made_of_zeros_and_the_dtype_stays() -> None:
    zeros = np.zeros((3, 200), np.float32)
    for form in ("int8", "uint4", "e4m3"):
        assert_array_equal(decoded(zeros, Code(form, 1, 0, 7.0)), zeros)
    for storage in WEIGHT_STORAGE:
        for dtype in (np.float32, np.float64):
            stored = stored_as(zeros.astype(dtype), storage)
            assert stored.dtype == dtype, storage
            assert not stored.any(), storage


@pytest.mark.parametrize("form", FLOATS)
def test_eight_bits_are_those_of_a_cast_for_every_kind_of_number(form):
    halves = np.arange(2**16, dtype=np.uint32) << 16
    random = np.random.default_rng(3).integers(0, 2**32, 2**17, dtype=np.uint32)
    # halfway between two numbers, and one bit to either side of it
    bits = np.concatenate([halves, halves + 1, halves - 1, random])
    with np.errstate(all="ignore"):
        expected = bits.view(np.float32).astype(FLOATS[form]).astype(np.float32)
    coded = in_eight_bits(bits.view(np.float32), form)
    assert_array_equal(coded, expected)
    assert_array_equal(np.signbit(coded), np.signbit(expected))


# ----------------------------------------------------------------------------------- other libraries
SHAPES = ((64, 256), (130, 384))


def weights(shape: tuple[int, int]) -> np.ndarray:
    random = np.random.default_rng(0)
    length = random.uniform(0.01, 3.0, shape[0])[:, None]
    return (random.standard_normal(shape) * length).astype("f4")


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


IN_8 = {"num_bits": 8, "strategy": "channel"}
IN_4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
SCHEMES = [
    (Code("int8", 1, 0, 127.5), "int", IN_8),
    (Code("int4", 1, 128, 7.5), "int", IN_4),
    (Code("uint8", 1, 0, None), "int", IN_8 | {"symmetric": False}),
    (Code("uint4", 1, 128, None), "int", IN_4 | {"symmetric": False}),
    (Code("e4m3", 0, 0, 448.0), "float", {"num_bits": 8, "strategy": "tensor"}),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "kind", "options"), SCHEMES)
def test_what_is_left_is_what_compressed_tensors_leaves(shape, code, kind, options) -> None:
    weight = weights(shape)
    assert_array_equal(decoded(weight, code), theirs(weight, kind, **options))


def test_each_block_is_a_tensor_of_its_own() -> None:
    weight = weights((130, 384))
    stored = stored_as(weight, "fp8_blocks_of_128")
    for block in (np.s_[:128, 128:256], np.s_[128:, 256:]):
        alone = stored_as(np.ascontiguousarray(weight[block]), "fp8_tensor")
        assert_array_equal(stored[block], alone)


@pytest.mark.parametrize(("width", "bits"), [(0, 8), (128, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scale_by_the_largest_code_is_that_of_torch(shape, width, bits):
    weight, largest = weights(shape), 2 ** (bits - 1) - 1
    grouped = weight.reshape(-1, weight.shape[1] if bits == 8 else 128)
    observer = PerChannelMinMaxObserver(
        qscheme=torch.per_channel_symmetric,
        dtype=torch.qint8,
        quant_min=-largest,
        quant_max=largest,
    )
    observer(torch.from_numpy(grouped))
    scale, zero = observer.calculate_qparams()
    expected = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(grouped), scale, zero.to(torch.int32), 0, -largest, largest
    ).numpy()
    # torch multiplies by the reciprocal of the scale: a value at half a step may fall otherwise
    coded = decoded(weight, Code(f"int{bits}", 1, width, float(largest))).reshape(grouped.shape)
    is_other = np.abs(coded - expected) > 1e-6 * np.abs(grouped).max(axis=1, keepdims=True)
    assert is_other.mean() < 1e-4
