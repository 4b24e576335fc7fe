"""Decoded router weights equal what the libraries that write the formats decode themselves."""

from itertools import product
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import (
    BaseCompressor,
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    MXFP8QuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
    unpack_fp4_from_uint8,
)
from compressed_tensors.entrypoints.convert.converters import (
    AutoAWQConverter,
    FP8BlockDequantizer,
    ModelOptNvfp4Converter,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.settings import Settings
from moegeom.router.storage import find_storage
from tests.by_day import by_day

Tensors = dict[str, torch.Tensor]


def decode(folder: Path, tensors: Tensors, quantisation=None, scheme="") -> np.ndarray:
    """The weight as moegeom reads it from a file."""
    named = {f"gate.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}
    save_file(named, folder / "a.safetensors")
    store = open_checkpoint(folder)
    infos = {leaf: store.info(f"gate.{leaf}") for leaf in tensors}
    settings = Settings({"quantization_config": quantisation})

    def read(leaf: str) -> np.ndarray:
        return store.read(f"gate.{leaf}")

    stored = find_storage(infos, settings, "router text/0", read=read)
    weight = stored.decode({leaf: read(leaf) for leaf in tensors})
    assert (stored.scheme, stored.shape, weight.dtype) == (scheme, weight.shape, np.float32)
    return weight


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_words(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int()


def compress(compressor: type[BaseCompressor], weight, parts, held_in=torch.float32, **arguments):
    """Compressed tensors, their config.json and what the library decompresses in float32.

    ``held_in`` is the dtype of the scales in the file; the library computes in the dtype that it
    is given.
    """
    args = QuantizationArgs.model_validate(arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    parts = {k: v.to(held_in) if k == "weight_scale" else v for k, v in parts.items()}
    made = compressor.compress({"weight": weight, **parts}, scheme)
    packed = {part: values for part, values in made.items() if values is not None}
    wide = {k: v.float() if v.dtype == held_in else v for k, v in packed.items()}
    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return packed, config, compressor.decompress(dict(wide), scheme)["weight"].float().numpy()


def affine(rows: int, groups: int, bits: int, is_symmetric: bool) -> Tensors:
    """Random scales and zero points."""
    parts = {"weight_scale": draw(rows, groups, seed=1).abs() / 2 ** (bits - 2) + 1e-3}
    if not is_symmetric:
        limit = 2 ** (bits - 1)
        drawn = draw(rows, groups, seed=2) * limit / 3
        parts["weight_zero_point"] = drawn.clamp(-limit, limit - 1).to(torch.int8)
    return parts


def as_decompressed(folder, scheme, *of_library, **arguments) -> tuple[Tensors, np.ndarray]:
    """What is in the file, and what is read from it: what the library decompresses."""
    packed, config, expected = compress(*of_library, **arguments)
    decoded = decode(folder, packed, config, scheme)
    assert_array_equal(decoded, expected)
    return packed, decoded


#: Shape and group, bits, whether without zero points, dtype of scales.
PACKED = list(
    product(
        [((12, 96), 32), ((16, 128), 16), ((11, 45), None), ((33, 64), None)],
        [2, 4, 8],
        [True, False],
        [torch.float32, torch.bfloat16, torch.float16],
    )
)
PACKED_BY_DAY = {
    "groups": (((12, 96), 32), 4, True, torch.float32),
    "zero points of groups": (((16, 128), 16), 4, False, torch.bfloat16),
    "rows that end within a word": (((11, 45), None), 4, False, torch.float32),
    "two bits": (((11, 45), None), 2, False, torch.float16),
    "two bits of groups": (((12, 96), 32), 2, True, torch.float16),
    "eight bits": (((33, 64), None), 8, True, torch.bfloat16),
    "eight bits with zero points": (((11, 45), None), 8, False, torch.float32),
}


@pytest.mark.parametrize(
    ("sizes", "bits", "is_symmetric", "scale_dtype"), by_day(PACKED, PACKED_BY_DAY)
)
def test_pack_quantized_integers(sizes, bits, is_symmetric, scale_dtype, tmp_path):
    shape, group = sizes
    parts = affine(shape[0], shape[1] // group if group else 1, bits, is_symmetric)
    _, decoded = as_decompressed(
        tmp_path, "pack_quantized", PackedQuantizationCompressor, draw(*shape), parts, scale_dtype,
        num_bits=bits, type="int", strategy="group" if group else "channel", group_size=group,
        symmetric=is_symmetric,
    )  # fmt: skip
    assert len(np.unique(decoded)) > 3


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(
    ("strategy", "group", "scales"),
    [("tensor", None, (1, 1)), ("channel", None, (6, 1)), ("group", 16, (6, 3))],
)
def test_eight_bit_integers(strategy, group, scales, is_symmetric, tmp_path):
    parts = affine(*scales, 8, is_symmetric)
    if strategy == "tensor":
        parts = {part: values.reshape(1) for part, values in parts.items()}
    as_decompressed(
        tmp_path, "int8", IntQuantizationCompressor, draw(6, 48), parts,
        num_bits=8, type="int", strategy=strategy, group_size=group, symmetric=is_symmetric,
    )  # fmt: skip


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("strategy", "sizes", "scales"),
    [
        ("tensor", {}, (1,)),
        ("channel", {}, (6, 1)),
        ("group", {"group_size": 16}, (6, 3)),
        ("block", {"block_structure": [4, 10]}, (2, 5)),
        ("block", {"block_structure": [128, 128]}, (1, 1)),
    ],
)
def test_eight_bit_floats(strategy, sizes, scales, scale_dtype, tmp_path):
    as_decompressed(
        tmp_path, "fp8", FloatQuantizationCompressor, draw(6, 48),
        {"weight_scale": draw(*scales).abs() / 100}, scale_dtype,
        num_bits=8, type="float", strategy=strategy, **sizes,
    )  # fmt: skip


def by_converter(converter, tensors: Tensors) -> Tensors:
    """What a converter of the library makes of the tensors of one module."""
    converted = converter.process({f"gate.{leaf}": t for leaf, t in tensors.items()})
    return {name.removeprefix("gate."): t for name, t in converted.items()}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (8, 16)])
def test_eight_bit_floats_in_blocks_of_128(shape, dtype, tmp_path):
    scales = [-(-n // 128) for n in shape]
    tensors = {"weight": draw(*shape).to(dtype), "weight_scale_inv": draw(*scales, seed=1).abs()}
    expected = by_converter(FP8BlockDequantizer(dtype=torch.float32), tensors)["weight"]
    decoded = decode(tmp_path, tensors, {"quant_method": "fp8"}, "fp8")
    assert_array_equal(decoded, expected.numpy())


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("block", [(2, 16), (1, 32), (8, 64)])
def test_eight_bit_floats_in_blocks_of_any_size(block, scale_dtype, tmp_path):
    scale = torch.exp2(draw(8 // block[0], 64 // block[1], seed=1).round())
    if scale_dtype == torch.uint8:
        scale = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    weight = draw(8, 64).to(torch.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale_inv": scale.to(scale_dtype)}
    expected = Fp8Dequantize(None)._dequantize_one(*tensors.values(), output_dtype=torch.float32)
    decoded = decode(tmp_path, tensors, {"weight_block_size": list(block)}, "fp8")
    assert_array_equal(decoded, expected.numpy())


@pytest.mark.parametrize("group", [32, 128])
def test_awq(group, tmp_path):
    tensors = {
        "qweight": random_words(256, 3, seed=0),
        "qzeros": random_words(256 // group, 3, seed=1),
        "scales": draw(256 // group, 24).half(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    parts = by_converter(AutoAWQConverter.from_autoawq_config(config), tensors)
    parts["weight_scale"] = parts["weight_scale"].float()
    args = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=group, symmetric=False
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    expected = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    assert_array_equal(decode(tmp_path, tensors, config, "awq"), expected.numpy())


def in_float32(packed: Tensors, scale: torch.Tensor, group: int) -> np.ndarray:
    """What the compressors compute, without their rounding to bfloat16."""
    rows, num_bytes = packed["weight_packed"].shape
    values = unpack_fp4_from_uint8(packed["weight_packed"], rows, 2 * num_bytes, torch.float32)
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=group)
    whole = packed.get("weight_global_scale")
    return dequantize(values, scale, args=args, dtype=torch.float32, global_scale=whole).numpy()


def nvfp4() -> tuple[Tensors, dict[str, Any], np.ndarray]:
    scale = (draw(6, 6, seed=1).abs() * 100 + 1).to(torch.float8_e4m3fn).float()
    return compress(
        NVFP4PackedCompressor,
        draw(6, 96),
        {"weight_scale": scale, "weight_global_scale": torch.tensor([300.7])},
        num_bits=4, type="float", strategy="tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )  # fmt: skip


def test_nvfp4_is_that_of_the_library_and_modelopt_multiplies_where_it_divides(tmp_path):
    packed, config, rounded = nvfp4()
    assert packed["weight_scale"].dtype == torch.float8_e4m3fn
    decoded = decode(tmp_path, packed, config, "nvfp4")
    assert_array_equal(decoded, in_float32(packed, packed["weight_scale"].float(), 16))
    assert_array_equal(torch.from_numpy(decoded).bfloat16().float().numpy(), rounded)
    packed, _, _ = nvfp4()
    tensors = {
        "weight": packed["weight_packed"],
        "weight_scale": packed["weight_scale"],
        "weight_scale_2": torch.tensor(0.0037),
        "input_scale": torch.tensor(0.1),
    }
    parts = by_converter(ModelOptNvfp4Converter(targets=["re:.*gate$"]), tensors)
    expected = in_float32(parts, parts["weight_scale"].float(), 16)
    # Theirs is divided by a reciprocal: three roundings where one product has one.
    assert_allclose(decode(tmp_path, tensors, scheme="nvfp4"), expected, rtol=3e-7)


def test_exponents_per_32_of_mxfp8_and_mxfp4_are_decoded(tmp_path):
    scale = torch.exp2(draw(6, 3, seed=1).round() - 2)
    packed, decoded = as_decompressed(
        tmp_path, "mxfp4", MXFP4PackedCompressor, draw(6, 96), {"weight_scale": scale},
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8,
    )  # fmt: skip
    assert packed["weight_scale"].dtype == torch.uint8
    assert_array_equal(decoded, in_float32(packed, scale, 32))
    scale = torch.exp2(draw(6, 3, seed=1).round() - 4)
    packed, _ = as_decompressed(
        tmp_path, "fp8", MXFP8QuantizationCompressor, draw(6, 96), {"weight_scale": scale},
        num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8,
    )  # fmt: skip
    assert packed["weight_scale"].dtype == torch.uint8


@pytest.mark.parametrize("separator", ["_", "."])
def test_mxfp4_of_gpt_oss(separator: str, tmp_path: Path) -> None:
    blocks = random_words(5, 3, 4, seed=3).view(torch.uint8)
    # Every exponent but 0 and 255 once: a product with 2^-127 may be flushed to zero by torch.
    scales = torch.arange(1, 255).to(torch.uint8)[17 * torch.arange(15)].reshape(5, 3)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
    tensors = {f"weight{separator}blocks": blocks, f"weight{separator}scales": scales}
    found = decode(tmp_path, tensors, scheme="mxfp4")
    assert_array_equal(found, expected[0].T.numpy())


@pytest.mark.parametrize("scale", ["weight_scale_inv", "scale"])
def test_mxfp4_in_int8(scale: str, tmp_path: Path) -> None:
    packed = random_words(6, 12, seed=3).view(torch.int8)
    exponents = draw(6, 3).round().exp2().to(torch.float8_e8m0fnu)
    expected = Fp8Dequantize(None)._dequantize_one(packed, exponents, torch.float32)
    found = decode(tmp_path, {"weight": packed, scale: exponents}, scheme="mxfp4")
    assert_array_equal(found, expected.numpy())


def four_bits(folder, weight: torch.Tensor, **options) -> tuple[np.ndarray, np.ndarray]:
    """What is read, and what the library dequantises."""
    packed, state = bnb.quantize_4bit(weight, **options)
    parts = {f"weight.{part}": values for part, values in state.as_dict(packed=True).items()}
    decoded = decode(folder, {"weight": packed, **parts}, scheme="bitsandbytes_4bit")
    return decoded, bnb.dequantize_4bit(packed, state).numpy()


@pytest.mark.parametrize("container", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("shape", "blocksize"), [((24, 640), 64), ((7, 256), 128)])
def test_bitsandbytes_in_four_bits(shape, blocksize, kind, is_nested, container, tmp_path):
    options = {"blocksize": blocksize, "compress_statistics": is_nested, "quant_type": kind}
    decoded, theirs = four_bits(tmp_path, draw(*shape), quant_storage=container, **options)
    assert_array_equal(decoded, theirs)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("shape", "blocksize"), [((6, 16), 64), ((7, 72), 128), ((3, 20), 4096)])
def test_what_bitsandbytes_packs_without_loss_is_what_is_read(shape, blocksize, kind, tmp_path):
    """Blocks that end within a row: its own AVX-512 kernel (0.50.2) misreads some of these."""
    count = shape[0] * shape[1]
    indices = random_words(count, seed=4) & 0xF
    table = bnb.get_4bit_type(kind, device="cpu")
    indices[::blocksize] = int(table.argmax())  # every block holds its largest magnitude
    largest = draw(-(-count // blocksize), seed=5).abs()
    weight = (table[indices] * largest.repeat_interleave(blocksize)[:count]).reshape(shape)
    options = {"blocksize": blocksize, "compress_statistics": False, "quant_type": kind}
    decoded, _ = four_bits(tmp_path, weight, **options)
    assert_array_equal(decoded, weight.numpy())


def test_bitsandbytes_in_eight_bits(tmp_path: Path) -> None:
    integers = random_words(6, 12, seed=3).view(torch.int8)
    largest = draw(6, seed=1).abs()
    expected = bnb.int8_vectorwise_dequant(integers, largest)
    tensors = {"weight": integers, "SCB": largest, "weight_format": torch.tensor(0).byte()}
    found = decode(tmp_path, tensors, scheme="bitsandbytes_int8")
    assert_array_equal(found, expected.numpy())
