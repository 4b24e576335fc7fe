"""What was done to an export is what its sign-off says, line by line."""

import dataclasses
import functools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from scipy.stats import sem

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError, RecordingError, RouterError
from moegeom.core.router import LogitMap, Norm, Router
from moegeom.core.tokens import TokenColumns
from moegeom.router.expert_values import values_of
from moegeom.router.load import load_routers
from moegeom.studies.changes.edit import EDITS, Exported
from moegeom.studies.changes.experts import ExpertPair
from moegeom.studies.changes.router import compare_routers
from moegeom.studies.signoff.document import document
from moegeom.studies.signoff.record import LINE_NAMES, Flips, SignOff
from moegeom.studies.signoff.study import (
    SignOffRequest,
    judge,
    measured_line,
    rotation_line,
    sign_off,
)
from moegeom.tokens.recording.writer import RecordingWriter
from tests.museum.checkpoint import (
    BF16,
    F32,
    Change,
    Checkpoint,
    Part,
    name_of,
    permuted,
    text_order,
    within_groups,
)
from tests.museum.exhibit_quantisers import quantised, smoothed
from tests.museum.exhibit_storage import STORAGE_UNKNOWN
from tests.museum.healthy import glm_model, softmax_model
from tests.unit.studies.edited import (
    INF_FILLED,
    SIGMOID,
    SOFTMAX,
    ZERO_FILLED,
    cast,
    common,
    made_up,
    noisy,
    not_finite,
    rotated,
    sigmoid,
    single,
    softmax,
    with_experts,
)
from tests.unit.studies.samples import unwrapped, worded
from tests.unit.tokens.dialects.test_counts import write_megatron
from tests.unit.tokens.dialects.written import Written, write_vllm

TOKENS, DOCUMENT = 512, 32
ORDER = text_order(32)

shown = functools.partial(worded, document)


def all_single() -> Checkpoint:
    return single().edited("gain", noisy(1e-3), dtype=F32)


def without(part: str, *layers: int):
    return lambda m: m.changed({name_of(part, layer): None for layer in layers})


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


def int4(model: Checkpoint) -> Checkpoint:
    return model.edited("weight", lambda w, _: quantised(w, 4, 128))


def edits(part: Part, change: Change, dtype: np.dtype | None = None):
    return lambda m: m.edited(part, change, dtype=dtype)


def same(values: np.ndarray, layer: int) -> np.ndarray:
    return values


def folds(spread: float, is_followed: bool = True):
    return lambda m: smoothed(m, spread, is_followed)


def glm() -> Checkpoint:
    return glm_model(0.0)


def unlike(**config: object):
    return lambda m: m.changed(config=config)


def whole(model: Checkpoint) -> Checkpoint:
    return softmax()


def other_shape(model: Checkpoint) -> Checkpoint:
    return softmax_model(layers=2, experts=16)


def moved(order: list[int], *parts: str):
    return lambda m: permuted(m, order, parts or ("weight", "bias"))


@pytest.fixture
def sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def compare(a: Checkpoint, b: Checkpoint, **options) -> SignOff:
        for name, model in (("a", a), ("b", b)):
            if not (tmp_path / name).exists():
                model.write(tmp_path / name)
        return sign_off(SignOffRequest("a", "b", **options))

    return compare


def states(record: SignOff) -> list[str]:
    return [line.state for line in record.lines]


def text_of(record: SignOff, line: int) -> str:
    return " ".join([record.lines[line].sentence, *record.lines[line].details])


PASSED, FAILED = "passed passed passed", "passed failed not_judged"
OF_STORAGE, OF_BIAS = "failed passed passed", "passed failed passed"
UNSURE, NOTHING = "passed inconclusive passed", "failed inconclusive inconclusive"

#: Name, A, what was done to it, states of the first three lines, words of one of them.
EXPORTS = {
    "untouched": (softmax, edits("weight", same), PASSED, "same numbers"),
    "smoothed, router scaled inversely": (softmax, folds(3.0), PASSED, "gain folded: gain and"),
    "smoothed and cast": (all_single, lambda m: cast(folds(1.2)(m)), FAILED, "digits were lost"),
    "router forgotten": (softmax, folds(1.2, False), FAILED, "weight the same, gain changed"),
    "gain forgotten": (softmax, lambda m: folds(1.2)(m).changed(gains(m)), FAILED, "columns scal"),
    "rotated": (softmax, rotated, PASSED, "rotated"),
    "cast to bf16": (single, cast, FAILED, "rounded to bf16"),
    "dequantised int4": (softmax, int4, FAILED, "rounded to int4"),
    "folded, as fp8": (softmax, lambda m: coarse_fp8(folds(1.2)(m)), FAILED, "with scales in B"),
    "trained on": (softmax, edits("weight", noisy(0.02)), FAILED, "changed by 2 %, no pattern"),
    "renumbered": (softmax, moved(ORDER, "weight"), UNSURE, "permuted (30 of 32 rows)"),
    "shifted in front of a softmax": (softmax, edits("weight", common), PASSED, "common shift"),
    "bias cast": (glm, edits("bias", same, BF16), OF_BIAS, "selection bias rounded to bf16"),
    "bias shifted": (glm, edits("bias", lambda b, _: b + 0.25), PASSED, "selection bias shifted"),
    "bias of others": (glm, edits("bias", noisy(0.1)), OF_BIAS, "selection bias changed"),
    "a router missing": (softmax, without("weight", 1), OF_STORAGE, "1 of 2 routers missing in B"),
    "a router more": (lambda: without("weight", 1)(softmax()), whole, PASSED, "Only in B and not"),
    "another rule": (softmax, unlike(num_experts_per_tok=8), OF_STORAGE, "experts chosen 4 in A"),
    "another epsilon": (softmax, unlike(rms_norm_eps=1e-3), OF_STORAGE, "another norm in layers 0"),
    "another shape": (
        softmax,
        other_shape,
        "failed failed not_judged",
        "another shape in layer 1: 32 x 256",
    ),
    "a selection bias dropped": (sigmoid, without("bias", 1), NOTHING, "e_score_correction_bias"),
    "an order that mixes groups": (sigmoid, moved([*range(1, 64), 0]), FAILED, "mixes groups"),
    "an order within groups": (sigmoid, moved(within_groups(64, 2)), UNSURE, "permuted (64 of 64"),
    "no number": (softmax, not_finite(np.nan), FAILED, "not finite"),
    "no number twice": (lambda: not_finite(np.nan)(softmax()), unlike(), OF_BIAS, "not finite"),
    "a cast beside it": (lambda: not_finite(np.inf)(single()), cast, FAILED, "rounded to bf16"),
}


def gains(model: Checkpoint) -> dict[str, np.ndarray]:
    return {name_of("gain", n): model.tensors[name_of("gain", n)] for n in model.layers}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_judged_by_what_was_done_to_it(sign, name):
    """And its screens fit, but for commands."""
    model, export, expected, words = EXPORTS[name]
    record = sign(model(), export(model()))
    judged = [state.replace("_", " ") for state in expected.split()]
    assert states(record) == [*judged, "inconclusive"], [*map(str, record.lines)]
    assert words in " ".join(text_of(record, line) for line in range(3))
    assert record.exit_code == (1 if "failed" in expected else 4)
    for width in (76, 120):
        text = shown(record, width=width)
        assert [
            line
            for line in text.splitlines()
            if len(line) > width and not line.strip().startswith(("next ", "fill in "))
        ] == []
        assert [name for name in LINE_NAMES if f"{name}: " not in text] == []
        assert f"exit {record.exit_code}" in text
        assert "Not checked: expert weights" in unwrapped(text)


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
    record = sign(softmax(), rotated(softmax()))
    assert record.lines[1].sentence == "layers 0-1 rotated."
    assert "rotated: judged in the next line." in record.lines[1].details
    assert "hidden states were rotated alike" in text_of(record, 2)
    assert 0.0 < record.lines[2].evidence["gram_noise"]["text/0"] < 2.0**-8


@pytest.mark.parametrize("case", STORAGE_UNKNOWN.sizes[:2], ids=lambda case: case.text)
def test_a_scale_that_nobody_knows_fails_in_the_words_of_the_loader(sign, tmp_path, case):
    record = sign(softmax_model(), case.build())
    with pytest.raises(RouterError) as refusal:
        load_routers(open_checkpoint(tmp_path / "b"))
    assert states(record) == ["failed", "inconclusive", "inconclusive", "inconclusive"]
    assert refusal.value.message in record.lines[0].sentence
    assert record.exit_code == 1


def test_what_has_no_router_and_an_unreadable_original_are_input_errors_never_a_line(sign):
    with pytest.raises(RouterError):
        sign(STORAGE_UNKNOWN.sizes[0].build(), without("weight", 0, 1)(softmax()))
    with pytest.raises(RouterError):
        sign_off(SignOffRequest("b", "b"))
    with pytest.raises(CheckpointError):
        sign_off(SignOffRequest("nowhere", "a"))


def test_one_bad_router_among_good_ones_is_named_by_its_layer_unless_it_was_not_asked_for(sign):
    broken = softmax().edited("weight", noisy(0.02), layers=[1])
    record = sign(softmax(), broken)
    assert record.lines[1].sentence == (
        "layer 1 rows changed by 2 %, no pattern; 1 of 2 routers are the same numbers."
    )
    assert record.lines[2].sentence == "no rotation is at issue in layer 1, whose rows failed."
    part = sign(softmax(), broken, layers="0,7")
    assert states(part)[:3] == ["passed"] * 3
    assert "A: layer 7 was asked for and has no router." in part.notes
    assert len(part.not_looked_at) == len(record.not_looked_at) + 2
    assert "1 of 2 routers of A (--layers)" in part.not_looked_at
    assert f"{len(part.not_looked_at)} things not checked" in shown(part, width=200)


CAPPED = dataclasses.replace(SOFTMAX, logit_map=LogitMap(soft_cap=30.0))
BESIDE_BIAS = dataclasses.replace(SOFTMAX, has_logit_bias=True)
NO_CHANGE, SOME = "changes no choice", "choices can change"


@pytest.mark.parametrize(
    ("word", "rule", "meaning", "state"),
    [
        ("common shift", SOFTMAX, "neither choices nor weights", "passed"),
        ("common shift", dataclasses.replace(SOFTMAX, score="sigmoid"), "no choice ch", "failed"),
        ("common shift", CAPPED, "", "failed"),
        ("common shift", SIGMOID, SOME, "failed"),
        ("scaled", SOFTMAX, NO_CHANGE, "failed"),
        ("scaled", SIGMOID, "changes choices", "failed"),
        ("scaled", BESIDE_BIAS, "changes choices", "failed"),
        ("logit bias shifted", SOFTMAX, "", "passed"),
        ("selection bias shifted", SIGMOID, NO_CHANGE, "passed"),
        ("selection bias shifted", INF_FILLED, NO_CHANGE, "passed"),
        ("selection bias shifted", ZERO_FILLED, SOME, "failed"),
    ],
)
def test_what_a_change_means_and_whether_it_passes_depends_on_the_rule(word, rule, meaning, state):
    router = dataclasses.replace(made_up(np.eye(8)), rule=rule)
    change = EDITS[word].change(rule)
    assert meaning in change.meaning
    assert EDITS[word].judge(change, Exported(router, router, np.arange(8))).state == state


def of_layer_norm(**parts) -> Router:
    """A router with everything beside its rows that a family may have."""
    random = np.random.default_rng(0)
    every = {
        "weight": random.standard_normal((8, 64)).astype(np.float32),
        "gain": np.ones(64, np.float32),
        "norm_bias": random.standard_normal(64).astype(np.float32),
        "shared_rows": random.standard_normal((1, 64)).astype(np.float32),
        "expert_scale": np.linspace(1.0, 2.0, 8, dtype=np.float32),
        "norm": Norm("layer", 1e-5, "norm.weight", bias_tensor="norm.bias"),
    }
    return made_up(**every | parts)


FOLDED = {"weight": 2.0 * of_layer_norm().weight, "gain": np.full(64, 0.5, np.float32)}
MOVED = [3, 0, 1, 2, 7, 4, 5, 6]
RENUMBERED = {"weight": of_layer_norm().weight[MOVED]}
SCALES = np.linspace(1.0, 2.0, 8, dtype=np.float32)


@pytest.mark.parametrize(
    ("parts", "state"),
    [
        ({}, "passed"),
        ({"expert_scale": np.ones(8, np.float32)}, "failed"),
        ({"expert_scale": None}, "failed"),
        ({"norm_bias": np.zeros(64, np.float32)}, "failed"),
        ({"shared_rows": np.zeros((1, 64), np.float32)}, "failed"),
        ({"shared_rows": np.zeros((2, 64), np.float32)}, "failed"),
        (FOLDED, "passed"),
        (FOLDED | {"norm_bias": np.zeros(64, np.float32)}, "inconclusive"),
        (FOLDED | {"shared_rows": np.zeros((1, 64), np.float32)}, "inconclusive"),
        (FOLDED | {"expert_scale": np.ones(8, np.float32)}, "failed"),
        (RENUMBERED | {"expert_scale": SCALES[MOVED]}, "inconclusive"),
        (RENUMBERED, "failed"),  # scales were left behind
    ],
)
def test_what_stands_beside_the_rows_is_looked_at(parts, state):
    assert judge(of_layer_norm(), of_layer_norm(**parts)).state == state


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


def record(out: Path, checkpoint: Path, noise=0.0, seed=0, **facts) -> dict[str, np.ndarray]:
    """What a checkpoint of the museum chooses on ``inputs``, which it keeps as a recording."""
    routers = load_routers(open_checkpoint(checkpoint))
    options = {"columns": token_columns(), "stage": "ids", "engine": "test"} | facts
    chosen, values = {}, {}
    for router in routers.routers:
        assert router.gain is not None
        read = inputs(router.layer, noise, seed)
        logits = read @ (router.weight * router.gain).T
        chosen[router.name] = np.argsort(-logits, axis=1)[:, : router.rule.top_k].astype(np.int32)
        unit = read / np.sqrt((read**2).mean(axis=1, keepdims=True))
        values[router.name] = (unit * router.gain).astype(np.float32)
    names = options.get("routers") or tuple(chosen)
    with RecordingWriter(
        *(out, options["stage"], names),
        checkpoint_name=checkpoint.name,
        fingerprint=routers.fingerprint,
        engine=options["engine"],
        domains=("all",),
    ) as writer:
        writer.append(
            options["columns"],
            values if options["stage"] == "router_input" else None,
            {n: chosen[n] for n in names} if options.get("has_chosen", True) else None,
        )
    return chosen


def mostly_other_text() -> TokenColumns:
    """Three documents of 16 are those of ``token_columns``."""
    mine, other = token_columns(), token_columns(seed=2)
    ids = np.where(mine.document < 3, mine.token_id, other.token_id).astype(np.int32)
    return TokenColumns(mine.document, mine.position, ids, mine.domain)


INPUTS = {"stage": "router_input"}

#: Recordings of one checkpoint: of A, of A again, of B, and of what is no recording of B.
RECORDINGS = {
    "a": {},
    "b": {"noise": 0.02, "seed": 9},
    "a_again": {"noise": 0.002, "seed": 10},
    "a_same": {},
    "b_near": {"noise": 0.002, "seed": 9},
    "b_far": {"noise": 0.5, "seed": 9},
    "b_other_engine": {"noise": 0.02, "seed": 9, "engine": "other 2.0"},
    "b_of_one_router": {"noise": 0.02, "seed": 9, "routers": ("text/0",)},
    "b_other_text": {"columns": token_columns(seed=2)},
    "b_mostly_other_text": {"columns": mostly_other_text()},
    "inputs": INPUTS,
    "inputs_alone": INPUTS | {"has_chosen": False},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    softmax().write(folder / "model")
    chosen = {
        name: record(folder / name, folder / "model", **facts) for name, facts in RECORDINGS.items()
    }
    return folder, chosen


@pytest.fixture
def on_text(texts):
    def compare(*tokens: str, rerun: str | None = None, **options) -> SignOff:
        model, paths = str(texts[0] / "model"), tuple(str(texts[0] / name) for name in tokens)
        again = rerun and str(texts[0] / rerun)
        return sign_off(SignOffRequest(model, model, tokens=paths, rerun=again, **options))

    return compare


def flips(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> np.ndarray:
    return np.array([[set(x) != set(y) for x, y in zip(a[r], b[r], strict=True)] for r in a])


@pytest.mark.parametrize("side", ["a", "inputs"])
def test_shares_are_those_of_sets_that_differ(texts, on_text, side):
    """Also where router inputs are recorded beside the choices."""
    flipped = flips(texts[1][side], texts[1]["b"])
    result = on_text(side, "b")
    between = result.lines[3].evidence["between"]
    assert 0.0 < flipped.mean() < 0.5
    np.testing.assert_allclose(between["share"], flipped.mean())
    np.testing.assert_allclose(between["tokens_share"], flipped.any(axis=0).mean())
    np.testing.assert_allclose(list(between["by_router"].values()), flipped.mean(axis=1))
    by_document = flipped.mean(axis=0).reshape(-1, DOCUMENT).mean(axis=1)
    np.testing.assert_allclose(between["error"], sem(by_document))
    assert "rests on the order of --tokens" in " ".join(result.notes)


def test_a_limit_below_the_share_fails_and_one_at_it_passes(on_text):
    """And without one half of the tokens may be routed otherwise, and nothing is signed off."""
    for name, least in (("b", 0.0), ("b_far", 0.4)):
        result = on_text("a", name)
        assert result.lines[3].evidence["between"]["tokens_share"] > least
        assert (result.exit_code, result.lines[3].state) == (4, "not judged")
        assert "Measured, not judged: no limit was given (--max-flipped" in text_of(result, 3)
        assert "--rerun REC_A2" in text_of(result, 3)
        assert "not signed off: give --max-flipped (or --rerun)" in shown(result)
        assert "passed        routing on text" not in shown(result)
        share = result.lines[3].evidence["between"]["share"]
        at, below = (on_text("a", name, max_flipped=most) for most in (share, 0.99 * share))
        assert (at.exit_code, below.exit_code) == (0, 1)
        assert "Within the limit" in text_of(at, 3)
        assert "More than the limit" in text_of(below, 3)


def test_no_limit_is_shown_to_hold_by_fewer_tokens_than_its_inverse_thrice():
    for tokens, state in ((1, "inconclusive"), (149, "inconclusive"), (150, "passed")):
        none = Flips(tokens, tokens, 0, 1, 0.0, None, 0.0, {"text/0": 0.0})
        line = measured_line(none, None, 0.02, ["text/0"], "again")
        assert line.state == state
        assert ("Too few tokens to show that: 150 or more" in line.sentence) == (tokens < 150)


@pytest.mark.parametrize(("name", "code"), [("b", 1), ("b_near", 0)])
def test_b_may_differ_twice_as_often_as_a_from_itself(on_text, name, code):
    result = on_text("a", name, rerun="a_again")
    evidence = result.lines[3].evidence
    ratio = evidence["between"]["share"] / evidence["rerun"]["share"]
    assert (3.0 < ratio < 30.0) == (code == 1)
    assert f"B differs {ratio:.2g} times as often" in text_of(result, 3)
    np.testing.assert_allclose(evidence["limit"], 2.0 * evidence["rerun"]["share"])
    assert result.exit_code == code
    swapped = on_text("a", "a_again", rerun=name)
    np.testing.assert_allclose(swapped.lines[3].evidence["times_rerun"], 1.0 / ratio)


def test_what_leaves_the_line_open_is_told(on_text):
    result = on_text("a", "b", rerun="a_same")
    assert result.lines[3].evidence["times_rerun"] is None
    assert "nothing to hold B against" in text_of(result, 3)
    assert (result.exit_code, states(result)[3]) == (4, "not judged")
    result = on_text("a", "b_of_one_router", max_flipped=0.9)
    assert (result.lines[3].state, result.exit_code) == ("inconclusive", 4)
    assert "layer 1 not recorded on both sides" in text_of(result, 3)
    notes = " ".join(on_text("a", "b_other_engine").notes)
    assert "A was recorded by 'test', B by 'other 2.0'" in notes
    assert rotation_line([], ["text/0"]).state == "inconclusive"


def test_renumbered_experts_are_compared_under_their_old_names(sign, tmp_path):
    moved = permuted(softmax(), ORDER, ("weight",))
    for side, model in (("a", softmax()), ("b", moved)):
        record(tmp_path / f"rec_{side}", model.write(tmp_path / side))
    result = sign(softmax(), moved, tokens=("rec_a", "rec_b"))
    assert result.lines[3].evidence["between"]["share"] == 0.0
    assert result.exit_code == 4  # whether the experts moved along is not known


@pytest.mark.parametrize(
    ("tokens", "message", "hint"),
    [
        (("a", "b_other_text"), r"5\d\d of 512 matched rows are of another token", ""),
        (("a", "b_mostly_other_text"), "has 96 of the 512 tokens of", ""),
        (("inputs_alone", "b"), "inputs_alone.*router input and not what was", "--keep ids"),
        (("a", "inputs_alone"), "inputs_alone.*router input and not what was", "--keep ids"),
        (("a", "counts.jsonl"), "holds counts and not what was chosen", ""),
    ],
)
def test_other_texts_and_no_choices_are_refused(texts, on_text, tokens, message, hint):
    write_megatron(texts[0] / "counts.jsonl", np.full((4, 2, 32), 32))
    with pytest.raises(RecordingError, match=message) as refusal:
        on_text(*tokens)
    assert hint in refusal.value.hint


def test_a_recording_of_the_other_side_is_refused_unless_that_is_allowed(sign, tmp_path):
    other = smoothed(softmax(), 1.2, True)
    record(tmp_path / "rec_a", softmax().write(tmp_path / "a"))
    record(tmp_path / "rec_b", other.write(tmp_path / "b"), noise=0.01, seed=4)
    with pytest.raises(RecordingError, match="another checkpoint"):
        sign(softmax(), other, tokens=("rec_b", "rec_a"))
    result = sign(softmax(), other, tokens=("rec_b", "rec_a"), stale_inputs=True)
    assert "RECORDED FROM ANOTHER CHECKPOINT" in result.sides[0].tokens


def written(chosen: dict[str, np.ndarray]) -> list[Written]:
    ids, columns = np.stack(list(chosen.values()), axis=1), token_columns()
    requests = []
    for number in range(TOKENS // DOCUMENT):
        rows = columns.document == number
        tokens = columns.token_id[rows].astype(np.int64)
        requests.append(Written(f"r{number}", ids[rows][:-1], tokens, num_prompt=5))
    return requests


@pytest.mark.parametrize("first", ["a", "a.jsonl"])
def test_the_trace_of_an_engine_serves_as_a_recording(texts, on_text, first):
    folder, chosen = texts
    for side in "ab":
        write_vllm(folder / f"{side}.jsonl", written(chosen[side]))
    between = on_text(first, "b.jsonl").lines[3].evidence["between"]
    rows = token_columns().position < DOCUMENT - 1
    np.testing.assert_allclose(between["share"], flips(chosen["a"], chosen["b"])[:, rows].mean())
    assert between["num_tokens"] == rows.sum()


@pytest.mark.parametrize("state", ["failed", "inconclusive", "not judged"])
def test_only_four_passed_lines_exit_with_zero(sign, state):
    result = sign(softmax(), softmax())
    for number in range(4):
        lines = tuple(
            dataclasses.replace(line, state=state if at == number else "passed")
            for at, line in enumerate(result.lines)
        )
        open_one = dataclasses.replace(result, lines=lines)
        assert open_one.exit_code == (1 if state == "failed" else 4)
        assert "not signed off" in shown(open_one)


def with_rows_of(model: Checkpoint, rows: np.ndarray, experts: np.ndarray) -> Checkpoint:
    """The model with some rows of its routers, and some of its experts."""
    tensors = {}
    for name, values in model.tensors.items():
        before, found, rest = name.partition(".experts.")
        number, _, leaf = rest.partition(".")
        if not found:
            tensors[name] = values[rows] if name.endswith("mlp.gate.weight") else values
        for place in np.flatnonzero(experts == int(number)) if found else ():
            tensors[f"{before}.experts.{place}.{leaf}"] = values
    return Checkpoint(dict(model.config) | {"num_experts": len(rows)}, tensors)


def test_a_prune_passes_where_experts_came_along_and_fails_where_they_did_not(tmp_path):
    model, some = with_experts(softmax()), np.sort(np.random.default_rng(1).permutation(32)[:24])
    model.write(tmp_path / "a")
    for experts, state, words in (
        (some, "passed", "its expert came along"),
        (np.arange(24), "failed", "experts left behind"),
    ):
        with_rows_of(model, some, experts).write(tmp_path / state)
        storage, router, *_ = sign_off(SignOffRequest(f"{tmp_path}/a", f"{tmp_path}/{state}")).lines
        assert (storage.state, router.state) == ("passed", state)
        assert words in " ".join([router.sentence, *router.details])


def test_scales_that_went_into_the_experts_pass_and_others_fail(tmp_path):
    scale, draw = np.linspace(0.5, 2.0, 32, dtype=np.float32), np.random.default_rng(6)
    shapes = {"gate": (16, 256), "up": (16, 256), "down": (256, 16)}
    experts = {
        (expert, leaf): draw.standard_normal(shape).astype(np.float32)
        for expert in range(32)
        for leaf, shape in shapes.items()
    }
    sides = []
    for name, factors in (("a", np.ones(32)), ("b", scale), ("c", scale[::-1])):
        own = {
            f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj.weight": (
                values * (factors[expert] if leaf == "down" else 1.0)
            ).astype(BF16)
            for (expert, leaf), values in experts.items()
            for layer in range(2)
        }
        store = open_checkpoint(softmax().changed(own).write(tmp_path / name))
        sides.append((store, load_routers(store).routers[0]))
    scaled = dataclasses.replace(sides[0][1], expert_scale=scale)
    for side, state in zip(sides, ("failed", "passed", "failed"), strict=True):
        values = (values_of(store, [router])["text/0"] for store, router in (sides[0], side))
        assert judge(scaled, side[1], experts=ExpertPair(*values)).state == state


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda scale: 0.0 * scale, "set to zero"),
        (lambda scale: 2.5 * scale, "scaled by 2.5"),
        (lambda scale: scale[::-1].copy(), "of other experts"),
        (lambda scale: scale + np.float32(0.3) * (np.arange(8) == 5), "changed"),
        (lambda scale: np.full_like(scale, np.nan), "not finite"),
        (lambda scale: None, "is not in B"),
    ],
)
def test_a_part_that_changed_is_told_by_what_was_done_to_it(change, phrase):
    a = of_layer_norm()
    (only,) = compare_routers(a, of_layer_norm(expert_scale=change(SCALES))).changes
    assert only.phrase == f"scale of the experts {phrase}"
    # rows that moved take their scales with them
    assert compare_routers(a, of_layer_norm(**RENUMBERED, expert_scale=SCALES[MOVED])).phrases == (
        compare_routers(made_up(a.weight), made_up(a.weight[MOVED])).phrases
    )


def test_a_limit_is_asked_for_only_where_choices_were_compared_and_none_was_given(tmp_path):
    for name, model in (("a", softmax()), ("b", softmax().edited("weight", noisy(0.1)))):
        model.write(tmp_path / name)
    result = sign_off(SignOffRequest(f"{tmp_path}/a", f"{tmp_path}/b"))
    assert result.in_state("not judged")
    assert "give --max-flipped" not in shown(result)
    between = Flips(100, 100, 0, 4, 0.1, None, 0.2, {"text/0": 0.1, "text/1": 0.1})
    for limit, is_asked in ((None, True), (0.3, False)):
        line = measured_line(between, None, limit, ["text/0", "text/1"], "again")
        lines = (*result.lines[:3], line)
        text = shown(dataclasses.replace(result, lines=lines), width=200)
        assert ("give --max-flipped" in text) is is_asked
