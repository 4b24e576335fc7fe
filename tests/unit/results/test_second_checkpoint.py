"""A second checkpoint belongs to the plan of a run, and what cannot be asked of it is told."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from moegeom.core.errors import CheckpointError, RouterError, UsageError
from moegeom.pipeline import scan
from moegeom.results.reader import open_results
from moegeom.testing.synthetic import SyntheticModel, write_checkpoint
from tests.unit.results.conftest import killed

MODEL = SyntheticModel(hidden=16, experts=8, top_k=2, layers=2, seed=7)


OTHER_PLAN = "(seed|layers|checkpoint_b) differ"


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("second") / "second", MODEL))


def layers(out) -> list[dict]:
    return pq.read_table(out / "layers.parquet").to_pylist()


def test_a_run_goes_on_against_the_same_checkpoint_and_no_other(disk, second, tmp_path):
    whole = scan(disk.request(tmp_path / "whole", checkpoint_b=second))
    interrupted = killed(disk.request(tmp_path / "out", checkpoint_b=second))
    other = write_checkpoint(tmp_path / "other", dataclasses.replace(MODEL, seed=8))
    for against in (str(other), None):
        with pytest.raises(UsageError, match=OTHER_PLAN):
            scan(disk.request(interrupted, checkpoint_b=against))
    out = scan(disk.request(interrupted, checkpoint_b=second))
    np.testing.assert_equal(layers(out), layers(whole))
    facts = open_results(out).run["checkpoint_b"]
    assert (facts["name"], facts["num_compared"], facts["equal"]) == ("second", 2, [])
    assert facts["regained"] == ["text/0", "text/1"]


def test_a_second_checkpoint_that_changed_meanwhile_is_another_plan(disk, tmp_path):
    copy = write_checkpoint(tmp_path / "copy", MODEL)
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
    shallow = dataclasses.replace(MODEL, layers=1)
    wide = dataclasses.replace(MODEL, experts=12)
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
    shallow = write_checkpoint(tmp_path / "shallow", dataclasses.replace(MODEL, layers=1))
    out = scan(disk.request(tmp_path / "out", checkpoint_b=str(shallow), layers="0"))
    assert {row["router"] for row in layers(out) if row["variant"] == "checkpoint-b"} == {"text/0"}
