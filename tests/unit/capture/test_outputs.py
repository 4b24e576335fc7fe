"""Recorded outputs are those that are computed from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import moegeom as mg
from moegeom.core.errors import RecordingError
from moegeom.recorder.model_store import ModelStore
from moegeom.recorder.recorder import RouterRecorder
from moegeom.router.expert_functions import open_expert_functions
from moegeom.router.load import load_routers
from moegeom.router.shared_experts import open_shared_experts
from moegeom.tokens.recording.reader import open_recording
from tests.families.test_families_against_transformers import routed
from tests.families.tiny_models import build

SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"
KINDS = ("shared_output", "routed_output", "expert_output")


def recorded(model: Any, out: Path, keep: str, checkpoint: Path | None = None) -> Any:
    ids = torch.randint(3, 160, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), RouterRecorder(model, out, keep=keep, checkpoint=checkpoint) as recorder:
        model(input_ids=ids)  # not announced: neither recorded nor mixed into what is
        recorder.tokens(ids.flip(1))
        model(input_ids=ids.flip(1))
    return open_recording(out)


def near(mine: np.ndarray | None, theirs: np.ndarray, tolerance: float = 1e-5) -> None:
    scale = max(float(np.abs(theirs).max()), 1e-30)
    assert mine is not None
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("name", ["olmoe-balanced", "deepseek-tiny"])
def test_outputs_of_a_running_sample_are_those_computed_from_its_file(name, tmp_path):
    ckpt = SAMPLES / name / "step_1500"
    model = transformers.AutoModelForCausalLM.from_pretrained(ckpt, dtype=torch.float32).eval()
    source = recorded(model, tmp_path / "rec", "outputs:every-expert", ckpt)
    assert source.facts.outputs == KINDS
    assert source.facts.num_tokens == 48
    mg.outputs(ckpt, tmp_path / "rec", every_expert=True, out=tmp_path / "computed")
    computed = open_recording(tmp_path / "computed")
    for router in source.facts.routers:
        for kind in KINDS:
            theirs = computed.read_output(router, kind, 0, 48)
            assert theirs is not None
            near(source.read_output(router, kind, 0, 48), theirs)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_moe",  # a number gates the shared expert
        "granitemoeshared",  # shared experts outside the block
        "llama4_text",  # adds to what the shared expert gave, in place
        "minimax_m3_vl_text",  # multiplies the sum of the routed experts
        "nemotron_h__latent",
        "longcat_flash",
    ],
)
def test_outputs_of_a_block_are_told_apart(name, tmp_path):
    model = build(name)
    source, store = recorded(model, tmp_path / "rec", "outputs"), ModelStore(model)
    for router in load_routers(store).routers:
        inputs = source.read_values(router.name, 0, 48)
        choice, weights = routed(router, inputs, False)
        experts = open_expert_functions(store, router)
        expected = experts.mixed(inputs.astype(np.float64), choice.chosen, weights)
        near(source.read_output(router.name, "routed_output", 0, 48), expected)
        shared = open_shared_experts(store, router)
        theirs = np.zeros_like(inputs) if shared is None else shared.apply(inputs)
        near(source.read_output(router.name, "shared_output", 0, 48), theirs)


@pytest.mark.parametrize(
    ("name", "keep", "why"),
    [
        ("axk1", "outputs", "a norm stands behind it"),
        ("jetmoe", "outputs", "mixes tokens between them"),
        ("cohere2_moe__sigmoid", "outputs", "mean of shared and routed"),
        ("muse_spark", "outputs:every-expert", "cannot be asked one by one"),
        ("switch_transformers", "outputs:every-expert", "cannot be asked one by one"),
    ],
)
def test_blocks_that_give_another_sum_are_refused(name, keep, why, tmp_path):
    with pytest.raises(RecordingError, match=why):
        RouterRecorder(build(name), tmp_path / "rec", keep=keep)
