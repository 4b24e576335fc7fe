"""Safetensors: headers, and tensors in slices over several files."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from dataclasses import dataclass
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

from moegeom.checkpoint import ranks
from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.ranks import Piece, SlicedTensor, join_pieces
from moegeom.checkpoint.store import TensorInfo
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from tests.by_day import by_day
from tests.unit.checkpoint.conftest import why
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
