"""Oracle: torch's own writer and reader of safetensors in slices."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from moegeom.checkpoint import slices
from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.slices import Piece, SlicedTensor, join_pieces
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import CheckpointError
from tests.by_day import by_day
from tests.unit.checkpoint.conftest import why
from tests.unit.checkpoint.save_two_ranks import weights

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
    monkeypatch.setattr(slices, "SLICE_CELLS", 10)
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
