"""Kept answers: believed for the very request, and never from the tree of what is judged. A second
checkpoint belongs to the plan of a run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.core import digest
from moegeom.core.digest import identity_of
from moegeom.core.errors import CheckpointError, RouterError, UsageError
from moegeom.engine.request import ScanRequest
from moegeom.pipeline import scan
from moegeom.results.plans import PLAN_FILE
from moegeom.results.reader import open_results
from moegeom.studies.track.record import TrackRequest
from moegeom.studies.track.steps import read_choices
from moegeom.studies.track.study import track
from tests.unit.results.conftest import killed

MODEL = SyntheticModel(hidden=64, experts=8, top_k=2, layers=1)


@pytest.fixture
def world(tmp_path) -> Path:
    """A checkpoint with its recording, in a folder of their own."""
    write_checkpoint(tmp_path / "work/model", MODEL)
    write_tokens(tmp_path / "work/rec_1", MODEL, 1024)
    (tmp_path / "work/model").rename(tmp_path / "work/step_1")
    return tmp_path / "work"


def planted(results: Path) -> None:
    """Somebody writes other figures into results."""
    run = json.loads((results / "run.json").read_text("utf-8"))
    run["planted"] = True
    (results / "run.json").write_text(json.dumps(run), "utf-8")


def is_planted(results: Path) -> bool:
    return "planted" in json.loads((results / "run.json").read_text("utf-8"))


#: Whether there is a working tree, and folders of results by whether they lie with what is judged.
PLACES = {
    True: {"../elsewhere": False, "runs": True, "step_1": True, "rec_1/deeper": True},
    False: {"runs": False, "step_1": True, "rec_1/deeper": True},
}


@pytest.mark.parametrize("has_tree", PLACES)
def test_results_in_the_tree_of_what_is_judged_are_measured_again(has_tree, world):
    """Without a working tree a checkpoint and a recording end at their folders."""
    if has_tree:
        (world / ".git").mkdir()
    for place, is_judged in PLACES[has_tree].items():
        out = world / place / "results"
        request = ScanRequest(str(world / "step_1"), tokens=str(world / "rec_1"), out=out)
        out.parent.mkdir(exist_ok=True)
        scan(request)
        planted(out)
        scan(request)
        assert is_planted(out) != is_judged, place


@pytest.mark.parametrize("place", ["../elsewhere", "runs"])
def test_steps_of_a_series_are_measured_again_there_too(place, world):
    (world / ".git").mkdir()
    request = TrackRequest((str(world / "step_*"),), out=world / place)
    track(request)
    planted(world / place / "step_1.moegeom")
    (step,) = track(request).steps
    assert step.is_reused != PLACES[True][place]
    assert is_planted(world / place / "step_1.moegeom") != PLACES[True][place]


def test_unfinished_results_in_that_tree_are_not_gone_on_with(world):
    (world / ".git").mkdir()
    out = world / "runs/results"
    partial = out.with_name(f"{out.name}.partial")
    (partial / "parts/text.0").mkdir(parents=True)
    (partial / PLAN_FILE).write_text("{}", "utf-8")
    scan(ScanRequest(str(world / "step_1"), tokens=str(world / "rec_1"), out=out))
    assert not partial.exists()


def rewritten(file: Path, place: int) -> None:
    """Turns the bits of one byte; size and time of change stay."""
    before = file.stat()
    held = bytearray(file.read_bytes())
    held[place] ^= 0x11
    file.write_bytes(held)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("most", [digest.HASHED_BYTES, 1000], ids=["small", "large"])
def test_a_file_that_was_rewritten_between_its_places_is_another(most, tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "HASHED_BYTES", most)
    file = tmp_path / "rec/tokens.bin"
    file.parent.mkdir()
    file.write_bytes(bytes(1 << 18))
    before = [identity_of(path) for path in (file, file.parent)]
    assert [identity_of(path) for path in (file, file.parent)] == before
    rewritten(file, 10_000)
    for old, new in zip(before, map(identity_of, (file, file.parent)), strict=True):
        assert old[:2] == new[:2]
        assert old != new


def test_what_was_measured_on_a_recording_is_not_believed_of_a_rewritten_one(world, tmp_path):
    request = ScanRequest(str(world / "step_1"), tokens=str(world / "rec_1"), out=tmp_path / "out")
    series = TrackRequest(
        (str(world / "step_*"),), tokens=str(world / "rec_{step}"), out=tmp_path / "series"
    )
    scan(request)
    track(series)
    largest = max((world / "rec_1").iterdir(), key=lambda path: path.stat().st_size)
    rewritten(largest, largest.stat().st_size - 10_000)
    (step,) = track(series).steps
    assert not step.is_reused
    with pytest.raises(UsageError, match="tokens differ"):
        scan(request)


def test_chosen_sets_are_those_of_the_kept_results_or_are_made_again(world, tmp_path):
    request = TrackRequest(
        (str(world / "step_*"),), tokens=str(world / "rec_{step}"), out=tmp_path / "out"
    )
    track(request)
    file = tmp_path / "out/step_1.choices.npz"
    kept = file.read_bytes()
    results = open_results(tmp_path / "out/step_1.moegeom")
    whole = read_choices(file, results)
    assert whole is not None
    other = dataclasses.replace(results, run={**results.run, "plan": {"seed": 1}})
    assert read_choices(file, other) is None  # as a run that was stopped before it wrote them
    arrays = dict(np.load(file))
    np.savez(file, **{**arrays, "block": arrays["block"] + 1})
    assert read_choices(file, results) is None
    (step,) = track(request).steps
    assert step.is_reused
    assert file.read_bytes() == kept


TWO_LAYERS = SyntheticModel(hidden=16, experts=8, top_k=2, layers=2, seed=7)


OTHER_PLAN = "(seed|layers|checkpoint_b) differ"


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("second") / "second", TWO_LAYERS))


def layers(out) -> list[dict]:
    return pq.read_table(out / "layers.parquet").to_pylist()


def test_a_run_goes_on_against_the_same_checkpoint_and_no_other(disk, second, tmp_path):
    whole = scan(disk.request(tmp_path / "whole", checkpoint_b=second))
    interrupted = killed(disk.request(tmp_path / "out", checkpoint_b=second))
    other = write_checkpoint(tmp_path / "other", dataclasses.replace(TWO_LAYERS, seed=8))
    for against in (str(other), None):
        with pytest.raises(UsageError, match=OTHER_PLAN):
            scan(disk.request(interrupted, checkpoint_b=against))
    out = scan(disk.request(interrupted, checkpoint_b=second))
    np.testing.assert_equal(layers(out), layers(whole))
    facts = open_results(out).run["checkpoint_b"]
    assert (facts["name"], facts["num_compared"], facts["equal"]) == ("second", 2, [])
    assert facts["regained"] == ["text/0", "text/1"]


def test_a_second_checkpoint_that_changed_meanwhile_is_another_plan(disk, tmp_path):
    copy = write_checkpoint(tmp_path / "copy", TWO_LAYERS)
    request = disk.request(tmp_path / "out", checkpoint_b=str(copy))
    killed(request)
    tensors = load_file(copy / "model.safetensors")
    gain = next(name for name in tensors if "layernorm" in name)
    save_file({**tensors, gain: tensors[gain] * 2}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=OTHER_PLAN):
        scan(request)
    config = json.loads((copy / "config.json").read_text())
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    (copy / "config.json").write_text(json.dumps({**config, "norm_topk_prob": False}))
    with pytest.raises(UsageError, match=OTHER_PLAN):
        scan(request)


def test_a_second_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(
    disk, second, tmp_path
):
    with pytest.raises(UsageError, match="--checkpoint-b needs --tokens"):
        scan(disk.request(tmp_path / "out", checkpoint_b=second, tokens=None))
    shallow = dataclasses.replace(TWO_LAYERS, layers=1)
    wide = dataclasses.replace(TWO_LAYERS, experts=12)
    for name, model, words in (
        ("shallow", shallow, "shallow: has no router text/1; its 1 router is text/0"),
        ("wide", wide, "wide: router text/0 has 12 experts; that of the first checkpoint has 8"),
    ):
        path = write_checkpoint(tmp_path / name, model)
        with pytest.raises(RouterError, match=words):
            scan(disk.request(tmp_path / "out", checkpoint_b=str(path)))
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        scan(disk.request(tmp_path / "out", checkpoint_b=str(tmp_path / "nowhere")))
    assert not list(tmp_path.glob("out*"))


def test_layers_that_both_have_can_be_compared(disk, tmp_path):
    shallow = write_checkpoint(tmp_path / "shallow", dataclasses.replace(TWO_LAYERS, layers=1))
    out = scan(disk.request(tmp_path / "out", checkpoint_b=str(shallow), layers="0"))
    assert {row["router"] for row in layers(out) if row["variant"] == "checkpoint-b"} == {"text/0"}
