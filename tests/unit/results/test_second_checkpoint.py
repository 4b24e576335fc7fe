"""A second checkpoint belongs to the plan of a run, and what cannot be asked of it is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from moegeom import pipeline
from moegeom.core.errors import CheckpointError, RouterError, UsageError
from moegeom.pipeline import scan
from moegeom.results.reader import open_results
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint

MODEL = SyntheticModel(hidden=16, experts=8, top_k=2, layers=2, seed=7)


class Killed(BaseException):
    """Stands for the end of the process at this place."""


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("second") / "second", MODEL))


@pytest.fixture
def kill(disk, tmp_path, monkeypatch):
    """Begins a run against a checkpoint, ends it after its first router, and says where."""
    measure = pipeline.measure

    def stop(routers, *rest):
        if routers[0].name == "text/1":
            raise Killed
        return measure(routers, *rest)

    def begin(against) -> Path:
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(pipeline, "measure", stop)
            scan(disk.request(tmp_path / "out", checkpoint_b=str(against)))
        return tmp_path / "out"

    return begin


@pytest.fixture
def interrupted(kill, second):
    return kill(second)


def layers(out) -> list[dict]:
    return pq.read_table(out / "layers.parquet").to_pylist()


def test_a_run_goes_on_against_the_same_checkpoint(disk, second, interrupted, tmp_path):
    whole = scan(disk.request(tmp_path / "whole", checkpoint_b=second))
    out = scan(disk.request(interrupted, checkpoint_b=second))
    np.testing.assert_equal(layers(out), layers(whole))
    facts = open_results(out).run["checkpoint_b"]
    assert (facts["name"], facts["num_compared"], facts["equal"]) == ("second", 2, [])
    assert facts["regained"] == ["text/0", "text/1"]


def test_another_second_checkpoint_is_another_plan(disk, second, interrupted, tmp_path):
    other = write_checkpoint(tmp_path / "other", SyntheticModel(**{**vars(MODEL), "seed": 8}))
    with pytest.raises(UsageError, match="(seed|layers|checkpoint_b) differ"):
        scan(disk.request(interrupted, checkpoint_b=str(other)))
    with pytest.raises(UsageError, match="(seed|layers|checkpoint_b) differ"):
        scan(disk.request(interrupted))


def test_a_second_checkpoint_that_changed_meanwhile_is_another_plan(disk, kill, tmp_path):
    copy = write_checkpoint(tmp_path / "copy", MODEL)
    out = kill(copy)
    tensors = load_file(copy / "model.safetensors")
    gain = next(name for name in tensors if "layernorm" in name)
    save_file({**tensors, gain: tensors[gain] * 2}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="(seed|layers|checkpoint_b) differ"):
        scan(disk.request(out, checkpoint_b=str(copy)))
    config = json.loads((copy / "config.json").read_text())
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    (copy / "config.json").write_text(json.dumps({**config, "norm_topk_prob": False}))
    with pytest.raises(UsageError, match="(seed|layers|checkpoint_b) differ"):
        scan(disk.request(out, checkpoint_b=str(copy)))


def test_without_tokens_there_is_nothing_to_route(disk, second, tmp_path):
    with pytest.raises(UsageError, match="--checkpoint-b needs --tokens"):
        scan(disk.request(tmp_path / "out", checkpoint_b=second, tokens=None))
    assert not (tmp_path / "out").exists()


def test_a_second_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(
    disk, tmp_path
):
    shallow = SyntheticModel(**{**vars(MODEL), "layers": 1})
    wide = SyntheticModel(**{**vars(MODEL), "experts": 12})
    for name, model, said in (
        ("shallow", shallow, "shallow: has no router text/1; its 1 router is text/0"),
        ("wide", wide, "wide: router text/0 has 12 experts; that of the first checkpoint has 8"),
    ):
        path = write_checkpoint(tmp_path / name, model)
        with pytest.raises(RouterError, match=said):
            scan(disk.request(tmp_path / "out", checkpoint_b=str(path)))
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        scan(disk.request(tmp_path / "out", checkpoint_b=str(tmp_path / "nowhere")))
    assert not list(tmp_path.glob("out*"))


def test_layers_that_both_have_can_be_compared(disk, tmp_path):
    shallow = write_checkpoint(tmp_path / "shallow", SyntheticModel(**{**vars(MODEL), "layers": 1}))
    out = scan(disk.request(tmp_path / "out", checkpoint_b=str(shallow), layers="0"))
    assert {row["router"] for row in layers(out) if row["variant"] == "checkpoint-b"} == {"text/0"}
