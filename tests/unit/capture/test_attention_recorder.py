"""``AttentionRecorder`` on tiny gated models: what counts, what does not, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import moegeom as mg
from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.recorder import AttentionRecorder, RouterRecorder
from moegeom.recorder.run import CaptureRequest, capture, parse_text_file, plan_capture
from moegeom.tokens.attention_record import FACTS_FILE, SUMS_FILE, LayerSums, read_attention_record
from moegeom.tokens.open import open_tokens
from tests.families.attention_models import attention_model
from tests.records import new_folder
from tests.unit.capture.conftest import sample_of

GATED = "qwen3_next"

#: Token ids of three texts of unlike lengths.
TEXTS = [np.random.default_rng(n).integers(10, 60, 12 + 5 * n).tolist() for n in range(3)]


def _saved(name: str) -> tuple[Any, Path]:
    model, folder = attention_model(name), new_folder()
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def gated() -> tuple[Any, Path]:
    return _saved(GATED)


@pytest.fixture(scope="module")
def sunk() -> tuple[Any, Path]:
    return _saved("gpt_oss")


def _record(model: Any, out: Path, *batches: list[list[int]], **given: Any) -> list[LayerSums]:
    with AttentionRecorder(model, out, **given) as recorder:
        for batch in batches:
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(text)) + text for text in batch])
            mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in batch])
            recorder.tokens(ids, mask)
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    return [*read_attention_record(out).layers]


@pytest.mark.parametrize("which", ["gated", "sunk"])
def test_padding_and_batches_do_not_change_the_sums(which, request, tmp_path):
    model, _ = request.getfixturevalue(which)
    together = _record(model, tmp_path / "a", TEXTS)
    apart = _record(model, tmp_path / "b", *([text] for text in TEXTS))
    for one, two in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.queries, two.queries)
        np.testing.assert_allclose(one.sums, two.sums, rtol=1e-4, atol=1e-4)


def test_only_announced_passes_count_and_nothing_that_gradients_run_again(gated, tmp_path):
    model, _ = gated
    ids = torch.tensor([TEXTS[2]])
    plain = _record(model, tmp_path / "a", [TEXTS[2]])
    model.activation_checkpointing_enable()
    model.train().requires_grad_(True)
    try:
        with AttentionRecorder(model, tmp_path / "b") as recorder:
            model(input_ids=ids, use_cache=False)
            recorder.tokens(ids)
            model(input_ids=ids, use_cache=False).logits.sum().backward()
    finally:
        model.activation_checkpointing_disable()
        model.eval().requires_grad_(False).zero_grad()
    for one, two in zip(plain, read_attention_record(tmp_path / "b").layers, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.sums, two.sums, rtol=1e-4, atol=1e-4)


def test_without_attention_weights_gates_are_known_and_sinks_are_not(gated, tmp_path):
    model, folder = gated
    model.set_attn_implementation("sdpa")
    try:
        (sums,) = _record(model, tmp_path / "rec", TEXTS, checkpoint=folder)
    finally:
        model.set_attn_implementation("eager")
    assert (sums.has_heads, sums.has_weights, sums.has_places) == (True, False, False)
    found = mg.attention(folder, tokens=tmp_path / "rec")
    (layer,) = found.value.layers
    assert layer.on_tokens is not None
    assert "gate_mean" in layer.on_tokens.figures
    assert not {"first_token_mass", "gate_first_correlation"} & layer.on_tokens.figures.keys()
    assert "how much goes to first tokens was not looked at" in " ".join(found.text().split())


def test_a_gate_that_a_bias_closes_takes_the_energy_away(tmp_path):
    """At a bias of -6 a gate is 1/400: one minus its square, whatever the token."""
    model = attention_model("qwen3_next__bias")
    model.save_pretrained(tmp_path / "open")
    for path, parameter in model.named_parameters():
        if path.endswith("3.self_attn.q_proj.bias"):
            parameter.copy_(torch.full_like(parameter, -6.0))
        if path.endswith("3.self_attn.q_proj.weight"):
            parameter.mul_(0.0)
    _record(model, tmp_path / "rec", TEXTS)
    model.save_pretrained(tmp_path / "shut")
    (layer,) = mg.attention(tmp_path / "shut", tokens=tmp_path / "rec").value.layers
    assert layer.on_tokens is not None
    found = {name: figure.mean for name, figure in layer.on_tokens.figures.items()}
    gate = 1.0 / (1.0 + np.exp(6.0))
    assert found["gate_mean"] == pytest.approx(gate, rel=1e-6)
    assert found["gate_closed_share"] == 1.0
    assert found["energy_removed_share"] == pytest.approx(1.0 - gate**2, rel=1e-6)
    assert found["gate_first_correlation"] is None
    assert found["gate_median"] == pytest.approx(gate, rel=0.07)
    with pytest.raises(RecordingError, match="other gates"):
        mg.attention(tmp_path / "open", tokens=tmp_path / "rec")


def test_random_rows_are_as_long_as_those_of_the_gate(gated, tmp_path):
    """Their gates vary about as much as inputs and lengths say: the pull is finite and another."""
    model, _ = gated
    (sums,) = _record(model, tmp_path / "rec", TEXTS)
    own, random = sums.rows[:, 1].sum(axis=(1, 2))
    assert own != random
    assert random == pytest.approx(own, rel=0.25)
    assert sums.histogram.sum(axis=2).tolist() == [[sums.rows.shape[3] * sums.tokens.sum()] * 4] * 2


def test_another_checkpoint_is_refused_and_a_rounded_one_is_the_same(gated, tmp_path):
    model, _ = gated
    other = attention_model(GATED)
    for path, parameter in other.named_parameters():
        if "q_proj" in path:
            parameter.add_(0.1)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(RecordingError, match="are not those of the checkpoint"):
        AttentionRecorder(model, tmp_path / "rec", checkpoint=tmp_path / "other")
    _, folder = gated
    half = attention_model(GATED).to(torch.bfloat16)
    (sums,) = _record(half, tmp_path / "rec", TEXTS, checkpoint=folder)
    (layer,) = mg.attention(folder, tokens=tmp_path / "rec").value.layers
    assert layer.on_tokens is not None and sums.tokens.sum() == sum(map(len, TEXTS))


def test_a_model_without_known_gates_and_a_block_without_tokens_are_errors(gated, tmp_path):
    model, _ = gated
    with pytest.raises(RecordingError, match="no gate and no learned sink of model_type 'olmoe'"):
        AttentionRecorder(sample_of("olmoe-balanced").model, tmp_path / "a")
    with (
        pytest.raises(RecordingError, match="no attention layer saw a token"),
        AttentionRecorder(model, tmp_path / "b"),
    ):
        model(input_ids=torch.tensor([TEXTS[0]]), use_cache=False)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UsageError, match="AttentionRecorder"):
        RouterRecorder(model, tmp_path / "c", keep="attention")


def test_a_pass_with_a_cache_knows_no_first_token(sunk, tmp_path):
    model, _ = sunk
    ids = torch.tensor([TEXTS[2]])
    with torch.no_grad():
        cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
    with AttentionRecorder(model, tmp_path / "rec") as recorder:
        recorder.tokens(ids[:, 4:])
        model(input_ids=ids[:, 4:], past_key_values=cache)
    assert not any(one.has_places for one in read_attention_record(tmp_path / "rec").layers)


def _request(folder: Path, tmp_path: Path, **given: Any) -> CaptureRequest:
    text = tmp_path / "texts.jsonl"
    text.write_text("\n".join(json.dumps({"token_ids": one}) for one in TEXTS))
    usual = {"keep": "attention", "tokenizer": "bytes"}
    usual |= {"texts": (parse_text_file(str(text)),), "out": tmp_path / "rec"}
    return CaptureRequest(folder, **usual | given)


def test_the_command_records_what_the_recorder_does(sunk, tmp_path):
    model, folder = sunk
    request = _request(folder, tmp_path, keep="attention:1-2", dtype="float32")
    found = capture(request, plan_capture(request))
    assert found.num_tokens == sum(map(len, TEXTS))
    recorded = read_attention_record(tmp_path / "rec").layers
    own = _record(model, tmp_path / "own", *([text] for text in TEXTS))[1:3]
    assert [one.name for one in recorded] == ["text/1", "text/2"]
    for one, two in zip(recorded, own, strict=True):
        np.testing.assert_allclose(one.sums, two.sums, rtol=1e-5, atol=1e-6)
    said = " ".join(mg.attention(folder, tokens=tmp_path / "rec").text().split())
    assert "2 layers not in the recording, by weights alone." in said
    for option in ({"fold": True}, {"restart": True}):
        with pytest.raises(UsageError, match="does not apply to --keep attention"):
            plan_capture(_request(folder, tmp_path, out=tmp_path / "none", **option))


def test_a_recording_for_scans_is_none_of_attention_and_the_other_way_round(sunk, tmp_path):
    _record(sunk[0], tmp_path / "rec", TEXTS)
    (tmp_path / "other").mkdir()
    with pytest.raises(RecordingError, match="nothing of attention was recorded"):
        mg.attention(sunk[1], tokens=tmp_path / "other")
    with pytest.raises(MoeGeomError) as raised:
        open_tokens(tmp_path / "rec")
    assert "moegeom attention CKPT --tokens" in raised.value.hint


def test_a_damaged_record_is_refused(gated, tmp_path):
    _record(gated[0], tmp_path / "rec", TEXTS)
    file, sums = tmp_path / "rec" / FACTS_FILE, tmp_path / "rec" / SUMS_FILE
    facts, arrays = json.loads(file.read_text()), load_file(sums)
    (layer,) = facts["layers"]
    for other_facts, other_arrays in (
        ({"schema": facts["schema"] + 1}, {}),
        ({"layers": [layer | {"heads": layer["heads"] + 1}]}, {}),
        ({}, {"text/3.rows": arrays["text/3.rows"][:, :1].copy()}),
        ({}, {"text/3.tokens": -arrays["text/3.tokens"]}),
    ):
        file.write_text(json.dumps(facts | other_facts))
        save_file(arrays | other_arrays, sums)
        with pytest.raises(RecordingError):
            read_attention_record(tmp_path / "rec")
