"""Wrapped states: the same routers and the same fingerprint as the bare checkpoint, by family."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.load import load_routers
from tests.by_day import by_day
from tests.families.test_families_against_transformers import assert_same_arrays
from tests.families.tiny_models import LOADED, read, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = dict[str, torch.Tensor]


def _dcp(state: State, folder: Path) -> None:
    dcp.save({"model": state, "step": 7}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


#: What trainers write: a dictionary around the state, or a module around the model.
WRITERS: dict[str, Callable[[State, Path], None]] = {
    "model in DCP": _dcp,
    "model in .pt": lambda state, to: torch.save({"model": state, "step": 7}, to / "a.pt"),
    "state_dict in .pt": lambda state, to: torch.save({"state_dict": state}, to / "a.pt"),
    "Lightning": lambda state, to: torch.save(
        {"state_dict": {f"model.{name}": t for name, t in state.items()}}, to / "a.ckpt"
    ),
    "model in Lightning": lambda state, to: torch.save(
        {"state_dict": {f"model.model.{name}": t for name, t in state.items()}}, to / "a.ckpt"
    ),
}


@pytest.mark.parametrize(
    ("written", "name"),
    by_day(
        [(written, name) for written in WRITERS for name in LOADED],
        {
            "a prefix of the model": ("model in DCP", "olmoe"),
            "biases": ("model in .pt", "deepseek_v3"),
            "no prefix": ("state_dict in .pt", "openai_privacy_filter"),
            "encoder and decoder": ("Lightning", "switch_transformers"),
            "a prefix of a part": ("model in Lightning", "llava__mixtral"),
        },
    ),
)
def test_a_wrapped_state_has_the_routers_and_the_fingerprint_of_the_bare_one(
    written: str, name: str, tmp_path: Path
) -> None:
    bare, folder = read(name), saved(name)
    shutil.copy(folder / "config.json", tmp_path)
    state = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    WRITERS[written](state, tmp_path)
    wrapped = load_routers(open_checkpoint(tmp_path))
    assert wrapped.fingerprint == bare.fingerprint
    assert wrapped.num_expected == bare.num_expected
    assert len(wrapped.skipped) == len(bare.skipped)
    for mine, theirs in zip(wrapped.routers, bare.routers, strict=True):
        assert (mine.name, mine.rule) == (theirs.name, theirs.rule)
        assert_same_arrays(mine, theirs)
