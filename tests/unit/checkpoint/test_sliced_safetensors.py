"""Oracle: torch's own writer and reader of safetensors in slices."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError
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


def test_a_missing_slice_names_its_rows(tmp_path):
    _part(tmp_path, 1, (0, 8))
    _part(tmp_path, 3, (16, 64))
    assert "tensor 'gate' is not whole: rows 8..16 of 64 are missing." in why(tmp_path, "gate")
    _part(tmp_path, 2, (8, 16))
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("gate").ravel(), np.arange(256.0))
    _part(tmp_path, 2, (8, 32))  # of another save
    assert "tensor 'gate' has overlapping pieces" in why(tmp_path, "gate")


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
