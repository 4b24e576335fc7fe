"""Decoded router weights equal what the libraries that write the formats decode themselves, and
what transformers loads of a folder is what is judged, bit for bit, or a finding says so.
"""

import json
import shutil
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from compressed_tensors import compressors
from compressed_tensors.entrypoints.convert import converters
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from numpy.testing import assert_allclose, assert_array_equal
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.family import family_of, family_of_class
from moegeom.router.load import load_routers
from moegeom.router.settings import Settings
from moegeom.router.storage import find_storage
from tests.by_day import by_day
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf

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


def compress(
    compressor: type[compressors.BaseCompressor], weight, parts, held_in=torch.float32, **arguments
):
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
        tmp_path, "pack_quantized", compressors.PackedQuantizationCompressor, draw(*shape), parts, scale_dtype,
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
        tmp_path, "int8", compressors.IntQuantizationCompressor, draw(6, 48), parts,
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
        tmp_path, "fp8", compressors.FloatQuantizationCompressor, draw(6, 48),
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
    expected = by_converter(converters.FP8BlockDequantizer(dtype=torch.float32), tensors)["weight"]
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
    parts = by_converter(converters.AutoAWQConverter.from_autoawq_config(config), tensors)
    parts["weight_scale"] = parts["weight_scale"].float()
    args = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=group, symmetric=False
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    expected = compressors.PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    assert_array_equal(decode(tmp_path, tensors, config, "awq"), expected.numpy())


def in_float32(packed: Tensors, scale: torch.Tensor, group: int) -> np.ndarray:
    """What the compressors compute, without their rounding to bfloat16."""
    rows, num_bytes = packed["weight_packed"].shape
    values = compressors.unpack_fp4_from_uint8(
        packed["weight_packed"], rows, 2 * num_bytes, torch.float32
    )
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=group)
    whole = packed.get("weight_global_scale")
    return dequantize(values, scale, args=args, dtype=torch.float32, global_scale=whole).numpy()


def nvfp4() -> tuple[Tensors, dict[str, Any], np.ndarray]:
    scale = (draw(6, 6, seed=1).abs() * 100 + 1).to(torch.float8_e4m3fn).float()
    return compress(
        compressors.NVFP4PackedCompressor,
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
    parts = by_converter(converters.ModelOptNvfp4Converter(targets=["re:.*gate$"]), tensors)
    expected = in_float32(parts, parts["weight_scale"].float(), 16)
    # Theirs is divided by a reciprocal: three roundings where one product has one.
    assert_allclose(decode(tmp_path, tensors, scheme="nvfp4"), expected, rtol=3e-7)


def test_exponents_per_32_of_mxfp8_and_mxfp4_are_decoded(tmp_path):
    scale = torch.exp2(draw(6, 3, seed=1).round() - 2)
    packed, decoded = as_decompressed(
        tmp_path, "mxfp4", compressors.MXFP4PackedCompressor, draw(6, 96), {"weight_scale": scale},
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8,
    )  # fmt: skip
    assert packed["weight_scale"].dtype == torch.uint8
    assert_array_equal(decoded, in_float32(packed, scale, 32))
    scale = torch.exp2(draw(6, 3, seed=1).round() - 4)
    packed, _ = as_decompressed(
        tmp_path, "fp8", compressors.MXFP8QuantizationCompressor, draw(6, 96), {"weight_scale": scale},
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


_ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model of two layers in one file."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("loaders") / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    held = load_file(folder / "model.safetensors")
    return {name: torch.from_numpy(values.copy()) for name, values in held.items()}


def _write(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({k: v.clone() for k, v in tensors.items()}, folder / name, {"format": "pt"})


def _other(folder: Path) -> dict[str, torch.Tensor]:
    """The same model with a router that holds a NaN."""
    tensors = _tensors(folder)
    tensors[_ROUTER][0, 0] = torch.nan
    return tensors


def _index(folder: Path, weight_map: dict[str, str], name: str = "model.safetensors") -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / f"{name}.index.json").write_text(text)


def _shards(folder: Path) -> None:
    """Two shards and their index, in place of the one file."""
    tensors = _tensors(folder)
    parts = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for name, values in tensors.items():
        parts["model-2.safetensors" if "lm_head" in name else "model-1.safetensors"][name] = values
    for name, part in parts.items():
        _write(folder, name, part)
    _index(folder, {k: name for name, part in parts.items() for k in part})
    (folder / "model.safetensors").unlink()


def _config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _named_file(folder: Path) -> None:
    _write(folder, "evil.safetensors", _other(folder))
    _config(folder, transformers_weights="evil.safetensors")


def _named_index(folder: Path) -> None:
    other = _other(folder)
    _write(folder, "evil.safetensors", other)
    _index(folder, dict.fromkeys(other, "evil.safetensors"), "evil.safetensors")
    _config(folder, transformers_weights="evil.safetensors.index.json")


def _duplicate_in_a_later_shard(folder: Path) -> None:
    other = _other(folder)
    _shards(folder)
    held = load_file(folder / "model-2.safetensors")
    part = {name: torch.from_numpy(values.copy()) for name, values in held.items()}
    _write(folder, "model-2.safetensors", part | {_ROUTER: other[_ROUTER]})


def _single_file_for_a_dummy(folder: Path) -> None:
    other = _other(folder)
    _shards(folder)
    _write(folder, "model.safetensors", other)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    _index(folder, index | {"dummy": "model.safetensors"})


def _single_file_beside_an_index(folder: Path) -> None:
    other = _other(folder)
    _shards(folder)
    _write(folder, "model.safetensors", other)


def _pickle_beside(folder: Path) -> None:
    torch.save(_other(folder), folder / "pytorch_model.bin")


def _variant_beside(folder: Path) -> None:
    _write(folder, "model.fp16.safetensors", _other(folder))


def _later_file_without_an_index(folder: Path) -> None:
    _write(folder, "weights.safetensors", _other(folder))


def _consolidated_beside(folder: Path) -> None:
    _write(folder, "consolidated.safetensors", _other(folder))


def _another_rule_in_a_table(folder: Path) -> None:
    _config(folder, llm_config={"num_experts_per_tok": 1, "model_type": "qwen3_moe"})


def _the_same_rule_in_a_table(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    _config(folder, llm_config=config | {"architectures": None})


def _adapter_on_a_router(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    lora = LoraConfig(target_parameters=["mlp.gate.weight"], r=2, init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    adapted.save_pretrained(str(folder))


def _unchanged(folder: Path) -> None:
    pass


def _equal_copies(folder: Path) -> None:
    tensors = _tensors(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "z.safetensors"):
        _write(folder, name, tensors)


#: Folders, and who takes other routers there than are judged.
FOLDERS: dict[Callable[[Path], None], tuple[str, ...]] = {
    _unchanged: (),
    _shards: (),
    _equal_copies: (),
    _named_file: ("vLLM", "SGLang", "llama.cpp's converter"),
    _named_index: ("vLLM", "SGLang", "llama.cpp's converter"),
    _duplicate_in_a_later_shard: ("transformers", "vLLM", "SGLang", "llama.cpp's converter"),
    _single_file_for_a_dummy: (),
    _single_file_beside_an_index: ("vLLM", "SGLang"),
    _pickle_beside: ("transformers (use_safetensors=False)",),
    _variant_beside: ("transformers (variant='fp16')",),
    _later_file_without_an_index: ("vLLM", "SGLang"),
    _consolidated_beside: ("vLLM",),
    _another_rule_in_a_table: ("llama.cpp's converter",),
    _the_same_rule_in_a_table: (),
    _adapter_on_a_router: ("PEFT",),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about transformers
@pytest.mark.parametrize("change", FOLDERS, ids=lambda change: change.__name__[1:])
def test_what_transformers_loads_is_judged_or_a_finding_says_so(change, saved, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    change(folder)
    verdict = mg.check(folder)
    facts = json.loads(verdict.json())["run"]["loaders"]
    others = tuple(chain.from_iterable(o["loaders"] for o in facts["others"] if o["routers"]))
    others += ("PEFT",) if facts["adapter"] and facts["adapter"]["routers"] else ()
    assert others == FOLDERS[change], verdict.text()
    assert ("MGI117" in verdict.text()) == bool(others)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    judged = load_routers(open_checkpoint(folder)).routers
    are_equal = all(
        np.array_equal(router.weight, _loaded(loaded, router.layer), equal_nan=True)
        for router in judged
    )
    assert are_equal == (not {"transformers", "PEFT"} & set(others))
    are_finite = all(np.isfinite(_loaded(loaded, router.layer)).all() for router in judged)
    broken = any(other["not_finite"] and other["is_default"] for other in facts["others"])
    assert bool(verdict) == (are_finite and not broken), verdict.text()


def _loaded(model: Any, layer: int) -> np.ndarray:
    """The router that transformers computes with, an adapter included."""
    gate = model.model.layers[layer].mlp.gate
    with torch.no_grad():
        change = gate.get_delta_weight("default") if hasattr(gate, "get_delta_weight") else 0.0
        return (gate.weight + change).numpy()


def test_a_class_of_another_family_than_the_type_is_a_finding(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    _config(tmp_path / "model", architectures=["MixtralForCausalLM"])
    verdict = mg.check(tmp_path / "model")
    assert json.loads(verdict.json())["run"]["loaders"]["class_of_others"]["family"] == "mixtral"
    assert "MGI117" in verdict.text()
    assert not mg.check(tmp_path / "model", profile="release")


def test_classes_of_transformers_are_of_the_family_of_their_type():
    classes = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    families = {kind: family_of(kind) for kind in classes}
    of_class = {kind: family_of_class(classes[kind], kind) for kind in classes}
    assert sum(family is not None for family in of_class.values()) > 50
    others = {kind: f.name for kind, f in of_class.items() if f not in (None, families[kind])}
    assert others == {}


@pytest.mark.parametrize("name", [_ROUTER, "model.layers.0.post_attention_layernorm.weight"])
def test_a_part_with_model_in_front_and_without_is_refused(name, saved, tmp_path):
    """Transformers takes both for one parameter."""
    tensors = _tensors(saved)
    shutil.copytree(saved, tmp_path / "model")
    broken = torch.full_like(tensors[name], torch.nan)
    _write(tmp_path / "model", "model.safetensors", tensors | {name.removeprefix("model."): broken})
    assert not mg.check(tmp_path / "model")


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_model_for_llama_cpp_beside_the_weights_is_compared(is_changed, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    held = load_file(saved / "model.safetensors")
    tensors = {}
    for layer in range(2):
        of_layer = f"model.layers.{layer}."
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = held[f"{of_layer}mlp.gate.weight"]
        norm = held[f"{of_layer}post_attention_layernorm.weight"]
        tensors[f"blk.{layer}.ffn_norm.weight"] = norm
    if is_changed:
        tensors["blk.1.ffn_gate_inp.weight"] = -tensors["blk.1.ffn_gate_inp.weight"]
    keys = moe_keys(experts=8, hidden=16, layers=2, eps=1e-6)
    write_gguf(tmp_path / "model" / "q.gguf", "qwen3moe", tensors, keys=keys)
    others = json.loads(mg.check(tmp_path / "model").json())["run"]["loaders"]["others"]
    assert [(o["loaders"], o["routers"], o["reason"]) for o in others] == (
        [(["llama.cpp (-m q.gguf)"], ["text/1"], "")] if is_changed else []
    )
