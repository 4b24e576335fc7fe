"""An export to GGUF that loses nothing is the same router: to diff, to signoff and to the gate."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest

from moegeom.core.router import GroupMask, LogitMap, Norm, Rule, Weights
from moegeom.studies.changes.rule import is_same_norm, rule_differences
from moegeom.studies.check.study import GateRequest, gate
from moegeom.studies.diff.study import DifferenceRequest, difference
from moegeom.studies.signoff.judgement import judge
from moegeom.studies.signoff.study import SignOffRequest, sign_off
from tests.museum.checkpoint import Checkpoint, Part, name_of
from tests.museum.healthy import softmax_model
from tests.unit.studies.edited import made_up

PARTS_IN_GGUF: dict[Part, str] = {"weight": "ffn_gate_inp", "gain": "ffn_norm"}


def as_gguf(model: Checkpoint, file: Path, **changes: object) -> Path:
    """The routers and norms of a qwen3_moe as llama.cpp stores them: everything in float32."""
    config = {**model.config, **changes}
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_expert_count(int(config["num_experts"]))
    writer.add_expert_used_count(int(config["num_experts_per_tok"]))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    for layer in model.layers:
        for part, name in PARTS_IN_GGUF.items():
            values = model.tensors[name_of(part, layer)].astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def sides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = softmax_model(layers=2)
    return str(model.write(tmp_path / "a")), str(as_gguf(model, tmp_path / "b.gguf"))


def test_a_faithful_gguf_is_identical_to_diff_and_passes_all_lines_about_weights(sides):
    record = difference(DifferenceRequest(*sides))
    assert all(router.is_identical for router in record.routers)
    assert record.unlike == ()
    assert any("A is read as" in note for note in record.notes)
    lines = sign_off(SignOffRequest(*sides)).lines
    assert [line.state for line in lines][:3] == ["passed"] * 3


def test_a_faithful_gguf_passes_the_gate_beside_a_baseline(sides, tmp_path):
    baseline = tmp_path / "base.json"
    gate(GateRequest(sides[0], baseline=baseline, update_baseline=True))
    verdict = gate(GateRequest(sides[1], baseline=baseline)).verdict
    assert (verdict.exit_code, verdict.findings) == (0, ())


def test_a_gguf_with_another_number_of_chosen_experts_fails_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = softmax_model(layers=2)
    first = str(model.write(tmp_path / "a"))
    second = str(as_gguf(model, tmp_path / "b.gguf", num_experts_per_tok=8))
    assert sign_off(SignOffRequest(first, second)).lines[0].state == "failed"
    baseline = tmp_path / "base.json"
    gate(GateRequest(first, baseline=baseline, update_baseline=True))
    verdict = gate(GateRequest(second, baseline=baseline)).verdict
    assert "MGI124" in {finding.code for finding in verdict.findings}


SIGMOID = Rule(4, "sigmoid", Weights("scores", renormalise=True, epsilon=1e-20, scale=2.827))


def test_guards_against_a_sum_of_zero_and_numbers_in_float32_are_the_same_rule():
    stored = dataclasses.replace(
        SIGMOID.weights, epsilon=0.0, floor=2.0**-14, scale=float(np.float32(2.827))
    )
    assert rule_differences(SIGMOID, dataclasses.replace(SIGMOID, weights=stored)) == []
    other = dataclasses.replace(stored, floor=0.1)
    assert rule_differences(SIGMOID, dataclasses.replace(SIGMOID, weights=other)) != []


@pytest.mark.parametrize(("eps", "same"), [(float(np.float32(1e-6)), True), (1.1e-6, False)])
def test_an_epsilon_in_float32_is_the_same_norm(eps, same):
    assert is_same_norm(Norm("rms", 1e-6, "norm"), Norm("rms", eps, "norm")) is same


CHOSEN = Rule(4, "identity", Weights("softmax_of_selected_logits"), has_logit_bias=True)


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (CHOSEN, "passed"),
        (dataclasses.replace(CHOSEN, weights=Weights("sigmoid_of_selected_logits")), "failed"),
    ],
)
def test_a_shift_of_logit_biases_passes_where_weights_are_a_softmax_of_the_chosen(rule, state):
    random = np.random.default_rng(0)
    bias, rows = random.standard_normal(16).astype(np.float32), random.standard_normal((16, 64))
    pair = (made_up(rows, rule, logit_bias=b) for b in (bias, bias + np.float32(0.5)))
    judged = judge(*pair)
    assert [change.word for change, _ in judged.changes] == ["logit bias shifted"]
    assert judged.state == state


# ------------------------------------------------------------------------------------------- rules
PLAIN = Rule(top_k=3, score="softmax", weights=Weights("scores"))

#: Another value for each field, and how the difference is told.
OTHERS = {
    "top_k": (4, "experts chosen 3 in A, 4 in B"),
    "score": ("sqrt_softplus", "score softmax in A, sqrt softplus in B"),
    "has_selection_bias": (True, "selection bias no in A, yes in B"),
    "has_logit_bias": (True, "logit bias no in A, yes in B"),
    "groups": (
        GroupMask(8, 4, "top2_sum", float("-inf")),
        "groups none in A, 4 of 8 groups (fill -inf) by top2 sum in B",
    ),
    "logit_map": (
        LogitMap(0.5, 30.0),
        "map of the logits none in A, logits x 0.5, soft cap 30 in B",
    ),
    "capacity": (64, "expert capacity none in A, 64 in B"),
    "pick": ("threshold", "experts picked by top k in A, threshold in B"),
}
OTHER_WEIGHTS = {
    "source": (
        "softmax_of_selected_logits",
        "weights from scores in A, softmax of selected logits in B",
    ),
    "renormalise": (True, "weights divided by their sum no in A, yes in B"),
    "epsilon": (1e-3, "added to that sum 0 in A, 0.001 in B"),
    "scale": (2.5, "factor of the weights 1 in A, 2.5 in B"),
    "floor": (0.1, "least sum 0 in A, 0.1 in B"),
    "power": (2.0, "power inside the sum 1 in A, 2 in B"),
    "jitter": (0.01, "jitter of the weights 0 in A, 0.01 in B"),
}


def test_every_field_of_a_rule_is_covered():
    assert {*OTHERS, "weights"} == {field.name for field in dataclasses.fields(Rule)}
    assert set(OTHER_WEIGHTS) == {field.name for field in dataclasses.fields(Weights)}


def test_what_differs_between_two_rules_is_told_in_words():
    assert rule_differences(PLAIN, dataclasses.replace(PLAIN)) == []
    for name, (value, words) in OTHERS.items():
        assert rule_differences(PLAIN, dataclasses.replace(PLAIN, **{name: value})) == [words]
    for name, (value, words) in OTHER_WEIGHTS.items():
        weights = dataclasses.replace(PLAIN.weights, **{name: value})
        assert rule_differences(PLAIN, dataclasses.replace(PLAIN, weights=weights)) == [words]
