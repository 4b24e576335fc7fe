"""Ranks of torch.distributed that fold together, against one process with the same tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from moegeom.results.reader import open_results
from tests.unit.capture.conftest import Sample
from tests.unit.capture.test_fold import assert_same_results
from tests.unit.capture.trained import texts, tiny_model, trainer_of
from tests.unit.capture.two_ranks import FOLDED, TOKENS, fold_pieces, on_two_ranks


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """What two ranks made: of several workers of pytest one runs them, for all."""
    if worker_id == "master":
        return on_two_ranks(tmp_path_factory.mktemp("ranks"))
    folder = tmp_path_factory.getbasetemp().parent / "ranks"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "losses.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            on_two_ranks(folder)
    return folder


@pytest.mark.parametrize("name", FOLDED)
def test_two_ranks_fold_what_one_process_does_that_takes_their_tiles_in_turn(
    name: str, balanced: Sample, ran: Path, tmp_path: Path
) -> None:
    """More tokens than the samples hold: what is drawn, or halved, is the same as well."""
    fold_pieces(balanced.model, tmp_path / "alone", [(0, TOKENS)], FOLDED[name])
    assert_same_results(ran / name, tmp_path / "alone")


def test_ranks_of_a_trainer_fold_the_tokens_of_all_and_train_as_without(
    ran: Path, tmp_path: Path
) -> None:
    """Two ranks accumulate twice where one process does four times."""
    from moegeom.recorder import FoldCallback

    without, with_callback = json.loads((ran / "losses.json").read_text())
    assert with_callback == without
    trainer = trainer_of(
        tiny_model(), tmp_path, texts(24), max_steps=1, gradient_accumulation_steps=4
    )
    trainer.add_callback(FoldCallback(trainer, tmp_path / "runs"))
    trainer.train()
    mine, theirs = (open_results(p / "runs" / "step_0") for p in (tmp_path, ran))
    for fact in ("num_tokens", "num_documents"):
        assert mine.run["tokens"][fact] == theirs.run["tokens"][fact]
    for column in ("num_slots", "router", "expert"):
        np.testing.assert_array_equal(*(r.table("experts")[column] for r in (mine, theirs)))
