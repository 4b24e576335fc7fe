"""Oracle: the gguf package writes, and its reader and decoder say what the numbers are."""

import json
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from safetensors.torch import load_file

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.checkpoint.formats import gguf as gguf_format
from moegeom.checkpoint.formats.gguf import BLOCK_DTYPES, GGML_TYPES, Unread
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError
from moegeom.core.extras import install_command
from moegeom.router.load import load_routers
from tests.unit.checkpoint.conftest import refusal, why
from tests.unit.checkpoint.gguf_file import Types, moe_keys, write_gguf

_GATE = "blk.{}.ffn_gate_inp.weight"
_T = gguf.GGMLQuantizationType
_V = gguf.GGUFValueType

#: Types of which the package has the size and no decoder.
_UNDECODED = {"Q8_1", "Q8_K", "Q1_0"}


def _write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    types: Types | None = None,
    settings: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **options: Any,
) -> Path:
    keys = {"expert_count": 64, "layer_norm_rms_eps": 1e-5}
    return write_gguf(path, "qwen3moe", tensors, types, settings, keys, **options)


def _gates(num_layers: int = 5) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        _GATE.format(i): draw.normal(size=(6, 64)).astype(np.float32) for i in range(num_layers)
    }


def test_the_table_of_types_is_that_of_the_package_blocks_and_stored_dtypes():
    expected = {t.value: (t.name, *GGML_QUANT_SIZES[t]) for t in _T}
    assert {code: tuple(row) for code, row in GGML_TYPES.items()} == expected
    plain = {row.name: row.block_bytes for row in GGML_TYPES.values() if row.block_size == 1}
    assert plain.keys() | BLOCK_DTYPES == {row.name for row in GGML_TYPES.values()}
    assert {name: DTYPES[name].bits for name in plain} == {n: 8 * b for n, b in plain.items()}


@pytest.mark.parametrize("dtype", sorted(BLOCK_DTYPES - _UNDECODED))
def test_any_blocks_are_the_numbers_that_the_package_decodes(dtype, tmp_path):
    block_size, block_bytes = GGML_QUANT_SIZES[_T[dtype]]
    raw = np.random.default_rng(1).integers(0, 256, (40, 3 * block_bytes), np.uint8)
    tensors = {"a": np.ones(3, np.float32), "t": raw, "z": np.ones(3, np.float32)}
    path = _write(tmp_path / "m.gguf", tensors, {"t": _T[dtype]})
    store = open_checkpoint(path)
    assert (store.info("t").dtype, store.info("t").shape) == (dtype, (40, 3 * block_size))
    assert store.read_bytes("t", 0, raw.nbytes) == raw.tobytes()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(gguf.GGUFReader(path).tensors[1].data, _T[dtype])
    np.testing.assert_array_equal(store.read("t"), expected, strict=True)


def test_plain_numbers_of_any_shape_are_those_of_the_package_in_their_dtype(tmp_path):
    draw, patterns = np.random.default_rng(3), np.arange(2**16, dtype=np.uint16).reshape(4, -1)
    tensors = {
        dtype: draw.integers(-100, 100, (4, 7)).astype(DTYPES[dtype].numpy)
        for dtype in ("F32", "F16", "F64", "I8", "I16", "I32", "I64")
    }
    whole = tensors | {"BF16": patterns.view(np.uint8)}
    path = _write(tmp_path / "m.gguf", whole, {"BF16": _T.BF16})
    store = open_checkpoint(path)
    for read in gguf.GGUFReader(path).tensors:
        assert store.info(read.name).dtype == read.name
        if read.name in tensors:
            np.testing.assert_array_equal(store.read(read.name), tensors[read.name], strict=True)
            np.testing.assert_array_equal(store.read(read.name), read.data)
    assert store.read("BF16").dtype == DTYPES["BF16"].numpy
    np.testing.assert_array_equal(store.read("BF16").view(np.uint16), patterns)
    shapes = {str(shape): shape for shape in ((), (1,), (2, 3, 4), (2, 1, 3, 4))}
    tensors = {
        name: np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    path = _write(tmp_path / "m.gguf", tensors)
    store = open_checkpoint(path)
    for read in gguf.GGUFReader(path).tensors:
        assert store.info(read.name).shape == shapes[read.name]
        assert tuple(read.shape) == shapes[read.name][::-1]
        np.testing.assert_array_equal(store.read(read.name), tensors[read.name], strict=True)


@pytest.mark.parametrize(("alignment", "version"), [(8, 3), (32, 2), (64, 3), (4096, 3)])
def test_tensors_lie_where_the_package_says_in_versions_2_and_3(alignment, version, tmp_path):
    tensors = _gates() | {"odd": np.arange(3, dtype=np.int8), "z": np.full(5, 7.0)}
    path = _write(
        tmp_path / "m.gguf", tensors, settings=lambda w: w.add_custom_alignment(alignment)
    )
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + struct.pack("<I", version) + raw[8:])
    store = open_checkpoint(path)
    expected = [(t.name, t.data_offset, t.n_bytes) for t in gguf.GGUFReader(path).tensors]
    infos = [store.info(name) for name in store.names()]
    assert [(i.name, i.offset, i.size_bytes) for i in infos] == expected
    for name, values in tensors.items():
        np.testing.assert_array_equal(store.read(name), values, strict=True)
    # a slice of bytes stays inside its tensor
    slices = [store.read_bytes("odd", *part) for part in ((1, 1), (1, 100), (100, 1))]
    assert slices == [bytes([1]), bytes([1, 2]), b""]


def test_blocks_without_a_decoder_or_the_package_or_too_large_are_refused(tmp_path, monkeypatch):
    for dtype in _UNDECODED:
        raw = np.zeros((2, GGML_QUANT_SIZES[_T[dtype]][1]), np.uint8)
        sentence = f"m.gguf: tensor 't' is {dtype}, which the installed gguf package cannot decode."
        assert why(_write(tmp_path / "m.gguf", {"t": raw}, {"t": _T[dtype]})) == sentence
    monkeypatch.setattr(gguf_format, "GGUF_NUMBERS", 64)
    kinds = {"t": _T["Q8_0"]}
    two, three = (np.zeros((rows, 34), np.uint8) for rows in (2, 3))
    assert open_checkpoint(_write(tmp_path / "m.gguf", {"t": two}, kinds)).read("t").size == 64
    sentence = "n.gguf: tensor 't' has 96 numbers in blocks of Q8_0, more than the 64 that are decoded at once."
    assert why(_write(tmp_path / "n.gguf", {"t": three}, kinds)) == sentence
    tensors = {"a": np.ones(3, np.float32), "t": np.zeros((2, 34), np.uint8)}
    path = _write(tmp_path / "m.gguf", tensors, {"t": _T.Q8_0})
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert open_checkpoint(path).read("a").tolist() == [1.0, 1.0, 1.0]
    error = refusal(path)
    assert "tensor 't' is Q8_0, stored in blocks, which needs the gguf package." in error.message
    assert error.hint == install_command("gguf")


def test_the_config_is_that_of_the_architecture_with_nested_keys(tmp_path):
    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_used_count(8)
        writer.add_expert_weights_norm(True)
        writer.add_head_count_kv([4, 0, 4])
        writer.add_license("apache-2.0")
        writer.add_license_name("Apache")
        writer.add_string("qwen3moe.rope.scaling.type", "yarn")
        writer.add_string("qwen3.expert_count", "another architecture")
        writer.add_chat_template("{}" * 9000)

    (tmp_path / "config.json").write_text("no JSON")
    path = _write(tmp_path / "m.gguf", {"t": np.ones(1)}, settings=settings)
    assert open_checkpoint(path).config == {
        "model_type": "gguf",
        "architecture": "qwen3moe",
        "general": {
            "architecture": "qwen3moe", "license": "apache-2.0", "license.name": "Apache",
        },
        "expert_count": 64,
        "expert_used_count": 8,
        "expert_weights_norm": True,
        "attention": {"layer_norm_rms_epsilon": float(np.float32(1e-5)), "head_count_kv": [4, 0, 4]},
        "rope": {"scaling": {"type": "yarn"}},
    }  # fmt: skip


_NUMBERS = {
    _V.UINT8: 255, _V.INT8: -128, _V.UINT16: 2**16 - 1, _V.INT16: -(2**15), _V.UINT32: 2**32 - 1,
    _V.INT32: -(2**31), _V.UINT64: 2**64 - 1, _V.INT64: -(2**63), _V.FLOAT32: 0.5,
    _V.FLOAT64: 0.1, _V.BOOL: True, _V.STRING: "π",
}  # fmt: skip


@pytest.mark.parametrize("kind", _NUMBERS, ids=lambda kind: kind.name)
def test_a_value_of_each_type_is_read_alone_and_in_arrays(kind, tmp_path):
    value = _NUMBERS[kind]

    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_key_value("qwen3moe.one", value, kind)
        for count in (3, 256, 257):
            writer.add_key_value(f"qwen3moe.{count}", [value] * count, _V.ARRAY, kind)

    path = _write(tmp_path / "m.gguf", {"t": np.ones(1)}, settings=settings)
    config = open_checkpoint(path).config
    assert config["one"] == value
    assert type(config["one"]) is type(value)
    assert config["3"] == [value] * 3
    assert config["256"] == [value] * 256
    assert config["257"] == Unread(257)
    reader = gguf.GGUFReader(path)
    assert [config[key] for key in ("one", "3")] == [
        reader.fields[f"qwen3moe.{key}"].contents() for key in ("one", "3")
    ]


def test_a_config_without_architecture_or_whose_key_is_a_value_and_a_table_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"m\.gguf: general\.architecture is not given"):
        assert open_checkpoint(_raw(tmp_path)).config
    for key in "a a.b.c general general.name model_type architecture.x attention".split():

        def settings(writer: gguf.GGUFWriter, key: str = key) -> None:
            writer.add_uint32("qwen3moe.a.b", 1)
            writer.add_uint32(f"qwen3moe.{key}", 2)

        store = open_checkpoint(_write(tmp_path / "m.gguf", {"t": np.ones(1)}, settings=settings))
        with pytest.raises(CheckpointError, match=f"'qwen3moe.{key}' contradicts another key"):
            assert store.config


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    count = 15_000
    writer.add_token_list([f"token{i}" for i in range(count)])
    writer.add_token_scores([0.5] * count)
    writer.add_token_merges(["a b", "", "long " * 100] * (count // 3))
    writer.add_expert_used_count(8)


def test_only_the_header_and_the_tensor_that_is_asked_for_are_read(tmp_path):
    experts = {f"blk.{i}.ffn_up_exps.weight": np.ones((4, 2**18), np.float32) for i in range(2)}
    path = _write(tmp_path / "m.gguf", experts | _gates(2))
    store: Any = open_checkpoint(path)
    store.read(_GATE.format(1))
    info = store.info(_GATE.format(1))
    assert [(r.offset, r.size) for r in store.log.ranges] == [
        (0, 2**16),
        (info.offset, info.size_bytes),
    ]
    assert store.bytes_total == path.stat().st_size > 8 * 2**20

    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_key_value("a", [0.5] * 400_000, _V.ARRAY, _V.FLOAT64)

    path = _write(tmp_path / "m.gguf", {"t": np.ones(2**16)}, settings=settings)
    store: Any = open_checkpoint(path)
    assert store.read("t")[-1] == 1.0
    assert store.bytes_read < 2**20 < path.stat().st_size


def test_a_vocabulary_is_passed_over_in_pieces_that_grow_none_of_them_twice(tmp_path):
    for count in (2**22, 2):
        tensors = {"t": np.ones(count, np.float32)}
        path = _write(tmp_path / "m.gguf", tensors, settings=_vocabulary)
        store: Any = open_checkpoint(path)
        assert store.config["expert_used_count"] == 8
        ranges = list(store.log.ranges)
        assert ranges[0].size == 2**16
        assert 4 <= len(ranges) <= 8
        ends = [r.offset + r.size for r in ranges]
        assert all(r.offset >= end for r, end in zip(ranges[1:], ends, strict=False))
        assert store.info("t").offset == gguf.GGUFReader(path).tensors[0].data_offset
        assert ends[-1] <= min(2 * store.info("t").offset, path.stat().st_size)
        assert store.read("t").sum() == count


@pytest.fixture(params=[False, True], ids=["full first part", "empty first part"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Five gates in parts of two."""
    folder = tmp_path / "split"
    folder.mkdir()
    options = {"split_max_tensors": 2, "small_first_shard": request.param}
    _write(folder / "m.gguf", _gates(), **options)
    return sorted(folder.iterdir())


def test_a_split_model_is_read_from_its_folder_and_from_any_part(parts):
    assert len(parts) >= 3
    for path in (parts[0].parent, *parts):
        store = open_checkpoint(path)
        assert list(store.names()) == list(_gates())
        assert store.config["expert_count"] == 64
        assert store.bytes_total == sum(part.stat().st_size for part in parts)
        for name, values in _gates().items():
            np.testing.assert_array_equal(store.read(name), values, strict=True)
    last = [t.name for t in gguf.GGUFReader(parts[-1]).tensors]
    assert {open_checkpoint(parts[0]).info(name).file for name in last} == {parts[-1].name}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_part_is_named(lost, parts):
    parts[lost].unlink()
    other = parts[1 if lost == 0 else 0]
    for path in (other.parent, other):
        assert why(path) == (
            f"{other.name}: is one of {len(parts)} parts, and '{parts[lost].name}' does not exist."
        )


def test_a_part_under_another_name_is_refused(parts):
    count = f"{len(parts):05d}"
    alone = parts[1].rename(parts[1].with_name("part.gguf"))
    sentence = f"part.gguf: is part 2 of {len(parts)}, expected a name that ends in -00002-of-{count}.gguf."
    assert why(alone) == sentence
    alone.rename(parts[1])
    parts[2].write_bytes(parts[1].read_bytes())
    sentence = f"{parts[2].name}: says split.no 1 and split.count {len(parts)}, expected 2 and {len(parts)}."
    assert why(parts[0]) == sentence
    assert f"{parts[2].name}: is part 2 of {len(parts)}, expected" in why(parts[2])

    _write(parts[1], {"t": np.ones(1)})
    assert why(parts[0]) == f"{parts[1].name}: split.no is not given, expected a count."


def _patch(path: Path, key: str, value: bytes) -> None:
    """Overwrite the number behind a key."""
    raw = bytearray(path.read_bytes())
    at = raw.index(key.encode()) + len(key) + 4
    raw[at : at + len(value)] = value
    path.write_bytes(raw)


def test_a_tensor_in_two_parts_or_in_none_and_too_many_parts_are_refused(parts):
    name, other = (gguf.GGUFReader(parts[place]).tensors[0].name for place in (-1, -2))
    whole = parts[-1].read_bytes()
    parts[-1].write_bytes(whole.replace(name.encode(), other.encode()))
    assert why(parts[0]) == (f"{parts[-1].name}: tensor '{other}' is also in {parts[-2].name}.")
    parts[-1].write_bytes(whole)
    _patch(parts[0], "split.tensors.count", struct.pack("<I", 6))
    sentence = f"{parts[0].name}: says split.tensors.count 6, and the {len(parts)} parts hold 5."
    assert why(parts[-1]) == sentence
    _patch(parts[0], "split.count", struct.pack("<H", 2**16 - 1))
    sentence = f"{parts[0].name}: says that there are 65535 parts, more than the 1000 allowed."
    assert why(parts[0]) == sentence


def test_an_alignment_that_only_the_first_part_gives_is_refused_where_it_matters(tmp_path):
    _write(
        tmp_path / "m.gguf",
        _gates(),
        settings=lambda writer: writer.add_custom_alignment(4096),
        split_max_tensors=3,
    )
    assert why(tmp_path) == (
        "m-00002-of-00002.gguf: does not give general.alignment, which is 4096 in "
        "m-00001-of-00002.gguf and 32 by default."
    )


def test_a_folder_of_several_models_asks_for_one_file(tmp_path):
    _write(tmp_path / "m-Q8_0.gguf", {"t": np.ones(1)})
    _write(tmp_path / "m-Q4_K.gguf", _gates(), split_max_tensors=2)
    error = refusal(tmp_path)
    assert error.message == f"{tmp_path.name}: holds 2 models (m-Q4_K (3 parts), m-Q8_0.gguf)."
    assert error.hint == "Pass the file to read."
    assert open_checkpoint(tmp_path / "m-Q8_0.gguf").read("t").tolist() == [1.0]


def test_a_projector_beside_a_model_and_a_model_beside_safetensors_are_ignored(tmp_path, write_raw):
    _write(tmp_path / "mmproj-F16.gguf", {"v": np.ones(1)})
    assert "holds mmproj-F16.gguf alone, an encoder without its model." in why(tmp_path)
    _write(tmp_path / "z.gguf", {"t": np.ones(1)})
    assert list(open_checkpoint(tmp_path).names()) == ["t"]
    write_raw({})  # a folder that holds safetensors, too, is not GGUF
    assert list(open_checkpoint(tmp_path).names()) == []
    assert list(open_checkpoint(tmp_path / "z.gguf").names()) == ["t"]


def _text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _tensor(
    name: str | bytes = "t", shape: Sequence[int] = (2,), kind: int = 0, offset: int = 0
) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return _text(name) + dimensions + struct.pack("<IQ", kind, offset)


def _setting(key: str | bytes, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _raw(
    folder: Path,
    tensors: Sequence[bytes] = (),
    settings: Sequence[bytes] = (),
    num_data: int = 0,
    start: bytes = b"GGUF" + struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
) -> Path:
    """A file written by hand, so that every field can be wrong."""
    num_tensors, num_settings = counts or (len(tensors), len(settings))
    head = start + struct.pack("<QQ", num_tensors, num_settings) + b"".join([*settings, *tensors])
    path = folder / "m.gguf"
    path.write_bytes(head + bytes(-len(head) % 32 + num_data))
    return path


def _array(kind: int, length: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + values


def _alignment(kind: int, layout: str, value: int) -> bytes:
    return _setting("general.alignment", kind, struct.pack(layout, value))


def _k(kind: int, value: bytes) -> bytes:
    return _setting("k", kind, value)


#: Sentences about headers.
_HEADERS: list[tuple[str, dict[str, Any]]] = [
    ("begins with b'<htm', expected b'GGUF'", {"start": b"<html><b"}),
    ("is of version 1 of GGUF, expected 2 or 3", {"start": b"GGUF\1\0\0\0"}),
    ("is of version 4 of GGUF, expected 2 or 3", {"start": b"GGUF\4\0\0\0"}),
    ("is big-endian, expected little-endian", {"start": b"GGUF\0\0\0\3"}),
    (f"claims {2**60} tensors, more than the 30000 allowed", {"counts": (2**60, 0)}),
    (f"claims {2**60} settings, more than the 1024 allowed", {"counts": (0, 2**60)}),
    ("truncated, has 64 bytes", {"counts": (2, 0), "tensors": [_tensor()]}),
    (
        f"truncated, has 96 bytes and its header promises {2**62 + 8}",
        {"settings": [_alignment(10, "<Q", 2**62)], "tensors": [_tensor()]},
    ),
]

#: Sentences about settings.
_SETTINGS: list[tuple[str, list[bytes]]] = [
    (f"key of setting 0 has {2**60} bytes, more than the 256", [struct.pack("<Q", 2**60)]),
    (f"has 64 bytes and its header promises {2**60 + 45}", [_k(8, struct.pack("<Q", 2**60))]),
    (f"has 64 bytes and its header promises {2**63 + 49}", [_k(9, _array(12, 2**60))]),
    (f"header hold {2**60} strings, more than the 2500000 allowed", [_k(9, _array(8, 2**60))]),
    (
        f"and its header promises {2**62 + 57}",
        [_k(9, _array(8, 300, struct.pack("<Q", 2**62) + bytes(3000)))],
    ),
    ("'k' is an array of arrays, expected numbers or strings", [_k(9, _array(9, 2**60))]),
    ("'k' has the value type 13, expected 0 to 12", [_k(13, b"")]),
    ("'k' has the value type 13, expected 0 to 12", [_k(9, _array(13, 2**60))]),
    ("'k' is a bool with the value 2", [_k(7, b"\2")]),
    ("the key of setting 0 is not UTF-8 at byte 1", [_text(b"k\xff")]),
    ("'k' is not UTF-8 at byte 0", [_k(8, _text(b"\xff"))]),
    ("holds the key 'k' twice", 2 * [_k(0, b"\1")]),
    ("general.alignment is 0, expected a power of two", [_alignment(4, "<I", 0)]),
    ("general.alignment is 24, expected a power of two", [_alignment(4, "<I", 24)]),
    ("general.alignment is True, expected a power of two", [_alignment(7, "<B", 1)]),
    ("split.count is 'x', expected a count", [_setting("split.count", 8, _text("x"))]),
    ("split.no is not given, expected a count", [_setting("split.count", 0, b"\2")]),
]

#: Sentences about tensors, and how many bytes lie behind their header.
_TENSORS: list[tuple[str, list[bytes], int]] = [
    (f"name of tensor 0 has {2**60} bytes, more than the 256", [struct.pack("<Q", 2**60)], 0),
    ("the name of tensor 0 is not UTF-8 at byte 0", [_text(b"\xff")], 0),
    ("holds the tensor 't' twice", 2 * [_tensor()], 0),
    ("expected at most 16", [_text("t") + struct.pack("<I", 2**31)], 0),
    ("more than a 64-bit count of bytes", [_tensor(shape=(2**40, 2**40))], 0),
    ("more than a 64-bit count of bytes", [_tensor(shape=(2**63, 0))], 0),
    (f"has 72 bytes and its header promises {2**52 + 64}", [_tensor(shape=(2**50,))], 8),
    (f"has 72 bytes and its header promises {2**40 + 72}", [_tensor(offset=2**40)], 8),
    (f"its header promises {2**40 + 64}", [_tensor(shape=(0,), offset=2**40)], 8),
    ("'t' has the offset 8, expected a multiple of 32", [_tensor(offset=8)], 64),
    (
        "'t' has the offset 32, where tensor 'a' goes on to 36",
        [_tensor("a", (9,)), _tensor(offset=32)],
        64,
    ),
    ("has the offset 0, where tensor 'a' goes on to 8", [_tensor("a"), _tensor()], 64),
    ("rows of Q8_0 are blocks of 32", [_tensor(shape=(32, 31), kind=8)], 2000),
    ("rows of Q8_0 are blocks of 32", [_tensor(shape=(), kind=8)], 64),
    ("there is no tensor 't'", [_tensor("u")], 8),
]


@pytest.mark.parametrize(
    ("sentence", "fields"),
    [
        *_HEADERS,
        *((sentence, {"settings": settings}) for sentence, settings in _SETTINGS),
        *((sentence, {"tensors": of, "num_data": size}) for sentence, of, size in _TENSORS),
    ],
)
def test_a_malformed_header_is_refused_in_a_sentence(sentence, fields, tmp_path):
    message = why(_raw(tmp_path, **fields))
    assert sentence in message
    assert message.startswith((f"{tmp_path.name}: ", "m.gguf: "))


def test_a_truncated_file_is_refused_with_its_length(tmp_path):
    path = _write(tmp_path / "m.gguf", {"t": np.ones(8, np.float32)}, settings=_vocabulary)
    raw = path.read_bytes()
    for size in (*range(0, 400, 7), len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        assert why(path).startswith(f"m.gguf: truncated, has {size} bytes")


def test_unknown_types_and_tensors_without_elements_hide_no_others(tmp_path):
    path = _raw(tmp_path, [_tensor("new", kind=99, offset=32), _tensor()], num_data=64)
    assert open_checkpoint(path).read("t").tolist() == [0.0, 0.0]
    assert why(path, "new") == ("m.gguf: tensor 'new' has the type 99, which is not known.")
    for kind in (0, 8, 30):
        tensors = [_tensor(), _tensor("f", (3, 0), kind), _tensor("e", (0, 32), kind)]
        store = open_checkpoint(_raw(tmp_path, tensors, num_data=32))
        assert (store.read("e").shape, store.read("f").shape) == ((0, 32), (3, 0))


# ------------------------------------------------------------------------------------------ routers
_STEP = Path(__file__).parents[3] / "sample_ckpts/olmoe-balanced/step_1500"

#: Names in GGUF files of what a router needs.
_NAMES = {"mlp.gate.weight": "ffn_gate_inp", "post_attention_layernorm.weight": "ffn_norm"}


def test_routers_in_gguf_are_those_in_safetensors(tmp_path):
    tensors = load_file(_STEP / "model.safetensors")
    config = json.loads((_STEP / "config.json").read_text())
    layers, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    keys = moe_keys(config["num_experts"], config["hidden_size"], layers, eps)
    keys["expert_used_count"] = config["num_experts_per_tok"]
    of_routers = {
        f"blk.{layer}.{name}.weight": tensors[f"model.layers.{layer}.{tail}"].float().numpy()
        for layer in range(layers)
        for tail, name in _NAMES.items()
    }
    write_gguf(tmp_path / "model.gguf", "olmoe", of_routers, keys=keys)
    mine, theirs = (load_routers(open_checkpoint(folder)) for folder in (tmp_path, _STEP))
    for one, other in zip(mine.routers, theirs.routers, strict=True):
        assert (one.name, one.rule) == (other.name, other.rule)
        np.testing.assert_array_equal(one.weight, other.weight, strict=True)
        np.testing.assert_array_equal(one.gain, other.gain, strict=True)


def test_a_block_quantised_router_is_decoded(tmp_path):
    weight = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    kind, gate = gguf.GGMLQuantizationType.Q8_0, "blk.0.ffn_gate_inp.weight"
    packed = gguf.quants.quantize(weight, kind)
    tensors = {gate: packed, "blk.0.ffn_norm.weight": np.ones(64, np.float32)}
    write_gguf(tmp_path / "model.gguf", "olmoe", tensors, {gate: kind}, keys=moe_keys(8, 64))
    (router,) = load_routers(open_checkpoint(tmp_path)).routers
    assert router.provenance.stored_dtype == "Q8_0"
    np.testing.assert_array_equal(router.weight, gguf.quants.dequantize(packed, kind))
