"""Decoded router weights equal what the libraries that write the formats decode themselves."""

from __future__ import annotations

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
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.settings import Settings
from moegeom.router.storage import find_storage

Tensors = dict[str, torch.Tensor]


def decode(
    folder: Path, tensors: Tensors, quantisation: dict[str, Any] | None = None, scheme: str = ""
) -> np.ndarray:
    """The weight as moegeom reads it from a file."""
    save_file(
        {f"gate.{leaf}": t.contiguous() for leaf, t in tensors.items()}, folder / "a.safetensors"
    )
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


def recipe(arguments: QuantizationArgs) -> dict[str, Any]:
    """What compressed-tensors writes into config.json."""
    weights = arguments.model_dump(mode="json")
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def compress(
    compressor: type[BaseCompressor],
    weight: torch.Tensor,
    parts: Tensors,
    held_in: torch.dtype = torch.float32,
    **arguments: Any,
) -> tuple[Tensors, dict[str, Any], np.ndarray]:
    """Compressed tensors, their config and what the library decompresses in float32.

    ``held_in`` is the dtype of the scales in the file; the library computes in the dtype that it
    is given.
    """
    args = QuantizationArgs.model_validate(arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    parts = {k: v.to(held_in) if k == "weight_scale" else v for k, v in parts.items()}
    made = compressor.compress({"weight": weight, **parts}, scheme)
    packed = {part: values for part, values in made.items() if values is not None}
    wide = {k: v.float() if v.dtype == held_in else v for k, v in packed.items()}
    decompressed = compressor.decompress(dict(wide), scheme)["weight"]
    assert decompressed is not None
    return packed, recipe(args), decompressed.float().numpy()


def affine(rows: int, groups: int, bits: int, is_symmetric: bool) -> Tensors:
    """Random scales and zero points."""
    parts = {"weight_scale": draw(rows, groups, seed=1).abs() / 2 ** (bits - 2) + 1e-3}
    if not is_symmetric:
        limit = 2 ** (bits - 1)
        drawn = draw(rows, groups, seed=2) * limit / 3
        parts["weight_zero_point"] = drawn.clamp(-limit, limit - 1).to(torch.int8)
    return parts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "group"), [((12, 96), 32), ((16, 128), 16), ((11, 45), None), ((33, 64), None)]
)
def test_pack_quantized_integers(
    shape: tuple[int, int],
    group: int | None,
    bits: int,
    is_symmetric: bool,
    scale_dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    parts = affine(shape[0], shape[1] // group if group else 1, bits, is_symmetric)
    packed, config, expected = compress(
        PackedQuantizationCompressor, draw(*shape), parts, scale_dtype,
        num_bits=bits, type="int", strategy="group" if group else "channel", group_size=group,
        symmetric=is_symmetric,
    )  # fmt: skip
    found = decode(tmp_path, packed, config, "pack_quantized")
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found)) > 3


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(
    ("strategy", "group", "scales"),
    [("tensor", None, (1, 1)), ("channel", None, (6, 1)), ("group", 16, (6, 3))],
)
def test_eight_bit_integers(
    strategy: str, group: int | None, scales: tuple[int, int], is_symmetric: bool, tmp_path: Path
) -> None:
    parts = affine(*scales, 8, is_symmetric)
    if strategy == "tensor":
        parts = {part: values.reshape(1) for part, values in parts.items()}
    packed, config, expected = compress(
        IntQuantizationCompressor, draw(6, 48), parts,
        num_bits=8, type="int", strategy=strategy, group_size=group, symmetric=is_symmetric,
    )  # fmt: skip
    np.testing.assert_array_equal(decode(tmp_path, packed, config, "int8"), expected)


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
def test_eight_bit_floats(
    strategy: str,
    sizes: dict[str, Any],
    scales: tuple[int, ...],
    scale_dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    packed, config, expected = compress(
        FloatQuantizationCompressor, draw(6, 48), {"weight_scale": draw(*scales).abs() / 100},
        scale_dtype, num_bits=8, type="float", strategy=strategy, **sizes,
    )  # fmt: skip
    np.testing.assert_array_equal(decode(tmp_path, packed, config, "fp8"), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (8, 16)])
def test_eight_bit_floats_in_blocks_of_128(
    shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    scales = [-(-n // 128) for n in shape]
    tensors = {"weight": draw(*shape).to(dtype), "weight_scale_inv": draw(*scales, seed=1).abs()}
    theirs = FP8BlockDequantizer(dtype=torch.float32)
    expected = theirs.process({f"gate.{leaf}": t for leaf, t in tensors.items()})["gate.weight"]
    found = decode(tmp_path, tensors, {"quant_method": "fp8"}, "fp8")
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("block", [(2, 16), (1, 32), (8, 64)])
def test_eight_bit_floats_in_blocks_of_any_size(
    block: tuple[int, int], scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    scale = torch.exp2(draw(8 // block[0], 64 // block[1], seed=1).round())
    if scale_dtype == torch.uint8:
        scale = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    tensors = {
        "weight": draw(8, 64).to(torch.float8_e4m3fn),
        "weight_scale_inv": scale.to(scale_dtype),
    }
    expected = Fp8Dequantize(None)._dequantize_one(*tensors.values(), output_dtype=torch.float32)
    found = decode(tmp_path, tensors, {"weight_block_size": list(block)}, "fp8")
    np.testing.assert_array_equal(found, expected.numpy())


def test_eight_bit_floats_with_an_exponent_per_32(tmp_path: Path) -> None:
    packed, config, expected = compress(
        MXFP8QuantizationCompressor,
        draw(6, 96),
        {"weight_scale": torch.exp2(draw(6, 3, seed=1).round() - 4)},
        num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8,
    )  # fmt: skip
    assert packed["weight_scale"].dtype == torch.uint8
    np.testing.assert_array_equal(decode(tmp_path, packed, config, "fp8"), expected)


@pytest.mark.parametrize("group", [32, 128])
def test_awq(group: int, tmp_path: Path) -> None:
    tensors = {
        "qweight": random_words(256, 3, seed=0),
        "qzeros": random_words(256 // group, 3, seed=1),
        "scales": draw(256 // group, 24).half(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    converter = AutoAWQConverter.from_autoawq_config(config)
    converted = converter.process({f"gate.{leaf}": t for leaf, t in tensors.items()})
    parts = {name.removeprefix("gate."): t for name, t in converted.items()}
    parts["weight_scale"] = parts["weight_scale"].float()
    args = QuantizationArgs.model_validate(
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": False}
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    expected = PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    assert expected is not None
    np.testing.assert_array_equal(decode(tmp_path, tensors, config, "awq"), expected.numpy())


def in_float32(packed: Tensors, scale: torch.Tensor, group: int) -> np.ndarray:
    """What the compressors compute, without their rounding to bfloat16."""
    rows, num_bytes = packed["weight_packed"].shape
    values = unpack_fp4_from_uint8(packed["weight_packed"], rows, 2 * num_bytes, torch.float32)
    args = QuantizationArgs.model_validate(
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": group}
    )
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


def test_nvfp4(tmp_path: Path) -> None:
    packed, config, rounded = nvfp4()
    assert packed["weight_scale"].dtype == torch.float8_e4m3fn
    found = decode(tmp_path, packed, config, "nvfp4")
    exact = in_float32(packed, packed["weight_scale"].float(), 16)
    np.testing.assert_array_equal(found, exact)
    np.testing.assert_array_equal(torch.from_numpy(found).bfloat16().float().numpy(), rounded)


def test_nvfp4_of_modelopt_multiplies_where_compressed_tensors_divides(tmp_path: Path) -> None:
    packed, _, _ = nvfp4()
    tensors = {
        "weight": packed["weight_packed"],
        "weight_scale": packed["weight_scale"],
        "weight_scale_2": torch.tensor(0.0037),
        "input_scale": torch.tensor(0.1),
    }
    converter = ModelOptNvfp4Converter(targets=["re:.*gate$"])
    converted = converter.process({f"gate.{leaf}": t for leaf, t in tensors.items()})
    parts = {name.removeprefix("gate."): t for name, t in converted.items()}
    expected = in_float32(parts, parts["weight_scale"].float(), 16)
    found = decode(tmp_path, tensors, scheme="nvfp4")
    # Theirs is divided by a reciprocal: three roundings where one product has one.
    np.testing.assert_allclose(found, expected, rtol=3e-7)


def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    scale = torch.exp2(draw(6, 3, seed=1).round() - 2)
    packed, config, rounded = compress(
        MXFP4PackedCompressor, draw(6, 96), {"weight_scale": scale},
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8,
    )  # fmt: skip
    assert packed["weight_scale"].dtype == torch.uint8
    found = decode(tmp_path, packed, config, "mxfp4")
    np.testing.assert_array_equal(found, in_float32(packed, scale, 32))
    np.testing.assert_array_equal(found, rounded)


@pytest.mark.parametrize("separator", ["_", "."])
def test_mxfp4_of_gpt_oss(separator: str, tmp_path: Path) -> None:
    blocks = random_words(5, 3, 4, seed=3).view(torch.uint8)
    # Every exponent but 0 and 255 once: a product with 2^-127 may be flushed to zero by torch.
    scales = torch.arange(1, 255).to(torch.uint8)[17 * torch.arange(15)].reshape(5, 3)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
    tensors = {f"weight{separator}blocks": blocks, f"weight{separator}scales": scales}
    found = decode(tmp_path, tensors, scheme="mxfp4")
    np.testing.assert_array_equal(found, expected[0].T.numpy())


@pytest.mark.parametrize("scale", ["weight_scale_inv", "scale"])
def test_mxfp4_in_int8(scale: str, tmp_path: Path) -> None:
    packed = random_words(6, 12, seed=3).view(torch.int8)
    exponents = draw(6, 3).round().exp2().to(torch.float8_e8m0fnu)
    expected = Fp8Dequantize(None)._dequantize_one(packed, exponents, torch.float32)
    found = decode(tmp_path, {"weight": packed, scale: exponents}, scheme="mxfp4")
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("container", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("shape", "blocksize"), [((24, 640), 64), ((7, 256), 128)])
def test_bitsandbytes_in_four_bits(
    shape: tuple[int, int],
    blocksize: int,
    kind: str,
    is_nested: bool,
    container: torch.dtype,
    tmp_path: Path,
) -> None:
    packed, state = bnb.quantize_4bit(
        draw(*shape), blocksize=blocksize, compress_statistics=is_nested, quant_type=kind,
        quant_storage=container,
    )  # fmt: skip
    expected = bnb.dequantize_4bit(packed, state)
    parts = {f"weight.{part}": values for part, values in state.as_dict(packed=True).items()}
    found = decode(tmp_path, {"weight": packed, **parts}, scheme="bitsandbytes_4bit")
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("shape", "blocksize"), [((6, 16), 64), ((7, 72), 128), ((3, 20), 4096)])
def test_what_bitsandbytes_packs_without_loss_is_what_is_read(
    shape: tuple[int, int], blocksize: int, kind: str, tmp_path: Path
) -> None:
    """Blocks that end within a row: its own AVX-512 kernel (0.50.2) misreads some of these."""
    count = shape[0] * shape[1]
    indices = random_words(count, seed=4) & 0xF
    table = bnb.get_4bit_type(kind, device="cpu")
    indices[::blocksize] = int(table.argmax())  # every block holds its largest magnitude
    largest = draw(-(-count // blocksize), seed=5).abs()
    weight = table[indices] * largest.repeat_interleave(blocksize)[:count]
    packed, state = bnb.quantize_4bit(
        weight.reshape(shape), blocksize=blocksize, compress_statistics=False, quant_type=kind
    )
    parts = {f"weight.{part}": values for part, values in state.as_dict(packed=True).items()}
    found = decode(tmp_path, {"weight": packed, **parts}, scheme="bitsandbytes_4bit")
    np.testing.assert_array_equal(found, weight.reshape(shape).numpy())


def test_bitsandbytes_in_eight_bits(tmp_path: Path) -> None:
    integers = random_words(6, 12, seed=3).view(torch.int8)
    largest = draw(6, seed=1).abs()
    expected = bnb.int8_vectorwise_dequant(integers, largest)
    tensors = {"weight": integers, "SCB": largest, "weight_format": torch.tensor(0).byte()}
    found = decode(tmp_path, tensors, scheme="bitsandbytes_int8")
    np.testing.assert_array_equal(found, expected.numpy())
