from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint import limits
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError

_INDEX = "model.safetensors.index.json"


def _sharded(folder: Path, weight_map: dict[str, Any] | None = None) -> Path:
    save_file({"a": np.arange(4.0), "b": np.ones(2)}, folder / "m-1.safetensors")
    save_file({"c": np.full((2, 2), 7, np.int32)}, folder / "m-2.safetensors")
    good = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    index = {"metadata": {}, "weight_map": good | (weight_map or {})}
    (folder / _INDEX).write_text(json.dumps(index))
    return folder


def _refusal(path: Path, name: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        store = open_checkpoint(path)
        assert name is not None
        store.read(name)
    assert caught.value.exit_code == 3
    return caught.value.message


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    store = open_checkpoint(_sharded(tmp_path))
    assert set(store.names()) == {"a", "b", "c"}
    np.testing.assert_array_equal(store.read("a"), np.arange(4.0))
    np.testing.assert_array_equal(store.read("c"), np.full((2, 2), 7, np.int32))
    assert store.info("c").file == "m-2.safetensors"


def test_the_index_may_be_passed_itself(tmp_path: Path) -> None:
    store = open_checkpoint(_sharded(tmp_path) / _INDEX)
    assert store.read("b").tolist() == [1.0, 1.0]
    assert store.label == tmp_path.name


def test_only_the_header_of_the_shard_in_use_is_read(tmp_path: Path) -> None:
    store: Any = open_checkpoint(_sharded(tmp_path))
    store.read("c")
    assert {r.file for r in store.log.ranges} == {_INDEX, "m-2.safetensors"}


def test_every_byte_read_is_counted(tmp_path: Path) -> None:
    store: Any = open_checkpoint(_sharded(tmp_path))
    assert store.bytes_read == (tmp_path / _INDEX).stat().st_size
    before = store.bytes_read
    store.read("c")
    with (tmp_path / "m-2.safetensors").open("rb") as shard:
        header = 8 + int.from_bytes(shard.read(8), "little")
    assert store.bytes_read - before == header + 16
    assert store.log.ranges[-1].size == 16
    assert store.bytes_total == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_what_is_read_of_everything_is_all_there_is(tmp_path: Path) -> None:
    (_sharded(tmp_path) / "config.json").write_text('{"a": 1}')
    store = open_checkpoint(tmp_path)
    assert store.config == {"a": 1}
    assert [name for name, _ in store.read_many("abc")] == ["a", "b", "c"]
    assert store.bytes_read == store.bytes_total


def test_an_index_that_names_a_missing_file_says_which_and_how_many(tmp_path: Path) -> None:
    folder = _sharded(tmp_path, {"d": "m-3.safetensors", "e": "m-4.safetensors"})
    assert _refusal(folder, "e") == (
        f"{_INDEX}: names 'm-4.safetensors', which does not exist (2 of 4 files are missing)."
    )


def test_a_missing_shard_matters_only_to_who_needs_it(tmp_path: Path) -> None:
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


def test_an_index_without_any_of_its_files_is_refused_at_once(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert _refusal(folder) == (
        f"{_INDEX}: names 'm-1.safetensors', which does not exist (2 of 2 files are missing)."
    )


def test_an_index_of_more_files_than_may_be_looked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FILES", 1)
    assert _refusal(_sharded(tmp_path)) == f"{_INDEX}: names 2 files, more than the 1 allowed."


def test_an_index_of_too_many_or_too_long_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = _refusal(_sharded(tmp_path, {"n" * 1025: "m-1.safetensors"}))
    assert message == f"{_INDEX}: has a name of 1025 characters, more than the 1024 allowed."
    monkeypatch.setattr(limits, "TENSORS", 2)
    message = _refusal(_sharded(tmp_path))
    assert message == f"{_INDEX}: describes 3 tensors, more than the 2 allowed."


def test_files_of_too_many_tensors_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_sharded(tmp_path) / _INDEX).unlink()
    monkeypatch.setattr(limits, "TENSORS", 2)
    assert _refusal(tmp_path) == (
        "m-2.safetensors: with this file there are 3 tensors, more than the 2 allowed."
    )


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = _sharded(tmp_path, {"d": "m-2.safetensors"})
    assert _refusal(folder, "d") == (
        "m-2.safetensors: tensor 'd' is missing; the index says that it is here."
    )


def test_a_name_that_is_nowhere_is_an_error(tmp_path: Path) -> None:
    assert _refusal(_sharded(tmp_path), "z") == f"{tmp_path.name}: there is no tensor 'z'."


@pytest.mark.parametrize(
    "file", ["../x", "/etc/passwd", "a/../../x", "..\\x", "C:x", "", ".", "a\0b", ".."]
)
def test_an_index_cannot_name_a_file_outside_its_folder(file: str, tmp_path: Path) -> None:
    message = _refusal(_sharded(tmp_path, {"d": file}))
    assert message == (
        f"{_INDEX}: names the file {file!r}, which is outside the checkpoint's folder."
    )


@pytest.mark.parametrize("file", [3, None, [], {}])
def test_a_weight_map_of_anything_but_names_is_refused(file: object, tmp_path: Path) -> None:
    message = _refusal(_sharded(tmp_path, {"d": file}))
    assert message == f"{_INDEX}: 'weight_map' holds a value that is no file name."


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(text: str, tmp_path: Path) -> None:
    (_sharded(tmp_path) / _INDEX).write_text(text)
    assert _refusal(tmp_path) == f"{_INDEX}: has no 'weight_map' from tensor to file."


def test_a_tensor_listed_twice_is_refused(tmp_path: Path) -> None:
    text = '{"weight_map": {"a": "m-1.safetensors", "a": "m-2.safetensors"}}'
    (_sharded(tmp_path) / _INDEX).write_text(text)
    assert _refusal(tmp_path) == f"{_INDEX}: holds the key 'a' twice."


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    path = _sharded(tmp_path) / "m-2.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 3)
    assert _refusal(tmp_path, "c") == (
        f"m-2.safetensors: truncated, has {size - 3} bytes and its header promises {size}."
    )


def test_files_without_an_index_are_joined(tmp_path: Path) -> None:
    (_sharded(tmp_path) / _INDEX).unlink()
    assert set(open_checkpoint(tmp_path).names()) == {"a", "b", "c"}


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    (_sharded(tmp_path) / _INDEX).unlink()
    save_file({"a": np.ones(1)}, tmp_path / "n.safetensors")
    with pytest.raises(CheckpointError, match="row slices|Row slices") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.message == (
        "n.safetensors: tensor 'a' is also in m-1.safetensors, and there is no index."
    )


def test_a_single_file_beside_a_foreign_index_is_not_guessed(tmp_path: Path) -> None:
    save_file({"a": np.ones(1)}, _sharded(tmp_path) / "model.safetensors")
    assert _refusal(tmp_path) == (
        f"{tmp_path.name}: holds both model.safetensors and {_INDEX}, which does not name it."
    )
