"""Headers by hand; oracle: the safetensors library writes, torch says what the numbers are."""

from __future__ import annotations

import json
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.torch import save_file

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from tests.unit.checkpoint.conftest import why

_FILE = "model.safetensors"


_BAD_ENTRIES = {
    "begin after end": ({"data_offsets": [8, 0]}, "has data_offsets [8, 0], expected [begin, end]"),
    "size is not shape": ({"shape": [3]}, "has 8 bytes; shape (3,) of F32 takes 12"),
    "negative": ({"shape": [-2]}, "has shape [-2], expected at most 16 non-negative"),
    "a bool": ({"shape": [True]}, "has shape [True], expected at most 16 non-negative"),
    "a float": ({"shape": [2.0]}, "has shape [2.0], expected at most 16 non-negative"),
    "a string": ({"shape": "2"}, "has shape '2', expected at most 16 non-negative"),
    "17 dimensions": ({"shape": [1] * 17}, "expected at most 16 non-negative"),
    "product overflows": ({"shape": [2**40, 2**40]}, "has 8 bytes; shape (1099511627776, 10995"),
    "65 bits": ({"shape": [2**65]}, "expected at most 16 non-negative 64-bit integers"),
    "one offset": ({"data_offsets": [0]}, "has data_offsets [0], expected [begin, end]"),
    "no dtype": ({"dtype": None}, "has dtype None, expected a name"),
    "unknown dtype": ({"dtype": "F3"}, "has dtype 'F3', which cannot be read"),
    "packed": ({"dtype": "F4", "shape": [16]}, "has dtype 'F4', which cannot be read"),
}


@pytest.mark.parametrize("case", _BAD_ENTRIES)
def test_a_contradictory_entry_is_refused_by_name(case, write_raw, entry):
    changes, sentence = _BAD_ENTRIES[case]
    text = why(write_raw({"t": entry(**changes)}, num_data=8))
    assert text.startswith(f"{_FILE}: tensor 't' ")
    assert sentence in text


_BAD_HEADERS = {
    "not JSON": (b"{oops", "the header: is not JSON"),
    "not an object": (b"[1]", "the header: holds a list, expected an object"),
    "NaN": (b'{"t": NaN}', "the header: holds the token NaN, which is not JSON"),
    "deep": (b'{"t":' + b"[" * 100_000, "the header: is nested too deeply"),
    "not UTF-8": (b'{"\xff": 1}', "the header: is not UTF-8 at byte 2"),
    "huge integer": (b'{"t": ' + b"9" * 5000 + b"}", "the header: holds an integer of 5000 digits"),
    "large integer": (b'{"t": ' + b"9" * 41 + b"}", "the header: holds an integer of 41 digits"),
    "UTF-16": ('{"t": 1}'.encode("utf-16"), "the header: is not UTF-8"),
    "entry is a number": (b'{"t": 1}', "tensor 't' is described by a int, not an object"),
}


@pytest.mark.parametrize("case", _BAD_HEADERS)
def test_a_malformed_header_is_refused_in_a_sentence(case, write_raw):
    raw, sentence = _BAD_HEADERS[case]
    text = why(write_raw(raw))
    assert text.startswith(f"{_FILE}: {sentence}")


_PLAIN = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
_DUPLICATES = {
    "tensor": ("t", f'{{"t":{_PLAIN},"t":{_PLAIN}}}'),
    "tensor after a number": ("t", f'{{"t":5,"t":{_PLAIN}}}'),
    "tensor, spelled with an escape": ("t", f'{{"\\u0074":{_PLAIN},"t":{_PLAIN}}}'),
    "dtype": ("dtype", '{"t":{"dtype":"F16","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "shape": ("shape", '{"t":{"dtype":"F32","shape":[1],"shape":[2],"data_offsets":[0,8]}}'),
    "metadata": ("__metadata__", f'{{"__metadata__":{{}},"__metadata__":{{}},"t":{_PLAIN}}}'),
    "behind metadata of numbers": (
        "t", f'{{"__metadata__":{{"a":1,"b":2}},"t":5,"t":{_PLAIN}}}'
    ),
    "behind a string as metadata": ("t", f'{{"__metadata__":"ab","t":"","t":{_PLAIN}}}'),
    "behind an entry without keys": ("t", f'{{"u":{{}},"t":{_PLAIN},"t":{_PLAIN}}}'),
}  # fmt: skip


@pytest.mark.parametrize("case", _DUPLICATES)
def test_no_key_may_stand_twice(case, write_raw):
    key, raw = _DUPLICATES[case]
    assert f"the header: holds the key '{key}' twice." in why(write_raw(raw.encode(), num_data=8))


@pytest.mark.parametrize(
    "name", ["a\\b", 'a"b', "data_offsets", "dtype", "{t}", "t\n", "𝛼", "[", "\ud800"]
)
def test_a_name_that_confuses_the_count_of_quotes_is_read_all_the_same(name, write_raw, entry):
    header = {
        "__metadata__": {"dtype": 'a "quoted" word'},
        name: entry(),
        "u": entry(data_offsets=[8, 16]),
    }
    store = open_checkpoint(write_raw(header, num_data=16))
    assert list(store.names()) == [name, "u"]
    assert store.info(name).size_bytes == 8


def test_later_dtypes_and_tensors_side_by_side_hide_no_others(write_raw, entry):
    header = {"new": entry(dtype="F2", data_offsets=[8, 16]), "t": entry(stride=[1])}
    assert open_checkpoint(write_raw(header, num_data=16)).read("t").shape == (2,)
    spans = {"b": [8, 16], "in b": [12, 12], "a": [0, 8], "first": [0, 0], "last": [16, 16]}
    header = {n: entry(data_offsets=at, shape=[(at[1] - at[0]) // 4]) for n, at in spans.items()}
    store = open_checkpoint(write_raw(header, num_data=16))
    assert {name: store.read(name).size for name in store.names()} == {
        "b": 2, "in b": 0, "a": 2, "first": 0, "last": 0
    }  # fmt: skip


_OVERLAPS = {
    "the same bytes": ([0, 8], [0, 8], [0, 8]),
    "half of each": ([0, 8], [4, 12], [4, 8]),
    "one in the other": ([0, 12], [4, 8], [4, 8]),
    "all of a wide one": ([4, 8], [0, 12], [4, 8]),
}


@pytest.mark.parametrize("case", _OVERLAPS)
@pytest.mark.parametrize("beside", [{}, {"turned": [16, 0]}, {"empty": [6, 6]}])
def test_two_tensors_in_the_same_bytes_are_refused_by_name_and_range(
    case, beside, write_raw, entry
):
    a, b, shared = _OVERLAPS[case]
    named = {"a": a, "b": b, "last": [12, 16], **beside}
    header = {n: entry(data_offsets=at, shape=[(at[1] - at[0]) // 4]) for n, at in named.items()}
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write_raw(header, num_data=16)).names()
    first, second = sorted(("a", "b"), key=lambda name: named[name])
    assert str(caught.value).startswith(
        f"{_FILE}: behind the header: the tensors {first!r} and {second!r} both claim the bytes "
        f"{shared[0]} to {shared[1]}."
    )


def test_impossible_shapes_and_files_of_another_length_are_refused(write_raw, entry):
    path = write_raw({"t": entry(shape=[2**62, 2**62, 0], data_offsets=[0, 0])}, num_data=0)
    assert why(path) == (
        f"{_FILE}: tensor 't' has shape ({2**62}, {2**62}, 0), which is more than memory can "
        "address."
    )
    path = write_raw({"t": entry(), "later": entry(data_offsets=[8, 16])}, num_data=16)
    raw = path.read_bytes()
    for size in (0, 7, 8, 20, len(raw) - 4):
        path.write_bytes(raw[:size])
        assert why(path).startswith(f"{_FILE}: truncated, has {size} bytes")
    assert why(path).endswith(f" and its header promises {len(raw)}.")
    path = write_raw({"t": entry()}, num_data=9)
    with pytest.raises(SafetensorError, match="file not fully covered"):
        load_file(path)
    size = path.stat().st_size
    assert why(path) == (
        f"{_FILE}: has {size} bytes, and its last tensor ends at {size - 1}: the header may be that "
        "of another file."
    )


def test_a_header_beyond_the_limits_is_refused_before_it_is_read_or_parsed(write_raw, monkeypatch):
    sentence = f"{_FILE}: the header claims 40000001 bytes, more than the 40000000 allowed."
    assert why(write_raw(b"{}", length=limits.HEADER_BYTES + 1)) == sentence
    monkeypatch.setattr(limits, "JSON_MEMORY", 10_000)
    raw = json.dumps({"t": [[]] * 100}).encode()
    monkeypatch.setattr(json, "loads", None)
    assert why(write_raw(raw)) == (
        f"{_FILE}: the header: has 407 bytes that describe up to 17489 bytes of objects, more than "
        "the 10000 allowed."
    )


def test_a_header_of_more_tensors_or_characters_than_the_limit_is_refused(
    write_raw, entry, monkeypatch
):
    sentence = f"{_FILE}: the header has a name of 1025 characters, more than the 1024 allowed."
    assert why(write_raw({"n" * 1025: entry()}, num_data=8)) == sentence
    assert open_checkpoint(write_raw({"n" * 1024: entry()}, num_data=8)).read("n" * 1024).size == 2
    monkeypatch.setattr(limits, "TENSORS", 2)
    sentence = f"{_FILE}: the header describes 3 tensors, more than the 2 allowed."
    assert why(write_raw({name: entry() for name in "abc"}, num_data=8)) == sentence


# -------------------------------------------------------------------------------------- round trips
_EVERY_16_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
_EVERY_8_BITS = torch.arange(256, dtype=torch.int32).to(torch.uint8)

_TENSORS = {
    "BF16": _EVERY_16_BITS.view(torch.bfloat16),
    "F16": _EVERY_16_BITS.view(torch.float16),
    "F8_E4M3": _EVERY_8_BITS.view(torch.float8_e4m3fn),
    "F8_E5M2": _EVERY_8_BITS.view(torch.float8_e5m2),
    "F32": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "F64": torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
}


def test_every_float_and_shape_is_what_torch_reads_and_metadata_is_no_tensor(tmp_path):
    own = {dtype: tensor.clone() for dtype, tensor in _TENSORS.items()}
    save_file(own, tmp_path / "model.safetensors", {"format": "pt", "F32": "u"})
    store = open_checkpoint(tmp_path)
    assert set(store.names()) == _TENSORS.keys()
    for dtype, tensor in _TENSORS.items():
        assert store.info(dtype).dtype == dtype
        wide = tensor.to(torch.float64 if dtype == "F64" else torch.float32)
        np.testing.assert_array_equal(upcast(store.read(dtype)), wide.numpy(), dtype, strict=True)
    shapes = {str(shape): shape for shape in ((), (0,), (0, 3), (1,), (2, 3, 4))}
    tensors = {n: torch.arange(int(np.prod(s))).reshape(s) for n, s in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    store = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        assert store.info(name).shape == shapes[name]
        np.testing.assert_array_equal(store.read(name), tensor.numpy(), strict=True)


def test_a_signalling_nan_warns_nobody_and_every_other_bit_stays():
    stored = {
        np.uint16: (np.float16, [0x7D01, 0xFC00, 0x8000, 0x0001]),
        np.int16: (ml_dtypes.bfloat16, [0x7F81, -0x80, -0x8000, 0x0001]),
        np.uint32: (np.float32, [0x7F800001, 0xFF800000, 0x80000000, 0x00000001]),
        np.uint64: (np.float64, [0x7FF0000000000001, 0xFFF << 52, 1 << 63, 1]),
    }
    for bits, (dtype, values) in stored.items():
        found = upcast(np.array(values, bits).view(dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.isnan(np.linalg.norm(found)), dtype
        assert (found[1], np.signbit(found[2]), found[2]) == (-np.inf, True, 0.0)
        assert found[3] > 0.0
