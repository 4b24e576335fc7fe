"""Stored floats, packed weights, and storage that is refused with the reason."""

import dataclasses
import json
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from moegeom.checkpoint.dtypes import DTYPES, largest_size, upcast
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Router, StoredRows
from moegeom.router.settings import Settings
from moegeom.router.storage import SCHEMES, RouterTensors, Stored, find_storage
from moegeom.router.storages.four_bit_floats import _TABLES
from moegeom.router.storages.mlx import _BITS, _FLOAT_MODES
from tests.by_day import by_day
from tests.unit.router.conftest import loaded, refusal

Tensors = dict[str, np.ndarray]

_GATE = "model.layers.1.mlp.gate"


def _router(folder: Any) -> Router:
    return loaded(folder).routers[1]


def _fp8(dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [(torch.float64, np.float64), (torch.float32, np.float32), (torch.bfloat16, np.float32),
     (torch.float16, np.float32)],
)  # fmt: skip
def test_plain_floats_keep_every_digit(stored, loaded, make_olmoe):
    weight = torch.randn(6, 16, dtype=torch.float64).to(stored)
    router = _router(make_olmoe({f"{_GATE}.weight": weight}))
    assert router.weight.dtype == loaded
    np.testing.assert_array_equal(router.weight, weight.to(torch.float64).numpy())


def test_narrow_rows_are_floats_as_long_as_somebody_holds_them_and_one_array_for_all(make_olmoe):
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    router = _router(make_olmoe({f"{_GATE}.weight": weight}))
    assert router.stored_numbers.dtype == ml_dtypes.bfloat16
    with ThreadPoolExecutor(4) as pool:
        several = list(pool.map(lambda _: router.weight, range(16)))
    assert len(set(map(id, several))) == 1
    floats = weakref.ref(several.pop())
    StoredRows._latest.clear()
    assert floats() is several[0]
    several.clear()
    assert floats() is None
    np.testing.assert_array_equal(router.weight, weight.float().numpy())
    for again in (pickle.loads(pickle.dumps(router)), dataclasses.replace(router, layer=7)):
        np.testing.assert_array_equal(again.weight, router.weight)
        assert (again.num_experts, again.hidden_size) == (6, 16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        router.weight = router.weight


@given(st.lists(st.floats(width=16), min_size=1, max_size=12), st.sampled_from("HBfd"))
def test_the_largest_size_is_that_of_the_floats_whatever_their_width(numbers, code):
    dtype = {"H": np.float16, "B": ml_dtypes.bfloat16, "f": np.float32, "d": np.float64}[code]
    values = np.array(numbers, dtype)
    assert largest_size(values) == np.abs(values.astype(np.float64)).max() or (
        np.isnan(numbers).any() and np.isnan(largest_size(values))
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_are_not_finite_are_said_at_opening_in_every_dtype(dtype, make_olmoe):
    weight = torch.ones(6, 16).to(dtype)
    weight[2, 3], weight[4, 0] = torch.inf, torch.nan
    model = loaded(make_olmoe({f"{_GATE}.weight": weight}))
    assert "text/1: 2 rows hold non-finite values, first row 2" in model.notes
    assert model.routers[1].non_finite_rows.tolist() == [2, 4]
    assert model.routers[0].non_finite_rows.tolist() == []


def test_a_scale_without_dimensions_is_that_of_the_whole_tensor(make_olmoe):
    weight, scale = _fp8(), torch.tensor(0.7)
    folder = make_olmoe({f"{_GATE}.weight": weight, f"{_GATE}.weight_scale": scale})
    np.testing.assert_array_equal(_router(folder).weight, (weight.float() * scale).numpy())


@pytest.mark.parametrize("name", [name for name in DTYPES if name.startswith("F8_")])
@pytest.mark.parametrize("shape", [(256,), (15, 17), (3, 2**16), (1,), (), (0, 4)])
def test_every_byte_of_an_eight_bit_float_is_the_number_of_ml_dtypes(name, shape):
    codes = np.resize(np.arange(256, dtype=np.uint8), shape).view(DTYPES[name].numpy)
    floats = upcast(codes)
    assert floats.shape == shape and floats.dtype == np.float32
    np.testing.assert_array_equal(floats, codes.astype(np.float32))
    np.testing.assert_array_equal(upcast(codes.T), floats.T)
    assert not np.signbit(floats[np.isnan(floats)]).any()


def _blocks_of(size: object) -> dict[str, Any]:
    return {"quantization_config": {"weight_block_size": size}}


#: Tensors beside those of the checkpoint, its config, and the end of the refusal.
_REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "fp8 without a scale": (
        {"weight": _fp8()}, {},
        f"without a scale, expected '{_GATE}.weight_scale_inv' or '{_GATE}.weight_scale'.",
    ),
    **{
        f"a scale of shape {shape}": (
            {"weight": _fp8(), "weight_scale_inv": torch.ones(shape)}, {},
            f"{shape} of F32, which is no scale for a weight of shape (6, 16) in blocks of (128, 128).",
        )
        for shape in ((2, 4), (16,), (6, 16))
    },
    **{
        f"blocks of {size}": (
            {"weight": _fp8(), "weight_scale_inv": torch.ones(1, 1)}, _blocks_of(size),
            "expected two positive integers.",
        )
        for size in ([0, 1], [128], "128", [1.5, 2], [True, True])
    },
    **{
        f"{leaf} beside": (
            {leaf: torch.ones(1)}, {},
            f"'{_GATE}.{leaf}' stands beside the router weight '{_GATE}.weight' (F32), and what it means is not known.",
        )
        for leaf in ("weight_scale_inv", "scales", "weight.absmax", "qzeros", "bias", "input_scale")
    },
    **{
        f"weights of {dtype}": (
            {"weight": torch.ones(6, 16).to(dtype)}, {}, "expected one of BF16, F16, F32, F64."
        )
        for dtype in (torch.int8, torch.uint8, torch.bool, torch.int32)
    },
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "end"), _REFUSED.values(), ids=_REFUSED)
def test_storage_that_is_not_understood_is_refused(tensors, config, end, make_olmoe):
    named: dict[str, Any] = {f"{_GATE}.{leaf}": values for leaf, values in tensors.items()}
    assert refusal(make_olmoe(named, config)).message.endswith(end)


_NAMES = {row.numpy: name for name, row in DTYPES.items() if row.numpy is not None}


def _info(leaf: str, values: np.ndarray) -> TensorInfo:
    dtype = _NAMES[values.dtype]
    return TensorInfo(f"gate.{leaf}", dtype, values.shape, "a.safetensors", 0, values.nbytes)


def _find(tensors: Tensors, quantisation: Any = None, leaf: str = "weight") -> Stored:
    infos = {name: _info(name, values) for name, values in tensors.items()}
    settings = Settings({"quantization_config": quantisation})
    return find_storage(infos, settings, "router text/1", leaf, tensors.__getitem__)


def _decode(tensors: Tensors, quantisation: Any = None) -> np.ndarray:
    stored = _find(tensors, quantisation)
    weight = stored.decode(tensors)
    assert weight.shape == stored.shape
    return weight


def test_a_plain_weight_under_another_name_is_one_that_loaders_do_not_read():
    with pytest.raises(RouterError) as caught:
        _find({"linear.weight": np.ones((16, 64), np.float32)})
    assert caught.value.code == "MGI107"
    assert caught.value.message == (
        "router text/1: its weight is stored as 'gate.linear.weight' (F32, 16 x 64), and loaders "
        "read 'gate.weight': they leave the router at its initial values."
    )


def _why_refused(tensors: Tensors, quantisation: Any = None) -> str:
    with pytest.raises(RouterError) as caught:
        _decode(tensors, quantisation)
    assert caught.value.code == "MGI106"
    return caught.value.message


_RNG = np.random.default_rng(0)


def _words(*shape: int) -> np.ndarray:
    return _RNG.integers(-(2**31), 2**31, shape).astype(np.int32)


def _bytes(*shape: int) -> np.ndarray:
    return _RNG.integers(0, 256, shape).astype(np.uint8)


def _int8(*shape: int) -> np.ndarray:
    return _bytes(*shape).view(np.int8)


def _floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return _RNG.random(shape).astype(dtype)


def _fp8_values(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)


def _recipe(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


_STATE = "weight.quant_state.bitsandbytes__nf4"


def _quant_state(**changed: Any) -> np.ndarray:
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [16, 64],
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25,
    }  # fmt: skip
    return np.frombuffer(json.dumps(state | changed).encode(), np.uint8)


_GPTQ_V2 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_PACK = _recipe(num_bits=4, type="int", strategy="group", group_size=16, symmetric=False)

#: Routers of 16 experts and 64 inputs: storage, scheme, tensors (the first are all needed), config.
_KINDS: list[tuple[str, str, Tensors, Any]] = [
    ("plain", "plain", {"weight": _floats(16, 64)}, None),
    ("fp8 by row", "fp8", {"weight": _fp8_values(16, 64), "weight_scale": _floats(16, 1)}, None),
    ("fp8 by block", "fp8", {"weight": _fp8_values(16, 64), "weight_scale_inv": _floats(2, 7)},
     {"weight_block_size": [8, 10]}),
    ("int8", "int8", {"weight": _int8(16, 64), "weight_scale": _floats(16, 1)}, None),
    ("gptq", "gptq",
     {"qweight": _words(8, 16), "qzeros": _words(2, 2), "scales": _floats(2, 16, dtype=np.float16),
      "g_idx": _RNG.permutation(64).astype(np.int32) // 32}, _GPTQ_V2),
    ("awq", "awq",
     {"qweight": _words(64, 2), "qzeros": _words(2, 2), "scales": _floats(2, 16, dtype=np.float16)},
     _AWQ),
    ("pack-quantized", "pack_quantized",
     {"weight_packed": _words(16, 8), "weight_scale": _floats(16, 4, dtype=ml_dtypes.bfloat16),
      "weight_shape": np.array([16, 64]), "weight_zero_point": _words(2, 4)}, _PACK),
    ("bitsandbytes nf4", "bitsandbytes_4bit",
     {"weight": _bytes(512, 1), "weight.absmax": _bytes(16),
      "weight.quant_map": np.array(_TABLES["nf4"], np.float32),
      "weight.nested_absmax": _floats(1), "weight.nested_quant_map": _floats(256),
      _STATE: _quant_state()}, None),
    ("bitsandbytes int8", "bitsandbytes_int8", {"weight": _int8(16, 64), "SCB": _floats(16)}, None),
    ("nvfp4", "nvfp4",
     {"weight_packed": _bytes(16, 32), "weight_scale": _fp8_values(16, 4),
      "weight_global_scale": _floats(1)}, None),
    ("nvfp4 of modelopt", "nvfp4",
     {"weight": _bytes(16, 32), "weight_scale": _fp8_values(16, 4), "weight_scale_2": _floats()},
     None),
    ("mxfp4", "mxfp4", {"weight_packed": _bytes(16, 32), "weight_scale": _bytes(16, 2)}, None),
    ("mlx", "mlx",
     {"weight": _words(16, 10).view(np.uint32), "scales": _floats(16, 2), "biases": _floats(16, 2)},
     {"bits": 5, "group_size": 32}),
    ("mlx nvfp4", "mlx",
     {"weight": _words(16, 8).view(np.uint32), "scales": _fp8_values(16, 4).view(np.uint8)},
     {"bits": 4, "group_size": 16, "mode": "nvfp4"}),
    ("mxfp4 of gpt-oss", "mxfp4",
     {"weight_blocks": _bytes(16, 2, 16), "weight_scales": _bytes(16, 2)}, None),
]  # fmt: skip
_EXAMPLES = {kind: example for kind, *example in _KINDS}

#: Parts that a router of the same kind may lack.
_OPTIONAL = {"g_idx", "weight_zero_point"}


def test_every_scheme_has_an_example():
    # blocks of GGUF are decoded by their store: tests/unit/checkpoint/test_gguf.py
    schemes = {scheme for scheme, _, _ in _EXAMPLES.values()} | {"gguf_blocks"}
    assert sorted(schemes) == SCHEMES.names()


@pytest.mark.parametrize("example", _EXAMPLES)
def test_exactly_one_scheme_recognises_a_router_and_says_its_shape(example):
    scheme, tensors, config = _EXAMPLES[example]
    infos = {name: _info(name, values) for name, values in tensors.items()}
    settings = Settings({"quantization_config": config})
    router = RouterTensors(infos, settings, "router text/1", "weight", None)
    assert [s.name for s in SCHEMES.all() if s.recognises(router)] == [scheme]
    stored = _find(tensors, config)
    weight = stored.decode(tensors)
    assert (stored.scheme, stored.shape, weight.dtype) == (scheme, (16, 64), np.float32)
    assert weight.shape == stored.shape
    assert {info.name for info in stored.tensors} == {f"gate.{leaf}" for leaf in tensors}
    # it may be called otherwise
    renamed = {
        f"proj.{name}" if not name.startswith("weight") else name.replace("weight", "proj.w", 1):
        values for name, values in tensors.items()
    }  # fmt: skip
    again = _find(renamed, config, leaf="proj.w").decode(renamed)
    np.testing.assert_array_equal(again, weight)


@pytest.mark.parametrize("example", [e for e in _EXAMPLES if e != "plain"])
def test_a_packed_router_needs_each_of_its_parts_as_it_should_be(example):
    _, tensors, config = _EXAMPLES[example]
    shift = _why_refused({**tensors, "weight_shift": np.ones(16, np.float32)}, config)
    assert shift.startswith("a.safetensors: tensor 'gate.weight_shift' stands beside the router")
    # what is known of activations is not read
    stored = _find({**tensors, "input_scale": np.ones((), np.float32)}, config)
    assert "gate.input_scale" not in {info.name for info in stored.tensors}
    for part, values in tensors.items():
        if part not in _OPTIONAL:
            _why_refused({k: v for k, v in tensors.items() if k != part}, config)
        of_another_dtype = {**tensors, part: values.astype(np.uint16)}
        assert f"'gate.{part}'" in _why_refused(of_another_dtype, config)
        longer = {**tensors, part: np.concatenate([np.atleast_1d(values)] * 3)}
        if "quant_state" in part:
            with pytest.raises(CheckpointError, match="is not JSON"):
                _decode(longer, config)
        else:
            _why_refused(longer, config)


def _changed(example: str, part: str, values: Any, at: Any = ...) -> Tensors:
    tensors = _EXAMPLES[example][1]
    changed = tensors.get(part, values).copy()
    changed[at] = values
    return {**tensors, part: changed}


_PACKED, _NF4 = _EXAMPLES["pack-quantized"][1], _EXAMPLES["bitsandbytes nf4"][1]
_IN_ORDER = {k: v for k, v in _EXAMPLES["gptq"][1].items() if k != "g_idx"}
_PARTLY_NAMED = np.where(np.arange(64) == 3, -1, np.arange(64) // 16).astype(np.int32)
_OF_8_BITS = _recipe(num_bits=8, type="int", group_size=16)["config_groups"]["group_0"]

#: A router, what else its config says, and what the refusal says.
_CONTRADICTIONS: list[tuple[str | Tensors, Any, str]] = [
    ("gptq", None,
     "'gate.scales' (F16), which is no storage known for the quantisation method None."),
    ({"base_layer.weight": np.ones((16, 64), np.float32),
      "lora_A.weight": np.ones((4, 64), np.float32)}, None,
     "an adapter stands in its module: 'gate.base_layer.weight' (F32), 'gate.lora_A.weight'"),
    ("gptq", {"bits": 8}, "holds integers of 4 bits; config.json says 8."),
    ("gptq", {"checkpoint_format": "bitblas"},
     "'quantization_config.checkpoint_format' is bitblas;"),
    *(("gptq", change, "is packed in the order of the Marlin kernel") for change in (
        {"checkpoint_format": "marlin"}, {"quant_method": "gptq_marlin"}, {"quant_method": "marlin"},
        {"is_marlin_format": True})),
    ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
     "known for the quantisation method auto-round."),
    (_changed("gptq", "g_idx", -1, 5), {}, "expected groups from 0 to 1."),
    (_changed("gptq", "g_idx", 2, 5), {}, "expected groups from 0 to 1."),
    (_IN_ORDER, {"desc_act": True}, "there is no 'g_idx'"),
    (_changed("gptq", "qzeros", -1), {"checkpoint_format": "gptq"},
     "holds 15, to which the format 'gptq' adds 1 beyond its 4 bits."),
    (_changed("gptq", "qzeros", 0x77777777), {"sym": True},
     "stands for zero points from 7 to 7; config.json says symmetric, which has 8."),
    *(("awq", {key: version},
       f"'quantization_config.{key}' is {version}; of such routers only gemm is decoded.")
      for key in ("version", "checkpoint_format")
      for version in ("gemv", "GEMV_fast", "marlin", "exllama")),
    ("awq", {"group_size": 64}, "holds 2 groups of 64; there are 64 inputs."),
    ({**_PACKED, "weight_g_idx": _PARTLY_NAMED}, {},
     "holds -1 to 3, expected groups from 0 to 3."),
    (_changed("pack-quantized", "weight_shape", [15, 64]), {},
     "'gate.weight_shape' says [15, 64]; 'gate.weight_packed' holds [16, 64]."),
    ("pack-quantized", {"config_groups": {"a": _OF_8_BITS}}, "none of the 1 'config_groups'"),
    *((_NF4 | {_STATE: _quant_state(**change)}, {}, why) for change, why in (
        ({"shape": [16, 32]}, "has 512 bytes; (16, 32) values take 256."),
        ({"shape": None}, "has 'shape' None, expected two positive integers."),
        ({"shape": [-16, -64]}, "has 'shape' [-16, -64], expected two positive integers."),
        ({"blocksize": 0}, "has 'blocksize' 0, expected a positive integer."),
        ({"quant_type": "fp4"}, "has 'quant_type' fp4, expected nf4."),
        ({"nested_offset": "1"}, "has 'nested_offset' 1, expected a number."),
    )),
    (_changed("bitsandbytes nf4", "weight.quant_map", _NF4["weight.quant_map"][::-1]), {},
     "does not hold the 16 values of nf4."),
    (_EXAMPLES["bitsandbytes int8"][1] | {"weight_format": np.array(2, np.uint8)}, {},
     "'gate.weight_format' is 2, expected 0"),
    ("mlx", {"bits": 4}, "holds 5 bits a column"),
    ("mlx", {"mode": "mxfp4"}, "'gate.biases' stands beside"),
    ("mlx", {"mode": "trellis"}, "is trellis; of such routers only affine"),
]  # fmt: skip


@pytest.mark.parametrize(("router", "change", "why"), _CONTRADICTIONS)
def test_a_packed_router_that_contradicts_itself_or_its_config_is_refused(router, change, why):
    tensors = _EXAMPLES[router][1] if isinstance(router, str) else router
    config = {"qweight": _GPTQ_V2, "weight_packed": _PACK}.get(next(iter(tensors)), {})
    config = _EXAMPLES[router][2] if router in ("awq", "mlx") else config
    assert why in _why_refused(tensors, None if change is None else config | change)


def test_routers_of_gigabytes_are_refused_unread_and_a_gain_in_fp8_too(make_olmoe):
    infos = {
        "weight": TensorInfo("gate.weight", "I8", (1 << 15, 1 << 14), "a", 0, 1 << 29),
        "SCB": TensorInfo("gate.SCB", "F32", (1 << 15,), "a", 0, 1 << 17),
    }
    with pytest.raises(RouterError, match="too many values for a router"):
        find_storage(infos, Settings({}), "router text/1")
    name = "model.layers.1.post_attention_layernorm.weight"
    message = refusal(make_olmoe({name: torch.ones(16).to(torch.float8_e4m3fn)})).message
    assert message.startswith(f"model.safetensors: tensor '{name}' (gain of the norm in front)")


def _string_of_bits(words: np.ndarray, bits: int) -> list[int]:
    """Integers in a row of words, lowest bits first, by one large integer."""
    number = sum(int(word) << (32 * i) for i, word in enumerate(words.view(np.uint32)))
    return [number >> (bits * i) & (2**bits - 1) for i in range(32 * len(words) // bits)]


def _pack_bits(rows: np.ndarray, bits: int) -> np.ndarray:
    numbers = [sum(int(v) << (bits * i) for i, v in enumerate(row)) for row in rows]
    num_words = -(-rows.shape[1] * bits // 32)
    words = [[number >> (32 * i) & 0xFFFFFFFF for i in range(num_words)] for number in numbers]
    return np.array(words, np.uint32).view(np.int32)


#: Bits, convention, columns of a group, whether columns are in the order of activations.
_GPTQ = [
    (bits, convention, group, is_permuted)
    for bits in (2, 3, 4, 8)
    for convention in ("gptq", "gptq_v2")
    for group in (32, 40, -1)
    for is_permuted in (False, True)
]


@pytest.mark.parametrize(
    ("bits", "convention", "group", "is_permuted"),
    by_day(
        _GPTQ,
        {
            "a zero point less one, groups in order": (4, "gptq", 32, False),
            "permuted columns, uneven groups": (4, "gptq_v2", 40, True),
            "one group of all": (2, "gptq", -1, False),
            "integers over the border of a word": (3, "gptq_v2", 32, True),
            "bytes": (8, "gptq", 40, True),
        },
    ),
)
def test_gptq_by_its_definition(bits, convention, group, is_permuted):
    """gptqmodel 7.7.0, PackableQuantLinear.dequantize_weight, in Python integers."""
    rng = np.random.default_rng(bits)
    experts, hidden = 11, 96
    size = hidden if group == -1 else group
    groups = -(-hidden // size)
    order = rng.permutation(hidden) if is_permuted else np.arange(hidden)
    stored_zeros = rng.integers(0, 2**bits - 1, (groups, experts))
    tensors = {
        "qweight": _words(hidden * bits // 32, experts),
        "qzeros": _pack_bits(stored_zeros, bits),
        "scales": rng.random((groups, experts)).astype(np.float16),
        "g_idx": (order // size).astype(np.int32),
    }
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": is_permuted,
        "sym": False, "checkpoint_format": convention,
    }  # fmt: skip
    expected = np.empty((experts, hidden), np.float32)
    for expert in range(experts):
        integers = _string_of_bits(tensors["qweight"][:, expert].copy(), bits)
        for column in range(hidden):
            g = tensors["g_idx"][column]
            zero = int(stored_zeros[g, expert]) + (1 if convention == "gptq" else 0)
            scale = float(tensors["scales"][g, expert])
            expected[expert, column] = scale * (integers[column] - zero)
    np.testing.assert_array_equal(_decode(tensors, config), expected, strict=True)
    if not is_permuted:
        del tensors["g_idx"]
        np.testing.assert_array_equal(_decode(tensors, config), expected, strict=True)


@pytest.mark.parametrize("kind", [*_BITS, *_FLOAT_MODES])
def test_words_of_mlx_are_the_numbers_that_mlx_makes_of_them(kind):
    """mlx 0.32.4: ``mx.quantize`` and ``mx.dequantize`` of two rows of 128 columns."""
    tensors = {
        name.removeprefix(f"{kind}."): values
        for name, values in load_file(
            Path(__file__).parents[2] / "data/mlx_words.safetensors"
        ).items()
        if name.startswith(f"{kind}.")
    }
    expected = tensors.pop("dequantized")
    bits, size = _FLOAT_MODES.get(kind, (kind, 32 if kind in (3, 5) else 64))
    mode = {"mode": kind} if kind in _FLOAT_MODES else {}
    config = {"bits": bits, "group_size": size, **mode}
    np.testing.assert_array_equal(_decode(tensors, config), expected, strict=True)
    if kind in _BITS:  # the definition
        integers = [_string_of_bits(row.copy(), kind) for row in tensors["weight"]]
        group = np.arange(128) // size
        of_column = (tensors[part][:, group] for part in ("scales", "biases"))
        scale, bias = of_column
        np.testing.assert_array_equal(expected, np.float32(integers) * scale + bias)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_autoround_packs_as_others_do_and_has_numbers_of_its_own_for_a_module(method):
    tensors = {k: v for k, v in _EXAMPLES[method][1].items() if k != "g_idx"}
    config = {key: _EXAMPLES[method][2][key] for key in ("bits", "group_size")}
    tensors["qzeros"] = tensors["qzeros"] & 0x77777777  # none that v1 cannot hold
    expected = _decode(tensors, config | {"quant_method": method})
    packing = {"packing_format": f"auto_round:auto_{method}", "sym": False}
    for name in ("auto-round", "auto_round", "intel/auto-round"):
        weight = _decode(tensors, config | packing | {"quant_method": name})
        np.testing.assert_array_equal(weight, expected)
    own = {"bits": 3, "group_size": 128, "extra_config": {"gate": config, "other": {"bits": 16}}}
    weight = _decode(tensors, packing | own | {"quant_method": "auto-round"})
    np.testing.assert_array_equal(weight, expected)


def test_tensors_of_the_marlin_kernel_are_refused_by_its_name():
    tensors = {"B": _words(4, 32), "s": _floats(2, 16), "workspace": _words(16)}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    assert "in the order of the Marlin kernel" in _why_refused(tensors, config)


def test_a_module_of_mlx_has_the_numbers_of_its_own_path():
    tensors, config = _EXAMPLES["mlx"][1:]
    own = {"bits": 4, "group_size": 16, "gate": config}
    np.testing.assert_array_equal(_decode(tensors, own), _decode(tensors, config))
    for place in ("quantization", "quantization_config"):
        settings = Settings({place: {**config, "gate": {"bits": 8, "group_size": 32}}})
        infos = {name: _info(name, values) for name, values in tensors.items()}
        with pytest.raises(RouterError, match=f"{place}.gate' says 8") as caught:
            find_storage(infos, settings, "router text/1")
        assert "holds 5 bits a column (32 x 10 words over 64 columns, 2 groups" in str(caught.value)


def test_gptq_is_the_first_version_unless_said_and_zero_points_may_be_in_either():
    tensors = {**_EXAMPLES["gptq"][1], "qzeros": np.zeros((2, 2), np.int32)}
    config = {"quant_method": "gptq", "bits": 4}
    first = _decode(tensors, config)
    np.testing.assert_array_equal(first, _decode(tensors, {**config, "checkpoint_format": "gptq"}))
    one = {**tensors, "qzeros": np.full((2, 2), 0x11111111, np.int32)}
    np.testing.assert_array_equal(first, _decode(one, _GPTQ_V2))
    assert np.isfinite(_decode(_changed("gptq", "qzeros", -1), _GPTQ_V2)).all()
    seven, first = _changed("gptq", "qzeros", 0x77777777), {**_GPTQ_V2, "checkpoint_format": "gptq"}
    right, unstated = _decode(seven, {**first, "sym": True}), _decode(seven, first)
    np.testing.assert_array_equal(right, unstated)


@pytest.mark.parametrize("is_named", [False, True])
def test_the_groups_of_packed_columns_may_be_named(is_named):
    """compressed-tensors 0.9.0, actorder "group": column j has the scale of group g_idx[j]."""
    rng = np.random.default_rng(1)
    _, tensors, config = _EXAMPLES["pack-quantized"]
    in_order = np.arange(64) // 16
    groups = rng.permutation(in_order) if is_named else in_order
    g_idx = groups if is_named else np.full(64, -1)
    expected = np.empty((16, 64), np.float32)
    for row in range(16):
        integers = _string_of_bits(tensors["weight_packed"][row].copy(), 4)
        for column, g in enumerate(groups):
            zero = _string_of_bits(tensors["weight_zero_point"][:, g].copy(), 4)[row]
            scale = float(tensors["weight_scale"][row, g])
            expected[row, column] = (integers[column] - zero) * scale
    found = _decode({**tensors, "weight_g_idx": g_idx.astype(np.int32)}, config)
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("size", [-1, 64, None])
def test_a_group_of_minus_one_is_a_whole_row(size):
    tensors = {k: v for k, v in _EXAMPLES["pack-quantized"][1].items() if "zero" not in k}
    tensors["weight_scale"] = tensors["weight_scale"][:, :1].copy()
    expected = np.array([_string_of_bits(row.copy(), 4) for row in tensors["weight_packed"]]) - 8
    found = _decode(tensors, _recipe(num_bits=4, type="int", group_size=size))
    scale = tensors["weight_scale"].astype(np.float32)
    np.testing.assert_array_equal(found, expected.astype(np.float32) * scale, strict=True)


def test_compressed_tensors_names_its_blocks_in_the_recipe():
    weight, scale = _fp8_values(16, 64), _floats(2, 4)
    config = _recipe(num_bits=8, type="float", strategy="block", block_structure="8x16")
    found = _decode({"weight": weight, "weight_scale": scale}, config)
    expected = weight.astype(np.float32) * np.kron(scale, np.ones((8, 16), np.float32))
    np.testing.assert_array_equal(found, expected, strict=True)


def test_packed_integers_in_other_ways_of_their_format_are_the_same():
    _, tensors, config = _EXAMPLES["pack-quantized"]
    packed = tensors["weight_zero_point"]
    zeros = np.array([_string_of_bits(packed[:, g].copy(), 4) for g in range(4)]).T - 8
    early = {**tensors, "weight_zero_point": zeros.astype(np.int8)}
    np.testing.assert_array_equal(_decode(early, config), _decode(tensors, config))
    groups = {"group_0": _OF_8_BITS, "group_1": config["config_groups"]["group_0"]}
    both = _decode(tensors, {"config_groups": groups})
    np.testing.assert_array_equal(both, _decode(tensors, config))


def test_an_exponent_is_a_power_of_two_and_255_is_not_a_number():
    exponents = np.array([[0], [1], [127], [254], [255]], np.uint8)
    packed = np.full((5, 16), 0x21, np.uint8)
    powers = np.array([2.0**-127, 2.0**-126, 1.0, 2.0**127, np.nan], np.float32)
    expected = np.tile([np.float32(0.5), np.float32(1.0)], 16) * powers[:, None]
    found = _decode({"weight_packed": packed, "weight_scale": exponents})
    np.testing.assert_array_equal(found, expected, strict=True)


_LEAVES = sorted({leaf for _, tensors, _ in _EXAMPLES.values() for leaf in tensors} | {"scale"})
_SIZES = st.sampled_from([0, 1, 2, 4, 16, 32, 64])
_ANY_TENSORS = st.dictionaries(
    st.sampled_from(_LEAVES),
    st.tuples(
        st.sampled_from(["F32", "BF16", "F8_E4M3", "F8_E8M0", "U8", "I8", "I32", "I64"]),
        st.lists(_SIZES, max_size=3),
    ),
    max_size=2,
)


@given(
    example=st.sampled_from(sorted(_EXAMPLES)),
    changes=_ANY_TENSORS,
    config=st.sampled_from([_GPTQ_V2, _AWQ, _PACK, None]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_tensors_decode_to_the_stated_shape_or_are_refused(example, changes, config, seed):
    rng = np.random.default_rng(seed)
    tensors = dict(_EXAMPLES[example][1])
    for leaf, (dtype, shape) in changes.items():
        kind = np.dtype(DTYPES[dtype].numpy)
        raw = rng.integers(0, 256, int(np.prod(shape)) * kind.itemsize).astype(np.uint8)
        tensors[leaf] = raw.view(kind).reshape(shape)
    try:
        stored = _find(tensors, config)
        weight = stored.decode(tensors)
    except (RouterError, CheckpointError) as error:
        assert error.message.endswith(".")
    else:
        assert weight.shape == stored.shape
