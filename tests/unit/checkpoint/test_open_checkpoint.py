from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint import reading
from moegeom.checkpoint.open import FORMATS, open_checkpoint
from moegeom.core.errors import CheckpointError, UsageError
from tests.fuzz.worker import odd_files
from tests.unit.checkpoint.conftest import refusal, why


def test_formats_are_listed_and_a_folder_with_one_file_is_a_checkpoint(tmp_path):
    assert FORMATS.names() == ["dcp", "gguf", "pytorch", "safetensors"]
    for name in ("weights.safetensors", "model.safetensors"):
        save_file({"a": np.ones(1)}, tmp_path / name)
        assert open_checkpoint(tmp_path).info("a").file == name
        assert open_checkpoint(str(tmp_path / name)).label == tmp_path.name


def test_another_format_is_called_by_its_name(tmp_path):
    kinds = {"weights.npz": "NumPy arrays", "model.h5": "HDF5", "flax_model.msgpack": "Flax"}
    for file, kind in kinds.items():
        (tmp_path / file).touch()
        expected = f"holds {kind} ({file}); only dcp, gguf, pytorch, safetensors are read for now."
        assert why(tmp_path) == f"{tmp_path.name}: {expected}"
        assert why(tmp_path / file) == f"{file}: {expected}"
        (tmp_path / file).unlink()


def test_what_is_not_there_is_refused_with_a_hint(tmp_path):
    assert why(tmp_path) == (
        f"{tmp_path.name}: no file in it; expected a checkpoint of dcp, gguf, pytorch, safetensors."
    )
    error = refusal("allenai/OLMoE-1B-7B")
    assert error.message == "allenai/OLMoE-1B-7B: there is no such file or folder."
    assert "downloaded first" in error.hint
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
