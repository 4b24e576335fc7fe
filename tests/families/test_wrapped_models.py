"""Wrapped states: the same routers and the same fingerprint as the bare checkpoint, by family."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import RouterSet
from moegeom.router.load import load_routers
from tests.families.by_day import some_by_day
from tests.families.test_families_against_transformers import LOADED, model_of

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


@cache
def _bare(name: str, folder: Path) -> tuple[RouterSet, State]:
    model_of(name).save_pretrained(folder)
    state = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    return load_routers(open_checkpoint(folder)), state


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the bare checkpoints of all families."""
    return tmp_path_factory.mktemp("bare")


@pytest.mark.parametrize("written", WRITERS)
@pytest.mark.parametrize("name", some_by_day(LOADED))
def test_a_wrapped_state_has_the_routers_and_the_fingerprint_of_the_bare_one(
    name: str, written: str, home: Path, tmp_path: Path
) -> None:
    bare, state = _bare(name, home / name)
    shutil.copy(home / name / "config.json", tmp_path)
    WRITERS[written](state, tmp_path)
    found = load_routers(open_checkpoint(tmp_path))
    assert found.fingerprint == bare.fingerprint
    assert found.num_expected == bare.num_expected
    assert len(found.skipped) == len(bare.skipped)
    assert [router.name for router in found.routers] == [router.name for router in bare.routers]
    for mine, theirs in zip(found.routers, bare.routers, strict=True):
        assert mine.rule == theirs.rule
        for part in ("weight", "logit_bias", "selection_bias", "gain", "expert_scale"):
            np.testing.assert_array_equal(getattr(mine, part), getattr(theirs, part), part)
