from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint import reading
from moegeom.checkpoint.open import FORMATS, open_checkpoint
from moegeom.core.errors import CheckpointError


def _refusal(path: str | Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


def test_formats_are_listed_by_file_name() -> None:
    assert FORMATS.names() == ["dcp", "gguf", "pytorch", "safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_folder_with_one_file_is_a_checkpoint(name: str, tmp_path: Path) -> None:
    save_file({"a": np.ones(1)}, tmp_path / name)
    assert open_checkpoint(tmp_path).info("a").file == name
    assert open_checkpoint(str(tmp_path / name)).label == tmp_path.name


def test_model_safetensors_is_preferred_to_its_neighbours(tmp_path: Path) -> None:
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    save_file({"a": np.ones(1)}, tmp_path / "consolidated.safetensors")
    assert open_checkpoint(tmp_path).info("a").file == "model.safetensors"


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("weights.npz", "NumPy arrays"),
        ("model.h5", "HDF5"),
        ("flax_model.msgpack", "Flax"),
    ],
)
def test_another_format_is_called_by_its_name(file: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    expected = f"holds {kind} ({file}); only dcp, gguf, pytorch, safetensors are read for now."
    assert _refusal(tmp_path).message == f"{tmp_path.name}: {expected}"
    assert _refusal(tmp_path / file).message == f"{file}: {expected}"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path).message == (
        f"{tmp_path.name}: found nothing, expected a checkpoint of dcp, gguf, pytorch, safetensors."
    )


def test_a_path_that_does_not_exist_is_refused_with_a_hint() -> None:
    error = _refusal("allenai/OLMoE-1B-7B")
    assert error.message == "allenai/OLMoE-1B-7B: there is no such file or folder."
    assert "downloaded first" in error.hint


def test_a_path_with_nul_is_refused() -> None:
    assert _refusal("a\0b").message == "a\0b: there is no such file or folder."


def test_a_folder_named_like_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert _refusal(tmp_path).message == "model.safetensors: not a regular file."


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert _refusal(tmp_path).message == "model.safetensors: not a regular file."


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")

    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reading.os, "open", refuse)  # chmod does not stop root
    assert _refusal(tmp_path).message == "model.safetensors: cannot be read (Permission denied)."


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(4)}, path)
    store = open_checkpoint(tmp_path)
    size = path.stat().st_size
    os.truncate(path, size - 8)
    with pytest.raises(CheckpointError, match="truncated, bytes .* were expected"):
        store.read("a")


def test_a_missing_config_is_empty_and_infinity_in_one_is_read(tmp_path: Path) -> None:
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config == {}
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert open_checkpoint(tmp_path).config == {"time_step_limit": [0.0, float("inf")]}


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "\xff"])
def test_a_malformed_config_is_refused(text: str, tmp_path: Path) -> None:
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"^config\.json: "):
        assert open_checkpoint(tmp_path).config
