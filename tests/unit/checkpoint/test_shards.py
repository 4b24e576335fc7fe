from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core import limits
from moegeom.core.errors import CheckpointError
from tests.unit.checkpoint.conftest import refusal, why

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
