"""What was done to an export is what its sign-off says, line by line."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex

import ml_dtypes
import numpy as np
import pytest
from scipy.stats import ortho_group, sem

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError, RecordingError, RouterError, UsageError
from moegeom.core.router import GroupMask, LogitMap, Norm, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TokenColumns
from moegeom.document import View
from moegeom.document.render import render
from moegeom.router.load import load_routers
from moegeom.studies.changes.edit import EDITS, Exported
from moegeom.studies.signoff.document import document
from moegeom.studies.signoff.function import rotation_line
from moegeom.studies.signoff.judgement import judge
from moegeom.studies.signoff.record import LINE_NAMES, SignOff
from moegeom.studies.signoff.study import SignOffRequest, sign_off
from moegeom.tokens.recording.writer import RecordingWriter
from tests.museum.checkpoint import BF16, F32, Checkpoint, name_of
from tests.museum.exhibit_rounding import quantised
from tests.museum.exhibit_smoothing import smoothed
from tests.museum.exhibit_storage import STORAGE_UNKNOWN
from tests.museum.healthy import glm_model, in_float32, sigmoid_model, softmax_model
from tests.museum.renumbering import permuted, text_order, within_groups
from tests.unit.tokens.dialects.test_counts import write_megatron
from tests.unit.tokens.dialects.written import Written, write_vllm

TOKENS, DOCUMENT = 512, 32
ORDER = text_order(32)


def softmax() -> Checkpoint:
    return softmax_model(layers=2)


def single() -> Checkpoint:
    return in_float32(softmax())


def all_single() -> Checkpoint:
    """Gains in float32 as well."""
    return single().edited("gain", noisy(1e-3), dtype=F32)


def cast(model: Checkpoint) -> Checkpoint:
    return model.edited("weight", lambda w, _: w, dtype=BF16)


@functools.cache
def rotation() -> np.ndarray:
    return ortho_group.rvs(256, random_state=3)


def rotated(model: Checkpoint) -> Checkpoint:
    """As QuaRot does: the gain goes into what reads it, and the hidden states turn."""
    gains = {layer: model.tensors[name_of("gain", layer)].astype(float) for layer in model.layers}
    turned = model.edited("weight", lambda w, layer: (w * gains[layer]) @ rotation())
    return turned.edited("gain", lambda g, _: np.ones_like(g))


def coarse_fp8(model: Checkpoint) -> Checkpoint:
    """Stored as fp8 with one scale, as DeepSeek's exports store the other layers."""
    new = {}
    for layer in model.layers:
        name = name_of("weight", layer)
        weight = model.tensors[name].astype(np.float64)
        scale = np.full((1, 2), np.abs(weight).max() / 400.0)
        new[name] = (weight / scale[0, 0]).astype(ml_dtypes.float8_e4m3fn)
        new[f"{name}_scale_inv"] = scale.astype(np.float32)
    return model.changed(new)


def noisy(share: float):
    def changed(values, layer):
        noise = np.random.default_rng([17, layer]).standard_normal(values.shape)
        return values + share * np.sqrt((values**2).mean()) * noise

    return changed


def int4(model: Checkpoint) -> Checkpoint:
    return model.edited("weight", lambda w, _: quantised(w, 4, 128))


def common(w, layer):
    return w + 0.05 * np.random.default_rng([17, layer]).standard_normal(w.shape[1])


@pytest.fixture
def sign(tmp_path, monkeypatch):
    """A sign-off of two checkpoints in memory, with recordings made in the same folder."""
    monkeypatch.chdir(tmp_path)

    def found(a: Checkpoint, b: Checkpoint, **options) -> SignOff:
        for name, model in (("a", a), ("b", b)):
            if not (tmp_path / name).exists():
                model.write(tmp_path / name)
        return sign_off(SignOffRequest("a", "b", **options))

    return found


def states(found: SignOff) -> list[str]:
    return [line.state for line in found.lines]


def said(found: SignOff, line: int) -> str:
    return " ".join([found.lines[line].sentence, *found.lines[line].details])


# --------------------------------------------------------------------------------------- weights

#: Name, A, what was done to it, states of the first three lines, words of the second or third.
EXPORTS = {
    "untouched": (softmax, lambda m: m, "passed passed passed", "same numbers"),
    "the same numbers in float32": (
        *(softmax, lambda m: m.edited("weight", lambda w, _: w, dtype=F32)),
        *("passed passed passed", "same numbers"),
    ),
    "smoothed, router scaled inversely": (
        *(softmax, lambda m: smoothed(m, 3.0, True), "passed passed passed"),
        "gain folded: gain and columns changed inversely, W diag(g) is the same up to",
    ),
    "smoothed in float32": (
        *(all_single, lambda m: smoothed(m, 1.2, True), "passed passed passed"),
        "gain folded",
    ),
    "smoothed and cast": (
        *(all_single, lambda m: cast(smoothed(m, 1.2, True)), "passed failed failed"),
        "digits were lost",
    ),
    "smoothed, router forgotten": (
        *(softmax, lambda m: smoothed(m, 1.2, False), "passed failed failed"),
        "weight the same, gain changed",
    ),
    "router scaled, gain forgotten": (
        *(softmax, lambda m: smoothed(m, 1.2, True).changed(gains(m)), "passed failed failed"),
        "columns scaled",
    ),
    "rotated": (softmax, rotated, "passed passed passed", "rotated"),
    "rotated and quantised": (
        *(softmax, lambda m: rotated(int4(m)), "passed failed failed"),
        "digits were lost",
    ),
    "cast to bf16": (
        *(single, cast, "passed failed failed"),
        "rounded to bf16",
    ),
    "dequantised int4": (softmax, int4, "passed failed failed", "rounded to int4"),
    "stored as fp8": (softmax, coarse_fp8, "passed failed failed", "f8_e4m3 with scales in B"),
    "folded and quantised": (
        *(softmax, lambda m: coarse_fp8(smoothed(m, 1.2, True)), "passed failed failed"),
        "f8_e4m3 with scales in B",
    ),
    "trained on": (
        *(softmax, lambda m: m.edited("weight", noisy(0.02)), "passed failed failed"),
        "rows changed by 2 %, no pattern",
    ),
    "experts renumbered": (
        *(softmax, lambda m: permuted(m, ORDER, ("weight",)), "passed inconclusive passed"),
        "permuted (30 of 32 rows)",
    ),
    "shifted in front of a softmax": (
        *(softmax, lambda m: m.edited("weight", common), "passed passed passed"),
        "common shift",
    ),
    "bias cast": (
        *(lambda: glm_model(0.0), lambda m: m.edited("bias", lambda b, _: b, dtype=BF16)),
        *("passed failed passed", "selection bias rounded to bf16"),
    ),
    "bias shifted": (
        *(lambda: glm_model(0.0), lambda m: m.edited("bias", lambda b, _: b + 0.25)),
        *("passed passed passed", "selection bias shifted"),
    ),
    "bias of other experts": (
        *(lambda: glm_model(0.0), lambda m: m.edited("bias", noisy(0.1)), "passed failed passed"),
        "selection bias changed",
    ),
}


def gains(model: Checkpoint) -> dict[str, np.ndarray]:
    return {name_of("gain", n): model.tensors[name_of("gain", n)] for n in model.layers}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_judged_by_what_was_done_to_it(sign, name):
    model, export, wanted, words = EXPORTS[name]
    found = sign(model(), export(model()))
    assert states(found) == [*wanted.split(), "inconclusive"], [*map(str, found.lines)]
    assert words in " ".join(said(found, line) for line in range(3))
    assert found.exit_code == (1 if "failed" in wanted else 4)


def test_a_right_fold_changes_every_weight_and_a_wrong_one_none():
    right, wrong = smoothed(softmax(), 3.0, True), smoothed(softmax(), 3.0, False)
    for layer in softmax().layers:
        name = name_of("weight", layer)
        assert (right.tensors[name] != softmax().tensors[name]).mean() > 0.99
        np.testing.assert_array_equal(wrong.tensors[name], softmax().tensors[name])


def test_the_rounding_of_a_fold_is_the_distance_of_the_effective_rows(sign):
    before, after = softmax(), smoothed(softmax(), 3.0, True)
    line = sign(before, after).lines[1]
    rows = [
        model.tensors[name_of("weight", 0)].astype(float)
        * model.tensors[name_of("gain", 0)].astype(float)
        for model in (before, after)
    ]
    centred = [r - r.mean(axis=0) for r in rows]
    moved = np.linalg.norm(centred[1] - centred[0]) / np.linalg.norm(rows[0])
    assert f"up to a rounding of {100 * moved:.2g} % (A's own precision: 0." in line.details[0]


def test_a_rotation_passes_line_two_through_line_three(sign):
    found = sign(softmax(), rotated(softmax()))
    assert found.lines[1].sentence == "layers 0-1 rotated."
    assert "rotated: judged in the next line." in found.lines[1].details
    assert "hidden states were rotated alike" in said(found, 2)
    noise = found.lines[2].evidence["gram_noise"]["text/0"]
    assert 0.0 < noise < 2.0**-8


def test_a_router_that_is_missing_is_named(sign):
    export = softmax().changed({name_of("weight", 1): None})
    found = sign(softmax(), export)
    assert states(found)[0] == "failed"
    assert "1 of 2 routers missing in B: text/1" in said(found, 0)
    assert found.exit_code == 1


def test_a_router_that_only_the_export_has_is_told_and_not_compared(sign):
    found = sign(softmax().changed({name_of("weight", 1): None}), softmax())
    assert states(found)[:3] == ["passed"] * 3
    assert "Only in B and not compared: text/1" in said(found, 0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_experts_per_tok": 8}, "another rule in layers 0-1: experts chosen 4 in A, 8 in B"),
        ({"rms_norm_eps": 1e-3}, "another norm in layers 0-1: rms norm with epsilon 1e-06 in A"),
    ],
)
def test_another_rule_or_norm_fails_although_all_numbers_are_the_same(sign, config, words):
    found = sign(softmax(), softmax().changed(config=config))
    assert states(found)[:2] == ["failed", "passed"]
    assert words in said(found, 0)


def test_another_shape_fails(sign):
    found = sign(softmax(), softmax_model(layers=2, experts=16))
    assert "another shape in layers 0-1: 32 x 256 in A, 16 x 256 in B" in said(found, 0)
    assert found.exit_code == 1


@pytest.mark.parametrize("case", STORAGE_UNKNOWN.sizes[:2], ids=lambda case: case.text)
def test_a_scale_that_nobody_knows_fails_in_the_words_of_the_loader(sign, tmp_path, case):
    found = sign(softmax_model(), case.build())
    with pytest.raises(RouterError) as refusal:
        load_routers(open_checkpoint(tmp_path / "b"))
    assert states(found) == ["failed", "inconclusive", "inconclusive", "inconclusive"]
    assert refusal.value.message in found.lines[0].sentence
    assert found.exit_code == 1


def test_a_selection_bias_that_was_dropped_fails_the_first_line(sign):
    model = sigmoid_model(layers=2)
    found = sign(model, model.changed({name_of("bias", 1): None}))
    assert states(found)[0] == "failed"
    assert "e_score_correction_bias" in said(found, 0)


def test_an_export_without_any_router_is_an_input_error(sign):
    empty = softmax().changed({name_of("weight", n): None for n in softmax().layers})
    with pytest.raises(RouterError):
        sign(softmax(), empty)


def test_an_unreadable_original_is_an_input_error_never_a_line(sign):
    with pytest.raises(RouterError):
        sign(STORAGE_UNKNOWN.sizes[0].build(), softmax_model())
    with pytest.raises(CheckpointError):
        sign_off(SignOffRequest("nowhere", "a"))


def test_an_order_that_mixes_groups_fails(sign):
    model = sigmoid_model(layers=2)
    mixed = permuted(model, [*range(1, 64), 0], ("weight", "bias"))
    assert states(sign(model, mixed))[1] == "failed"


def test_an_order_within_groups_is_inconclusive(sign):
    model = sigmoid_model(layers=2)
    moved = permuted(model, within_groups(64, 2), ("weight", "bias"))
    assert states(sign(model, moved))[1:3] == ["inconclusive", "passed"]


def test_one_bad_router_among_good_ones_is_named_by_its_layer(sign):
    found = sign(softmax(), softmax().edited("weight", noisy(0.02), layers=[1]))
    assert found.lines[1].sentence == (
        "layer 1 rows changed by 2 %, no pattern; 1 of 2 routers are the same numbers."
    )
    assert found.lines[2].sentence == "no rotation explains what happened to layer 1."


def test_only_the_layers_that_were_asked_for_are_judged(sign):
    broken = softmax().edited("weight", noisy(0.02), layers=[1])
    assert states(sign(softmax(), broken, layers="0"))[:3] == ["passed"] * 3
    found = sign(softmax(), broken, layers="0,7")
    assert "A: layer 7 was asked for and has no router." in found.notes


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_no_numbers_fail(sign, value):
    broken = softmax().edited("weight", lambda w, _: np.where(w == w.max(), value, w))
    found = sign(softmax(), broken)
    assert states(found)[:2] == ["passed", "failed"]
    assert "not finite" in said(found, 1)


def test_a_cast_beside_an_infinity_is_still_named(sign):
    broken = single().edited("weight", lambda w, _: np.where(w == w.max(), np.inf, w))
    found = sign(broken, cast(broken))
    assert states(found)[1] == "failed"
    assert "rounded to bf16" in said(found, 1)


SOFTMAX = Rule(4, "softmax", Weights("scores"))
SIGMOID = Rule(4, "sigmoid", Weights("scores"), has_selection_bias=True)
ZERO_FILLED = Rule(4, "sigmoid", Weights("scores"), True, groups=GroupMask(4, 2, "top2_sum", 0.0))
INF_FILLED = Rule(
    4, "sigmoid", Weights("scores"), True, groups=GroupMask(4, 2, "top2_sum", -np.inf)
)
CAPPED = Rule(4, "softmax", Weights("scores"), logit_map=LogitMap(soft_cap=30.0))


@pytest.mark.parametrize(
    ("word", "rule", "state"),
    [
        ("common shift", SOFTMAX, "passed"),
        ("common shift", CAPPED, "failed"),
        ("common shift", SIGMOID, "failed"),
        ("logit bias shifted", SOFTMAX, "passed"),
        ("selection bias shifted", SIGMOID, "passed"),
        ("selection bias shifted", INF_FILLED, "passed"),
        ("selection bias shifted", ZERO_FILLED, "failed"),
    ],
)
def test_a_shift_is_judged_by_the_rule(word, rule, state):
    router = Router("text/0", "text", 0, np.eye(8), rule, Provenance("made up", ("w",), "", "F32"))
    pair = Exported(router, router, np.arange(8))
    assert EDITS[word].judge(EDITS[word].change(rule), pair).state == state


def of_layer_norm(**parts) -> Router:
    """A router with everything beside its rows that a family may have."""
    random = np.random.default_rng(0)
    known = {
        "weight": random.standard_normal((8, 64)).astype(np.float32),
        "gain": np.ones(64, np.float32),
        "norm_bias": random.standard_normal(64).astype(np.float32),
        "shared_rows": random.standard_normal((1, 64)).astype(np.float32),
        "expert_scale": np.linspace(1.0, 2.0, 8, dtype=np.float32),
        "norm": Norm("layer", 1e-5, "norm.weight", bias_tensor="norm.bias"),
    }
    identity = ("text/0", "text", 0)
    rule, provenance = SOFTMAX, Provenance("made up", ("w",), "", "F32")
    values = known | parts
    return Router(*identity, values.pop("weight"), rule, provenance, **values)


def folded_by_two() -> dict[str, np.ndarray]:
    router = of_layer_norm()
    assert router.gain is not None
    return {"weight": 2.0 * router.weight, "gain": 0.5 * router.gain}


@pytest.mark.parametrize(
    ("parts", "state"),
    [
        ({}, "passed"),
        ({"expert_scale": np.ones(8, np.float32)}, "failed"),
        ({"expert_scale": None}, "failed"),
        ({"norm_bias": np.zeros(64, np.float32)}, "failed"),
        ({"shared_rows": np.zeros((1, 64), np.float32)}, "failed"),
        ({"shared_rows": np.zeros((2, 64), np.float32)}, "failed"),
        (folded_by_two(), "passed"),
        (folded_by_two() | {"norm_bias": np.zeros(64, np.float32)}, "inconclusive"),
        (folded_by_two() | {"shared_rows": np.zeros((1, 64), np.float32)}, "inconclusive"),
        (folded_by_two() | {"expert_scale": np.ones(8, np.float32)}, "failed"),
    ],
)
def test_what_stands_beside_the_rows_is_looked_at(parts, state):
    assert judge(of_layer_norm(), of_layer_norm(**parts)).state == state


def test_a_scale_of_experts_moves_along_with_renumbered_rows():
    router, order = of_layer_norm(), [3, 0, 1, 2, 7, 4, 5, 6]
    assert router.expert_scale is not None
    moved = {"weight": router.weight[order], "expert_scale": router.expert_scale[order]}
    assert judge(router, of_layer_norm(**moved)).state == "inconclusive"
    left = {"weight": router.weight[order]}
    assert judge(router, of_layer_norm(**left)).state == "failed"


# --------------------------------------------------------------------------------- routing on text


def token_columns(seed: int = 1) -> TokenColumns:
    token = np.arange(TOKENS)
    return TokenColumns(
        document=token // DOCUMENT,
        position=(token % DOCUMENT).astype(np.int32),
        token_id=np.random.default_rng(seed).integers(0, 5000, TOKENS).astype(np.int32),
        domain=np.zeros(TOKENS, np.int16),
    )


def inputs(layer: int, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """Directions in front of the gain, as one run after another has them."""
    clean = np.random.default_rng([5, layer]).standard_normal((TOKENS, 256))
    return clean + noise * np.random.default_rng([seed, layer]).standard_normal(clean.shape)


@pytest.fixture
def record(tmp_path):
    """What a checkpoint of the museum chooses on ``inputs``, as a recording."""

    def write(name: str, side: str, model: Checkpoint, noise=0.0, seed=0, **facts):
        folder = tmp_path / side
        routers = load_routers(open_checkpoint(folder if folder.exists() else model.write(folder)))
        chosen = {}
        for router in routers.routers:
            assert router.gain is not None
            logits = inputs(router.layer, noise, seed) @ (router.weight * router.gain).T
            chosen[router.name] = np.argsort(-logits, axis=1)[:, : router.rule.top_k].astype(
                np.int32
            )
        options = {"columns": token_columns(), "stage": "ids", "engine": "test"} | facts
        names = options.get("routers") or tuple(chosen)
        with RecordingWriter(
            *(tmp_path / name, options["stage"], names),
            checkpoint_name=side,
            fingerprint=routers.fingerprint,
            engine=options["engine"],
            domains=("all",),
        ) as writer:
            values = None
            if options["stage"] == "router_input":
                unit = {n: inputs(n) for n in (0, 1)}
                values = {
                    r.name: (unit[r.layer] / np.sqrt((unit[r.layer] ** 2).mean(1, keepdims=True)) * r.gain).astype(np.float32)
                    for r in routers.routers
                }  # fmt: skip
            kept = {n: chosen[n] for n in names} if options.get("has_chosen", True) else None
            writer.append(options["columns"], values, kept)
        return chosen

    return write


def test_without_recordings_the_commands_that_make_them_are_told(sign):
    line = sign(softmax(), softmax()).lines[3]
    assert line.state == "inconclusive"
    *captures, again = [shlex.split(text) for text in line.commands]
    assert [words[:3] for words in captures] == [["moegeom", "capture", side] for side in "aba"]
    assert all(words[5:7] == ["--keep", "ids"] for words in captures)
    outs = [words[words.index("--out") + 1] for words in captures]
    assert again[:4] == ["moegeom", "signoff", "a", "b"]
    assert [again[n + 1] for n, word in enumerate(again) if word in ("--tokens", "--rerun")] == outs


def test_shares_are_those_of_sets_that_differ(sign, record):
    a = record("rec_a", "a", softmax())
    b = record("rec_b", "b", softmax(), noise=0.02, seed=9)
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"))
    flipped = np.array([[set(x) != set(y) for x, y in zip(a[r], b[r], strict=True)] for r in a])
    between = found.lines[3].evidence["between"]
    assert 0.0 < flipped.mean() < 0.5
    np.testing.assert_allclose(between["share"], flipped.mean())
    np.testing.assert_allclose(between["tokens_share"], flipped.any(axis=0).mean())
    np.testing.assert_allclose(list(between["by_router"].values()), flipped.mean(axis=1))
    by_document = flipped.mean(axis=0).reshape(-1, DOCUMENT).mean(axis=1)
    np.testing.assert_allclose(between["error"], sem(by_document))
    assert (found.exit_code, found.lines[3].state) == (4, "not judged")
    assert "Measured, not judged: no limit was given (--max-flipped" in said(found, 3)
    assert "--rerun REC_A2" in said(found, 3)
    assert "rests on the order of --tokens" in " ".join(found.notes)


def test_a_limit_below_the_share_fails_and_one_at_it_passes(sign, record):
    record("rec_a", "a", softmax())
    record("rec_b", "b", softmax(), noise=0.02, seed=9)
    tokens = ("rec_a", "rec_b")
    share = sign(softmax(), softmax(), tokens=tokens).lines[3].evidence["between"]["share"]
    at = sign(softmax(), softmax(), tokens=tokens, max_flipped=share)
    below = sign(softmax(), softmax(), tokens=tokens, max_flipped=0.99 * share)
    assert (at.exit_code, below.exit_code) == (0, 1)
    assert "Within the limit" in said(at, 3)
    assert "More than the limit" in said(below, 3)


def test_the_rerun_is_what_a_differs_from_itself(sign, record):
    record("rec_a", "a", softmax())
    record("rec_b", "b", softmax(), noise=0.02, seed=9)
    record("rec_a2", "a", softmax(), noise=0.002, seed=10)
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"), rerun="rec_a2")
    evidence = found.lines[3].evidence
    ratio = evidence["between"]["share"] / evidence["rerun"]["share"]
    assert 3.0 < ratio < 30.0
    assert f"B differs {ratio:.2g} times as often" in said(found, 3)
    swapped = sign(softmax(), softmax(), tokens=("rec_a", "rec_a2"), rerun="rec_b")
    np.testing.assert_allclose(swapped.lines[3].evidence["times_rerun"], 1.0 / ratio)


def test_a_rerun_that_never_differs_is_nothing_to_divide_by(sign, record):
    record("rec_a", "a", softmax())
    record("rec_b", "b", softmax(), noise=0.02, seed=9)
    record("rec_a2", "a", softmax())
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"), rerun="rec_a2")
    assert found.lines[3].evidence["times_rerun"] is None
    assert "nothing to hold B against" in said(found, 3)


def test_renumbered_experts_are_compared_under_their_old_names(sign, record):
    moved = permuted(softmax(), ORDER, ("weight",))
    record("rec_a", "a", softmax())
    record("rec_b", "b", moved)
    found = sign(softmax(), moved, tokens=("rec_a", "rec_b"))
    assert found.lines[3].evidence["between"]["share"] == 0.0
    assert found.exit_code == 4  # whether the experts moved along is not known


def test_recordings_of_different_texts_are_refused_with_counts(sign, record):
    record("rec_a", "a", softmax())
    record("rec_b", "b", softmax(), columns=token_columns(seed=2))
    with pytest.raises(RecordingError, match=r"5\d\d of 512 matched rows are of another token"):
        sign(softmax(), softmax(), tokens=("rec_a", "rec_b"))


def test_recordings_with_few_tokens_in_common_are_refused_with_counts(sign, record):
    record("rec_a", "a", softmax())
    mixed, mine = token_columns(seed=2), token_columns()
    ids = np.where(mine.document < 3, mine.token_id, mixed.token_id).astype(np.int32)
    columns = TokenColumns(mine.document, mine.position, ids, mine.domain)
    record("rec_b", "b", softmax(), columns=columns)
    with pytest.raises(RecordingError, match="rec_b has 96 of the 512 tokens of rec_a"):
        sign(softmax(), softmax(), tokens=("rec_a", "rec_b"))


@pytest.mark.parametrize("side", ["a", "b"])
def test_router_inputs_without_choices_are_refused_with_how_to_record_them(sign, record, side):
    for name in "ab":
        options = {"stage": "router_input", "has_chosen": False} if name == side else {}
        record(f"rec_{name}", name, softmax(), **options)
    with pytest.raises(RecordingError, match="router input and not what was chosen") as caught:
        sign(softmax(), softmax(), tokens=("rec_a", "rec_b"))
    assert f"rec_{side}" in caught.value.message
    assert "--keep ids" in caught.value.hint


def test_router_inputs_with_choices_are_compared_by_their_choices(sign, record):
    a = record("rec_a", "a", softmax(), stage="router_input")
    b = record("rec_b", "b", softmax(), noise=0.02, seed=9)
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"))
    differ = np.mean([[set(x) != set(y) for x, y in zip(a[r], b[r], strict=True)] for r in a])
    np.testing.assert_allclose(found.lines[3].evidence["between"]["share"], differ)


def test_a_recording_of_the_other_side_is_refused_unless_that_is_allowed(sign, record):
    cast = smoothed(softmax(), 1.2, True)
    record("rec_a", "a", softmax())
    record("rec_b", "b", cast, noise=0.01, seed=4)
    with pytest.raises(RecordingError, match="another checkpoint"):
        sign(softmax(), cast, tokens=("rec_b", "rec_a"))
    found = sign(softmax(), cast, tokens=("rec_b", "rec_a"), stale_inputs=True)
    assert "RECORDED FROM ANOTHER CHECKPOINT" in found.sides[0].tokens


def test_a_router_that_was_not_recorded_leaves_the_line_inconclusive(sign, record):
    record("rec_a", "a", softmax())
    record("rec_b", "b", softmax(), noise=0.01, seed=4, routers=("text/0",))
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"), max_flipped=0.9)
    assert (found.lines[3].state, found.exit_code) == ("inconclusive", 4)
    assert "layer 1 not recorded on both sides" in said(found, 3)


def written(chosen: dict[str, np.ndarray]) -> list[Written]:
    """The choices as vLLM keeps them: requests that are one row short."""
    ids, columns = np.stack(list(chosen.values()), axis=1), token_columns()
    requests = []
    for number in range(TOKENS // DOCUMENT):
        rows = columns.document == number
        tokens = columns.token_id[rows].astype(np.int64)
        requests.append(Written(f"r{number}", ids[rows][:-1], tokens, num_prompt=5))
    return requests


@pytest.mark.parametrize("sides", ["b", "ab"])
def test_the_trace_of_an_engine_serves_as_a_recording(sign, record, tmp_path, sides):
    a = record("rec_a", "a", softmax())
    b = record("rec_b", "b", softmax(), noise=0.02, seed=9)
    for side, chosen in (("a", a), ("b", b)):
        write_vllm(tmp_path / f"{side}.jsonl", written(chosen))
    tokens = ("a.jsonl" if "a" in sides else "rec_a", "b.jsonl")
    between = sign(softmax(), softmax(), tokens=tokens).lines[3].evidence["between"]
    kept = token_columns().position < DOCUMENT - 1
    differ = np.mean(
        [[set(x) != set(y) for x, y in zip(a[r][kept], b[r][kept], strict=True)] for r in a]
    )
    np.testing.assert_allclose(between["share"], differ)
    assert between["num_tokens"] == kept.sum()


def test_counts_are_refused_because_they_hold_no_token(sign, record, tmp_path):
    record("rec_a", "a", softmax())
    write_megatron(tmp_path / "counts.jsonl", np.full((4, 2, 32), 32))
    with pytest.raises(RecordingError, match="holds counts and not what was chosen"):
        sign(softmax(), softmax(), tokens=("rec_a", "counts.jsonl"))


def test_engines_that_differ_are_told(sign, record):
    record("rec_a", "a", softmax(), engine="one 1.0")
    record("rec_b", "b", softmax(), noise=0.01, seed=4, engine="other 2.0")
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"))
    assert "A was recorded by 'one 1.0', B by 'other 2.0'" in " ".join(found.notes)


# ---------------------------------------------------------------------------- what cannot be meant


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": ("rec_a",)}, "given 1 times"),
        ({"tokens": ("x", "y", "z")}, "given 3 times"),
        ({"tokens": ("rec_a", "./rec_a")}, "named twice"),
        ({"tokens": ("rec_a", "rec_b"), "rerun": "rec_a"}, "named twice"),
        ({"rerun": "rec_a"}, "--rerun is about recordings"),
        ({"max_flipped": 0.1}, "--max-flipped is about recordings"),
        ({"stale_inputs": True}, "--stale-inputs is about recordings"),
        ({"tokens": ("rec_a", "rec_b"), "max_flipped": 2.0}, "a share from 0 to less than 1"),
        (
            {"tokens": ("rec_a", "rec_b"), "max_flipped": float("nan")},
            "a share from 0 to less than 1",
        ),
        ({"layers": "x"}, "neither a layer"),
        ({"layers": "7"}, "no layer with a router"),
    ],
)
def test_what_cannot_be_meant_is_refused(sign, options, words):
    with pytest.raises(UsageError, match=words):
        sign(softmax(), softmax(), **options)


# ----------------------------------------------------------------------------------------- reports


@pytest.mark.parametrize("width", [76, 80, 100, 120])
@pytest.mark.parametrize("export", ["untouched", "rotated", "stored as fp8", "experts renumbered"])
def test_the_screen_fits_but_for_commands(sign, width, export):
    model, change_it, *_ = EXPORTS[export]
    found = sign(model(), change_it(model()))
    text = render(document(found, View(width)), "table", View(width))
    lines = [
        line for line in text.splitlines() if not line.strip().startswith(("next ", "fill in "))
    ]
    assert [line for line in lines if len(line) > width] == []
    for name in LINE_NAMES:
        assert f"{name}: " in text
    assert f"exit {found.exit_code}" in text
    assert "Not checked: expert weights" in " ".join(text.split())


def test_markdown_has_a_row_for_each_line_and_json_its_numbers(sign):
    found = sign(softmax(), smoothed(softmax(), 1.2, False))
    text = render(document(found, View()), "md", View())
    rows = re.findall(r"^- \*\*([a-z ]+)\*\* [a-z ]+:", text, re.MULTILINE)
    assert rows == states(found)
    told = json.loads(render(document(found, View()), "json", View()))
    assert told["exit_code"] == 1
    assert [line["state"] for line in told["lines"]] == states(found)
    routers = told["lines"][1]["evidence"]["routers"]
    assert routers["text/0"]["changes"][0]["word"] == "gain not followed"


@pytest.mark.parametrize("name", ["table", "md"])
def test_names_of_others_cannot_write_on_the_terminal(sign, name, tmp_path):
    softmax().write(tmp_path / "a\x1b[31m")
    softmax().write(tmp_path / "plain")
    found = sign_off(SignOffRequest("a\x1b[31m", "plain"))
    assert "\x1b" not in render(document(found, View()), name, View())


# ------------------------------------------------------------- no line passes without having to


def test_half_of_the_tokens_routed_otherwise_are_not_signed_off_without_a_limit(sign, record):
    record("rec_a", "a", softmax())
    record("rec_b", "b", softmax(), noise=0.5, seed=9)
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"))
    assert found.lines[3].evidence["between"]["tokens_share"] > 0.4
    assert (found.exit_code, states(found)[3]) == (4, "not judged")
    text = render(document(found, View()), "table", View())
    assert "not signed off: give --max-flipped (or --rerun)" in text
    assert "passed        routing on text" not in text


@pytest.mark.parametrize(("noise", "code"), [(0.02, 1), (0.002, 0)])
def test_without_a_limit_b_may_differ_twice_as_often_as_a_from_itself(sign, record, noise, code):
    record("rec_a", "a", softmax())
    record("rec_b", "b", softmax(), noise=noise, seed=9)
    record("rec_a2", "a", softmax(), noise=0.002, seed=10)
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"), rerun="rec_a2")
    evidence = found.lines[3].evidence
    np.testing.assert_allclose(evidence["limit"], 2.0 * evidence["rerun"]["share"])
    assert found.exit_code == code


def test_a_run_that_repeats_itself_gives_no_limit(sign, record):
    record("rec_a", "a", softmax())
    record("rec_b", "b", softmax(), noise=0.02, seed=9)
    record("rec_a2", "a", softmax())
    found = sign(softmax(), softmax(), tokens=("rec_a", "rec_b"), rerun="rec_a2")
    assert (found.exit_code, states(found)[3]) == (4, "not judged")


def test_a_limit_that_nothing_can_exceed_is_refused(sign):
    with pytest.raises(UsageError, match="less than 1"):
        sign(softmax(), softmax(), tokens=("rec_a", "rec_b"), max_flipped=1.0)


@pytest.mark.parametrize("state", ["failed", "inconclusive", "not judged"])
def test_only_four_passed_lines_exit_with_zero(sign, state):
    found = sign(softmax(), softmax())
    for number in range(4):
        lines = tuple(
            dataclasses.replace(line, state=state if at == number else "passed")
            for at, line in enumerate(found.lines)
        )
        open_one = dataclasses.replace(found, lines=lines)
        assert open_one.exit_code == (1 if state == "failed" else 4)
        assert "not signed off" in render(document(open_one, View()), "table", View())


def test_what_was_left_out_is_counted_in_the_verdict(sign):
    whole, part = sign(softmax(), softmax()), sign(softmax(), softmax(), layers="0")
    assert len(part.not_looked_at) == len(whole.not_looked_at) + 2
    assert "1 of 2 routers of A (--layers)" in part.not_looked_at
    text = render(document(part, View(width=200)), "table", View(width=200))
    assert f"{len(part.not_looked_at)} things not checked" in text


def test_routers_without_anything_in_common_are_not_told_to_stay_where_they_were():
    assert rotation_line([], ["text/0"]).state == "inconclusive"
