"""Safetensors: headers, tensors in slices over several files, shards, and how a checkpoint of any
format is opened.
"""

import json
import os
import random
import shutil
import warnings
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as torch_save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from moegeom.checkpoint import ranks, reading
from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.open import FORMATS, open_checkpoint
from moegeom.checkpoint.ranks import Piece, SlicedTensor, join_pieces
from moegeom.checkpoint.store import TensorInfo
from moegeom.core import limits
from moegeom.core.errors import CheckpointError, UsageError
from tests.by_day import by_day
from tests.fuzz.worker import odd_files
from tests.unit.checkpoint.conftest import refusal, why
from tests.unit.checkpoint.save_two_ranks import weights

# ------------------------------------------------------------------------------------------ headers
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


@pytest.mark.parametrize(("changes", "sentence"), _BAD_ENTRIES.values(), ids=_BAD_ENTRIES)
def test_a_contradictory_entry_is_refused_by_name(changes, sentence, write_raw, entry):
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


@pytest.mark.parametrize(("raw", "sentence"), _BAD_HEADERS.values(), ids=_BAD_HEADERS)
def test_a_malformed_header_is_refused_in_a_sentence(raw, sentence, write_raw):
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


@pytest.mark.parametrize(("key", "raw"), _DUPLICATES.values(), ids=_DUPLICATES)
def test_no_key_may_stand_twice(key, raw, write_raw):
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


@pytest.mark.parametrize(("a", "b", "shared"), _OVERLAPS.values(), ids=_OVERLAPS)
@pytest.mark.parametrize("beside", [{}, {"turned": [16, 0]}, {"empty": [6, 6]}])
def test_tensors_in_the_same_bytes_are_refused_by_name_and_range(
    a, b, shared, beside, write_raw, entry
):
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


def test_a_header_of_too_many_tensors_or_characters_is_refused(write_raw, entry, monkeypatch):
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
    torch_save_file(own, tmp_path / "model.safetensors", {"format": "pt", "F32": "u"})
    store = open_checkpoint(tmp_path)
    assert set(store.names()) == _TENSORS.keys()
    for dtype, tensor in _TENSORS.items():
        assert store.info(dtype).dtype == dtype
        wide = tensor.to(torch.float64 if dtype == "F64" else torch.float32)
        np.testing.assert_array_equal(upcast(store.read(dtype)), wide.numpy(), dtype, strict=True)
    shapes = {str(shape): shape for shape in ((), (0,), (0, 3), (1,), (2, 3, 4))}
    tensors = {n: torch.arange(int(np.prod(s))).reshape(s) for n, s in shapes.items()}
    torch_save_file(tensors, tmp_path / "model.safetensors")
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


# ------------------------------------------------------------------------------------------- slices
_KEY = "DCP_SHARDING_INFO"


def _part(
    folder: Path, rank: int, rows: tuple[int, int], offsets: Any = None, of: int = 64
) -> None:
    """A file as a rank writes it: these rows of a router of ``of`` experts."""
    router = np.arange(of * 4, dtype=np.float32).reshape(of, 4)[slice(*rows)]
    info = {"gate": {"saved_offsets": [rows[0], 0] if offsets is None else offsets}}
    name = f"shard-0000{rank}-model-00001-of-00001.safetensors"
    save_file({"gate": router}, folder / name, {_KEY: json.dumps(info)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("folder", ["slices", "whole"])
def test_what_two_ranks_saved_is_read_as_torch_reads_it(folder, of_two_ranks):
    store = open_checkpoint(of_two_ranks / folder)
    expected = {name: torch.empty_like(value) for name, value in weights().items()}
    load(
        expected, storage_reader=HuggingFaceStorageReader(str(of_two_ranks / folder)), no_dist=True
    )
    assert set(store.names()) == set(expected)
    for name, value in expected.items():
        assert torch.equal(value, weights()[name])
        wide = value if value.dtype != torch.bfloat16 else value.float()
        found = store.read(name)
        found = upcast(found) if value.dtype == torch.bfloat16 else found
        np.testing.assert_array_equal(found, wide.numpy(), strict=True)
        raw = store.read(name).tobytes()
        assert store.info(name).size_bytes == len(raw)
        assert store.info(name).shape == tuple(value.shape)
        assert store.read_bytes(name, 3, 90) == raw[3:93]


def test_only_slices_asked_for_are_read_and_one_file_is_not_the_checkpoint(of_two_ranks):
    store: Any = open_checkpoint(of_two_ranks / "slices")
    opened = store.bytes_read
    store.read("gate.weight")
    assert store.bytes_read - opened == 12 * 64 * 2
    assert store.bytes_total == sum(f.stat().st_size for f in (of_two_ranks / "slices").iterdir())
    assert why(of_two_ranks / "slices", "z") == "slices: there is no tensor 'z'."
    file = "shard-00001-model-00001-of-00001.safetensors"
    sentence = f"{file}: holds row slices of tensors; 1 more file lies beside it."
    assert why(of_two_ranks / "slices" / file, "gate") == sentence


def test_a_missing_first_slice_is_noticed(of_two_ranks, tmp_path):
    second = "shard-00002-model-00001-of-00001.safetensors"
    shutil.copy(of_two_ranks / "slices" / second, tmp_path)
    for path in (tmp_path, tmp_path / second):
        assert "rows 0..6 of 12 are missing" in why(path, "gate.weight")


@pytest.mark.parametrize("rank", [1, 2])
def test_an_index_does_not_make_a_slice_a_tensor(rank, of_two_ranks, tmp_path):
    file = f"shard-0000{rank}-model-00001-of-00001.safetensors"
    shutil.copy(of_two_ranks / "slices" / file, tmp_path)
    index = {"weight_map": {"gate.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "an index refers to it as if they were whole" in why(tmp_path, "gate.weight")


def test_offsets_that_are_no_counts_of_the_axes_are_refused(tmp_path):
    for offsets in ("x", {"a": None}, [0.5, 0], [True, 0], [-1, 0], [2**63, 0], [0] * 17):
        _part(tmp_path, 1, (0, 64), offsets)
        expected = "has no 'saved_offsets' of integers for tensor 'gate'"
        assert expected in why(tmp_path, "gate"), offsets
    _part(tmp_path, 1, (0, 64), [0])
    assert "has the saved_offsets [0] and shape (64, 4)" in why(tmp_path, "gate")


def test_malformed_sharding_info_is_refused(write_raw, entry):
    for text in ('"[]"', '"{"', "null", "3", '"{\\"a\\": 1, \\"a\\": 1}"'):
        header = f'{{"__metadata__": {{"{_KEY}": {text}}}, "t": {json.dumps(entry())}}}'
        path = write_raw(header.encode(), num_data=8)
        assert why(path).startswith("model.safetensors: DCP_SHARDING_INFO"), text


def test_mutated_sharding_info_ends_in_the_whole_tensor_or_in_an_error(tmp_path):
    draw = random.Random(5)
    good = '{"gate": {"saved_offsets": [8, 0]}}'
    whole = np.arange(64, dtype=np.float32).reshape(16, 4)
    answers = []
    for _ in range(300):
        at = draw.randrange(len(good))
        word = draw.choice(["", "9" * 30, "[", "{", '"', "-", "0", "1e9", "null", ",0", "\\ud800"])
        text = good[:at] + word + good[at + draw.randrange(3) :]
        for rows, info in (((0, 8), '{"gate": {"saved_offsets": [0, 0]}}'), ((8, 16), text)):
            save_file(
                {"gate": whole[slice(*rows)]}, tmp_path / f"{rows[0]}.safetensors", {_KEY: info}
            )
        try:
            np.testing.assert_array_equal(open_checkpoint(tmp_path).read("gate"), whole)
            answers.append(True)
        except CheckpointError:
            answers.append(False)
    assert {True, False} == set(answers)


# ----------------------------------------------------------------------------- pieces of any tensor
@dataclass(frozen=True)
class _Array:
    """A piece in memory that writes down which bytes were asked for."""

    values: np.ndarray
    asked: list[tuple[int, int]]

    def read(self) -> np.ndarray:
        return self.values

    def read_bytes(self, start: int, size: int) -> bytes:
        self.asked.append((start, size))
        return self.values.tobytes()[start : start + size]


def _piece(whole: np.ndarray, begins: Any, ends: Any, at: int, asked: Any = None) -> Piece:
    box = tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))
    values = np.array(whole[box], order="C")
    info = TensorInfo("t", "I32", values.shape, f"rank {at}", 0, values.nbytes)
    return Piece(tuple(begins), info, _Array(values, [] if asked is None else asked))


def _cut(whole: np.ndarray, *boxes: tuple[Any, Any], asked: Any = None) -> list[Piece]:
    return [_piece(whole, *box, at, asked) for at, box in enumerate(boxes)]


def _join(whole: np.ndarray, pieces: list[Piece]) -> SlicedTensor:
    return join_pieces("folder", "t", "I32", whole.shape, pieces)


def _refusal(whole: np.ndarray, pieces: list[Piece]) -> str:
    with pytest.raises(CheckpointError) as caught:
        _join(whole, pieces)
    return caught.value.message


def _numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)


def _random_tiling(shape: tuple[int, ...], draw: np.random.Generator) -> list[tuple[Any, Any]]:
    """Boxes by cutting boxes at random, not only along a grid."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(int(draw.integers(6)) if shape else 0):
        begins, ends = boxes.pop(int(draw.integers(len(boxes))))
        axis = int(draw.integers(len(shape)))
        at = int(draw.integers(begins[axis], ends[axis] + 1))
        middle_end = (*ends[:axis], at, *ends[axis + 1 :])
        middle_begin = (*begins[:axis], at, *begins[axis + 1 :])
        boxes += [(begins, middle_end), (middle_begin, ends)]
    draw.shuffle(boxes)
    return boxes


@pytest.mark.parametrize("seed", by_day(range(60), range(0, 60, 3)))
def test_any_tiling_is_put_together_and_every_byte_range_is_that_of_the_whole(seed):
    draw = np.random.default_rng(seed)
    shape = tuple(int(n) for n in draw.integers(1, 7, size=draw.integers(0, 4)))
    whole = _numbers(*shape)
    tensor = _join(whole, _cut(whole, *_random_tiling(shape, draw)))
    np.testing.assert_array_equal(tensor.read(), whole, strict=True)
    assert tensor.info.shape == shape
    assert tensor.info.size_bytes == whole.nbytes
    raw = whole.tobytes()
    for _ in range(20):
        start = int(draw.integers(len(raw) + 3))
        size = int(draw.integers(len(raw) + 3))
        assert tensor.read_bytes(start, size) == raw[start : start + size]


def test_a_missing_box_is_noticed_and_borders_of_too_many_cells_are_refused(monkeypatch):
    for seed in range(60):
        draw = np.random.default_rng(seed)
        whole = _numbers(4, 6, 2)
        pieces = [p for p in _cut(whole, *_random_tiling((4, 6, 2), draw)) if np.prod(p.sizes)]
        gone = int(draw.integers(len(pieces)))
        assert "is not whole" in _refusal(whole, [p for i, p in enumerate(pieces) if i != gone])
    monkeypatch.setattr(ranks, "SLICE_CELLS", 10)
    whole = _numbers(4, 4)
    boxes = [((i, i), (i + 1, i + 1)) for i in range(4)]
    assert "draw 16 cells, more than the 10 allowed" in _refusal(whole, _cut(whole, *boxes))


def test_only_the_bytes_in_between_are_read_and_empty_pieces_are_whole():
    asked: list[tuple[int, int]] = []
    whole = _numbers(8, 4)
    rows = _cut(whole, ((0, 0), (4, 4)), ((4, 0), (8, 4)), asked=asked)
    assert _join(whole, rows).read_bytes(3 * 16, 32) == whole[3:5].tobytes()
    assert asked == [(48, 16), (0, 16)]
    asked.clear()
    columns = _cut(whole, ((0, 0), (8, 1)), ((0, 1), (8, 4)), asked=asked)
    assert _join(whole, columns).read_bytes(2 * 16, 16) == whole[2].tobytes()
    assert asked == [(8, 4), (24, 12)]
    whole = _numbers(0, 3)
    assert _join(whole, []).read().shape == (0, 3)
    one = _numbers(1, 5)
    tensor = _join(one, _cut(one, ((0, 0), (1, 5)), ((1, 0), (1, 5))))
    np.testing.assert_array_equal(tensor.read(), one)
    assert tensor.info.file == "rank 0"


def test_missing_rows_columns_and_overlaps_are_named():
    whole = _numbers(64, 3)
    pieces = _cut(whole, ((0, 0), (8, 3)), ((16, 0), (64, 3)))
    assert "tensor 't' is not whole: rows 8..16 of 64 are missing." in _refusal(whole, pieces)
    assert "rows 0..64 of 64 are missing" in _refusal(whole, [])
    vector = _numbers(10)
    assert "rows 7..10 of 10 are missing" in _refusal(vector, _cut(vector, ((0,), (7,))))
    whole = _numbers(4, 6)
    pieces = _cut(whole, ((0, 0), (4, 2)), ((0, 5), (4, 6)))
    assert "elements [0..4, 2..5] of shape (4, 6) are missing" in _refusal(whole, pieces)
    whole = _numbers(8, 3)
    pieces = _cut(whole, ((0, 0), (5, 3)), ((4, 0), (8, 3)))
    assert _refusal(whole, pieces) == (
        "folder: tensor 't' has overlapping pieces: others reach into rows 4..8 of 8 of rank 1."
    )


def test_pieces_outside_of_another_dtype_or_of_shared_bytes_are_refused():
    whole = _numbers(8, 3)
    larger = _cut(whole, ((0, 0), (8, 3)))
    assert "offsets (0, 0) and sizes (8, 3), which lie outside" in _refusal(whole[:4], larger)
    other = [Piece((0,), larger[0].info, larger[0].source)]
    assert "which lie outside" in _refusal(whole, other)
    whole = _numbers(8)
    good = _cut(whole, ((0,), (8,)))[0]
    info = TensorInfo("t", "F32", (8,), "rank 0", 0, 32)
    with pytest.raises(CheckpointError, match="is I32, and its piece at .* is F32"):
        _join(whole, [Piece(good.offsets, info, good.source)])
    whole = _numbers(2**10)
    info = TensorInfo("t", "I32", (1,), "one file", 0, 4)
    pieces = [Piece((i,), info, _Array(whole[:1], [])) for i in range(2**10)]
    assert "has two pieces in the same bytes of one file" in _refusal(whole, pieces)


def test_formats_are_listed_and_a_folder_with_one_file_is_a_checkpoint(tmp_path):
    assert FORMATS.names() == ["dcp", "gguf", "pytorch", "safetensors"]
    for name in ("weights.safetensors", "model.safetensors"):
        save_file({"a": np.ones(1)}, tmp_path / name)
        assert open_checkpoint(tmp_path).info("a").file == name
        assert open_checkpoint(str(tmp_path / name)).label == tmp_path.name


#: Files of formats that are not read, what they are called, and a word of what to do.
OTHERS = {
    "weights.npz": ("NumPy arrays", "Convert"),
    "model.h5": ("HDF5", "Convert"),
    "flax_model.msgpack": ("Flax", "Convert"),
    "model.nemo": ("an archive of NeMo", "tar -xf"),
    "model.onnx": ("a graph of ONNX", "made from"),
    "openvino_model.xml": ("a graph of OpenVINO", "made from"),
    "openvino_model.bin": ("a graph of OpenVINO", "made from"),
    "params_shard_0.bin": ("weights of MLC in the order of its kernels", "made from"),
    "manifest.ocdbt": ("a checkpoint of Orbax", "Export"),
}


@pytest.mark.parametrize("file", OTHERS)
def test_another_format_is_called_by_its_name(file, tmp_path):
    kind, word = OTHERS[file]
    (tmp_path / file).touch()
    (tmp_path / "config.json").write_text("{}")
    expected = f"holds {kind} ({file}); only dcp, gguf, pytorch, safetensors are read for now."
    assert why(tmp_path) == f"{tmp_path.name}: {expected}"
    assert why(tmp_path / file) == f"{file}: {expected}"
    assert word in refusal(tmp_path).hint
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).info("a").file == "model.safetensors"


def test_parts_of_deepspeed_name_the_script_that_joins_them(tmp_path):
    for rank in range(2):
        for kind in ("model", "optim"):
            (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt").touch()
    assert "holds files of DeepSpeed ZeRO-3" in why(tmp_path)
    assert "zero_to_fp32.py" in refusal(tmp_path).hint


def test_what_is_not_there_is_refused_with_a_hint(tmp_path):
    assert why(tmp_path) == (
        f"{tmp_path.name}: no file in it; expected a checkpoint of dcp, gguf, pytorch, safetensors."
    )
    error = refusal("allenai/OLMoE-1B-7B")
    assert error.message == "allenai/OLMoE-1B-7B: there is no such file or folder."
    assert "downloaded first" in error.hint
    for name in ("allenai/OLMoE-1B-7B", "huggingface.co/allenai/OLMoE-1B-7B"):
        assert refusal(name).hint.endswith("pass hf://allenai/OLMoE-1B-7B.")
    assert refusal("a/b/c").hint.endswith("pass hf://OWNER/NAME.")
    assert why("a\0b") == "a\0b: there is no such file or folder."
    with pytest.raises(UsageError, match="The path of the checkpoint is empty"):
        open_checkpoint("")


def test_a_file_that_shrinks_while_it_is_read_or_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(4)}, path)
    store = open_checkpoint(tmp_path)
    size = path.stat().st_size
    os.truncate(path, size - 8)
    with pytest.raises(CheckpointError, match="truncated, bytes .* were expected"):
        store.read("a")
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")

    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reading.os, "open", refuse)  # chmod does not stop root
    assert why(tmp_path) == "model.safetensors: cannot be read (Permission denied)."


def test_a_config_may_be_missing_or_hold_infinity_and_large_integers_but_no_more(tmp_path):
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config == {}
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert open_checkpoint(tmp_path).config == {"time_step_limit": [0.0, float("inf")]}
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    for text in ("[]", "{", '{"a": 1, "a": 2}', "\xff"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"^config\.json: "):
            assert open_checkpoint(tmp_path).config
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    known = {"model_max_length": 10**30, "text": "9" * 5000, "fraction": float("0." + "1" * 60)}
    (tmp_path / "config.json").write_text(json.dumps(known))
    assert open_checkpoint(tmp_path).config == known
    for digits in (41, 4000, 5000):
        (tmp_path / "config.json").write_text('{"num_experts": ' + "9" * digits + "}")
        with pytest.raises(CheckpointError, match=f"holds an integer of {digits} digits"):
            assert open_checkpoint(tmp_path).config


@pytest.mark.parametrize("what", ["folder", "pipe", "loop", "dangling", "device"])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "a.gguf", "a.bin"]
)
def test_what_is_no_file_is_refused_or_not_there_and_never_waited_for(what, name, tmp_path):
    if name in ("config.json", "model.safetensors.index.json"):
        save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    odd_files()[what](tmp_path / name)
    if name == "config.json" and what in ("loop", "dangling"):
        assert open_checkpoint(tmp_path).config == {}
        return
    with pytest.raises(CheckpointError) as caught:
        assert open_checkpoint(tmp_path).config is None
    assert caught.value.message.startswith(f"{name}: cannot be read")
    if what in ("folder", "pipe") and name == "model.safetensors":
        assert caught.value.message.endswith(" (not a regular file).")


def _saves(folder: Path, *names: str, mark: str = ".metadata") -> Path:
    for name in names:
        (folder / name / mark).parent.mkdir(parents=True)
        (folder / name / mark).touch()
    return folder


def test_a_folder_of_a_trainer_names_its_newest_save(tmp_path):
    _saves(tmp_path, "iter_0000010", "iter_0000020", "iter_0000030", "global_step7", "release")
    megatron = "latest_checkpointed_iteration.txt"
    for pointer, text, newest in (
        (megatron, "20\n", "iter_0000020"),
        (megatron, "release", "release"),
        ("latest", "global_step7", "global_step7"),
    ):
        (tmp_path / pointer).write_text(text)
        hint = f"Pass the folder {newest!r} in it, which is the newest save."
        assert refusal(tmp_path).hint == hint
        (tmp_path / pointer).unlink()


def test_a_pointer_to_nowhere_is_ignored(tmp_path):
    _saves(tmp_path, "iter_0000010")
    (tmp_path / "latest").mkdir()
    for text in ("99", "../x", "\xff", "1" * 300, ""):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text, "latin-1")
        sentence = "Pass the folder 'iter_0000010' in it, which holds a checkpoint."
        assert refusal(tmp_path).hint == sentence


def test_of_many_saves_the_last_in_natural_order_is_the_example(tmp_path):
    (tmp_path / "logs").mkdir()
    assert "Pass the folder with config.json" in refusal(tmp_path).hint  # no save at all
    _saves(tmp_path, "step9", "step10", mark="model_and_optim/.metadata")
    sentence = "Pass one of the 2 folders in it that hold a checkpoint, such as 'step10'."
    assert refusal(tmp_path).hint == sentence


def test_an_error_says_which_of_two_folders_of_one_name_it_is_about(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent / "model").mkdir(parents=True)
        with pytest.raises(CheckpointError) as refused:
            open_checkpoint(tmp_path / parent / "model")
        assert refused.value.__notes__ == [f"checkpoint: {tmp_path / parent / 'model'}"]


_INDEX = "model.safetensors.index.json"


def _sharded(folder: Path, weight_map: dict[str, Any] | None = None) -> Path:
    save_file({"a": np.arange(4.0), "b": np.ones(2)}, folder / "m-1.safetensors")
    save_file({"c": np.full((2, 2), 7, np.int32)}, folder / "m-2.safetensors")
    good = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    index = {"metadata": {}, "weight_map": good | (weight_map or {})}
    (folder / _INDEX).write_text(json.dumps(index))
    return folder


def test_shards_read_like_one_file_whose_bytes_are_counted(tmp_path):
    for path in (_sharded(tmp_path), tmp_path / _INDEX):
        store: Any = open_checkpoint(path)
        opened = store.bytes_read
        assert (store.label, set(store.names())) == (tmp_path.name, {"a", "b", "c"})
        assert opened == (tmp_path / _INDEX).stat().st_size
        np.testing.assert_array_equal(store.read("c"), np.full((2, 2), 7, np.int32))
        assert store.info("c").file == "m-2.safetensors"
        # only the header of the shard in use is read
        assert {r.file for r in store.log.ranges} == {_INDEX, "m-2.safetensors"}
        with (tmp_path / "m-2.safetensors").open("rb") as shard:
            header = 8 + int.from_bytes(shard.read(8), "little")
        assert store.bytes_read - opened == header + 16
        assert store.log.ranges[-1].size == 16
        assert store.bytes_total == sum(p.stat().st_size for p in tmp_path.iterdir())
        np.testing.assert_array_equal(store.read("a"), np.arange(4.0))
    (tmp_path / _INDEX).unlink()
    assert set(open_checkpoint(tmp_path).names()) == {"a", "b", "c"}


def test_all_there_is_is_read_and_a_truncated_shard_is_named(tmp_path):
    (_sharded(tmp_path) / "config.json").write_text('{"a": 1}')
    store = open_checkpoint(tmp_path)
    assert store.config == {"a": 1}
    assert [name for name, _ in store.read_many("abc")] == ["a", "b", "c"]
    assert store.bytes_read == store.bytes_total
    path = _sharded(tmp_path) / "m-2.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 3)
    sentence = f"m-2.safetensors: truncated, has {size - 3} bytes and its header promises {size}."
    assert why(tmp_path, "c") == sentence


def test_tensors_are_alike_where_open_headers_give_all_one_dtype_and_shape(tmp_path):
    made = {
        "model-00001-of-00002": {"a": np.zeros((2, 3), np.float32), "b": np.ones((2, 3), np.float32),
                                 "c": np.ones((3, 2), np.float32), "d": np.ones((2, 3), np.int32)},
        "model-00002-of-00002": {"e": np.ones((2, 3), np.float32), "f": np.ones(6, np.float32)},
    }  # fmt: skip
    for file, tensors in made.items():
        save_file(tensors, tmp_path / f"{file}.safetensors")
    shard_of = {name: f"{file}.safetensors" for file, tensors in made.items() for name in tensors}
    index = json.dumps({"weight_map": shard_of | {"gone": "model-00001-of-00002.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    store = open_checkpoint(tmp_path)
    assert not store.are_alike(["a", "b"])  # no header is open yet
    kinds = {}
    for name in "abcdef":
        info = store.info(name)
        kinds[name] = info.dtype, info.shape
    for names in (some for size in range(1, 5) for some in combinations("abcdef", size)):
        assert store.are_alike(names) == (len({kinds[name] for name in names}) == 1), names
    assert not store.are_alike(["a", "gone"])


def test_a_missing_shard_matters_only_to_who_needs_it(tmp_path):
    folder = _sharded(tmp_path)
    (folder / "m-2.safetensors").unlink()
    store = open_checkpoint(folder)
    assert store.read("a").tolist() == [0, 1, 2, 3]
    assert store.bytes_total == sum(p.stat().st_size for p in tmp_path.iterdir())
    for ask in (store.info, store.read, lambda name: store.read_bytes(name, 0, 1)):
        with pytest.raises(CheckpointError) as caught:
            ask("c")
        assert caught.value.message == (
            f"{_INDEX}: names 'm-2.safetensors', which does not exist (1 of 2 files is missing)."
        )
    (folder / "m-1.safetensors").unlink()
    assert why(folder).endswith("(2 of 2 files are missing).")  # at once


def test_an_index_of_too_many_files_tensors_or_characters_is_refused(tmp_path, monkeypatch):
    sentence = f"{_INDEX}: has a name of 1025 characters, more than the 1024 allowed."
    assert why(_sharded(tmp_path, {"n" * 1025: "m-1.safetensors"})) == sentence
    message = why(_sharded(tmp_path, {"d": "x" * 5012}))
    assert "of 5012 characters, more than the 1024 allowed." in message and len(message) < 300
    monkeypatch.setattr(limits, "TENSORS", 2)
    assert why(_sharded(tmp_path)) == (f"{_INDEX}: describes 3 tensors, more than the 2 allowed.")
    (tmp_path / _INDEX).unlink()
    sentence = "m-2.safetensors: with this file there are 3 tensors, more than the 2 allowed."
    assert why(tmp_path) == sentence
    monkeypatch.undo()
    monkeypatch.setattr(limits, "FILES", 1)
    assert why(_sharded(tmp_path)) == f"{_INDEX}: names 2 files, more than the 1 allowed."


def test_a_tensor_that_its_shard_lacks_or_no_file_holds_is_named(tmp_path):
    folder = _sharded(tmp_path, {"d": "m-2.safetensors"})
    sentence = "m-2.safetensors: tensor 'd' is missing; the index says that it is here."
    assert why(folder, "d") == sentence
    assert why(folder, "z") == f"{tmp_path.name}: there is no tensor 'z'."


def test_an_index_names_files_of_its_folder_and_maps_names_to_them(tmp_path):
    for file in ("../x", "/etc/passwd", "a/../../x", "..\\x", "C:x", "", ".", "a\0b", ".."):
        sentence = f"{_INDEX}: names the file {file!r}, which is outside the checkpoint's folder."
        assert why(_sharded(tmp_path, {"d": file})) == sentence
    twice = '{"weight_map": {"a": "m-1", "a": "m-2"}}'
    for sentence, texts in {
        "has no 'weight_map' from tensor to file.": ("{}", *map(_map_of, ("[]", "{}"))),
        "holds the key 'a' twice.": (twice,),
        "'weight_map' holds a value that is no file name.": (
            _map_of(f'{{"d": {value}}}') for value in ("3", "null", "[]", "{}")
        ),
    }.items():
        for text in texts:
            (_sharded(tmp_path) / _INDEX).write_text(text)
            assert why(tmp_path) == f"{_INDEX}: {sentence}", text


def _map_of(names: str) -> str:
    return f'{{"weight_map": {names}}}'


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    (_sharded(tmp_path) / _INDEX).unlink()
    save_file({"a": np.ones(1)}, tmp_path / "n.safetensors")
    error = refusal(tmp_path)
    assert "ow slices" in error.hint
    sentence = "n.safetensors: tensor 'a' is also in m-1.safetensors, and there is no index."
    assert error.message == sentence


def test_a_single_file_beside_a_foreign_index_is_not_guessed(tmp_path):
    save_file({"a": np.ones(1)}, _sharded(tmp_path) / "model.safetensors")
    assert f"holds both model.safetensors and {_INDEX}, which does not name it." in why(tmp_path)


def test_a_pointer_of_git_lfs_is_called_one(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(CheckpointError, match="is a pointer of Git LFS"):
        open_checkpoint(tmp_path).names()
