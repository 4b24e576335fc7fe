"""What was done to a checkpoint is what the difference says, alone and in combination."""

import dataclasses
import functools
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from scipy.linalg import expm
from scipy.stats import ttest_ind_from_stats

from moegeom.core.errors import RecordingError
from moegeom.core.router import GroupMask, LogitMap, Norm, Router, Rule, Weights
from moegeom.metrics import METRICS
from moegeom.pipeline import lint
from moegeom.results.reader import MemoryResults
from moegeom.router.edits import VECTOR_EDITS
from moegeom.studies.changes.edit import EDITS
from moegeom.studies.changes.router import (
    ProjectedRouters,
    compare_projected,
    compare_routers,
    is_same_norm,
    projected_routers,
    rule_differences,
)
from moegeom.studies.changes.row_pair import RoutersOfA, row_pair
from moegeom.studies.check.study import GateRequest, gate
from moegeom.studies.diff.document import document, verdict_sentence
from moegeom.studies.diff.record import FigureChange, Figures
from moegeom.studies.diff.study import (
    FREE_OF_T,
    LEVEL,
    DifferenceRequest,
    difference,
    figure_changes,
    is_free_of_t,
)
from moegeom.studies.signoff.study import SignOffRequest, judge, sign_off
from tests.by_day import by_day
from tests.museum.checkpoint import (
    BF16,
    F32,
    Checkpoint,
    Part,
    name_of,
    permuted,
    swapped,
    text_order,
    within_groups,
)
from tests.museum.exhibit_quantisers import smoothed
from tests.museum.healthy import softmax_model
from tests.unit.check.conftest import TABLE, Case, with_token_table, write_model
from tests.unit.studies.edited import (
    INF_FILLED,
    cast,
    common,
    expert_name,
    made_up,
    noise,
    noisy,
    not_finite,
    rotated,
    sigmoid,
    single,
    softmax,
    with_experts,
)
from tests.unit.studies.samples import BALANCED, assert_cut, sides, unwrapped, widest, worded

shown = functools.partial(worded, document)


def with_small_gains() -> Checkpoint:
    return softmax().edited("gain", lambda g, _: g / 128.0)


def int8(w, layer):
    scale = np.abs(w).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127.0)
    return np.rint(w.astype(np.float32) / scale) * scale


def fp8(w, layer):
    scale = np.abs(w).max().astype(np.float32) / np.float32(448.0)
    return (w.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale


def cleared(w, layer):
    w = w.copy()
    w[3] = 0.0
    return w


def gain_of(model: Checkpoint, layer: int) -> np.ndarray:
    return model.tensors[name_of("gain", layer)].astype(float)


def skew(layer: int, size: int) -> np.ndarray:
    """Its exponential is a rotation."""
    some = noise(0.2, layer, (size, size))
    return some - some.T


def scales_moved(w, layer):
    """Codes by blocks of 16 columns beside the scales of the blocks before them."""
    blocks = w.reshape(len(w), -1, 16)
    scales = np.exp(noise(0.5, layer, blocks.shape[:2]))[:, :, None]
    return (blocks * np.roll(scales, 1, axis=1) / scales).reshape(w.shape)


def times(factor: float, expert: int) -> np.ndarray:
    return np.where(np.arange(32) == expert, factor, 1.0)[:, None]


def copied(sources: dict[int, int]):
    def change_rows(w, layer):
        w = w.copy()
        w[list(sources)] = w[list(sources.values())]
        return w

    return change_rows


def one_noisy(w, layer):
    w = w.copy()
    w[3] += noise(0.3 * np.sqrt((w**2).mean()), layer, w[3].shape)
    return w


def exchanged(model: Checkpoint) -> Checkpoint:
    """Rows and gains of layers 0 and 1 in each other's place."""
    tensors = {
        name.replace(f"layers.{layer}.", f"layers.{1 - layer}."): tensor
        for layer in (0, 1)
        for name, tensor in model.tensors.items()
        if f"layers.{layer}." in name
    }
    return model.changed(tensors)


def fresh(w, layer):
    return np.random.default_rng([5, layer]).standard_normal(w.shape) / 16.0


def flat(g, layer):
    return g * 1.3 ** np.random.default_rng(layer).uniform(-1.0, 1.0, g.shape[-1])


SORTED, BF = text_order(32), "rounded to bf16"

#: Name, what is compared, and what must be said: (word, part of the phrase) in order.
CASES = {
    "identical": (softmax, lambda m: m, []),
    "another storage of the same": (softmax, lambda m: m.edited("weight", lambda w, _: w, dtype=F32), []),
    "rounded": (single, cast, [("rounded", f"B is A, {BF}")]),
    "int8": (single, lambda m: m.edited("weight", int8), [("rounded", "int8, a scale for each row")]),
    "int8 in bf16": (softmax, lambda m: m.edited("weight", int8), [("rounded", "int8, a scale for each row")]),
    "fp8": (softmax, lambda m: m.edited("weight", fp8), [("rounded", "fp8 e4m3, one scale")]),
    "folded": (softmax, lambda m: smoothed(m, 3.0, True), [("gain folded", "")]),
    "folded and noise": (softmax, lambda m: smoothed(m, 3.0, True).edited("weight", noisy(0.05)), [("gain folded", ""), ("trained on", "")]),
    "folded and noise behind small gains": (with_small_gains, lambda m: smoothed(m, 3.0, True).edited("weight", noisy(0.05)), [("gain folded", ""), ("trained on", "")]),
    "gain alone": (softmax, lambda m: smoothed(m, 1.2, False), [("gain not followed", "")]),
    "router alone": (softmax, lambda m: m.edited("weight", flat), [("columns scaled", "")]),
    "gain times 1.3": (softmax, lambda m: m.edited("gain", lambda g, _: 1.3 * g), [("scaled", "by 1.3")]),
    "gain times -1": (softmax, lambda m: m.edited("gain", lambda g, _: -g), [("negated", "")]),
    "rotated": (softmax, rotated, [("rotated", "")]),
    "rotated with its gain left in front": (softmax, lambda m: m.edited("weight", lambda w, layer: w @ expm(skew(layer, w.shape[1]))), [("rotated beside its gain", "")]),
    "gain left out": (softmax, lambda m: m.edited("gain", lambda g, _: np.ones_like(g)), [("gain applied otherwise", "norm gain left out")]),
    "gain folded and kept": (softmax, lambda m: m.edited("weight", lambda w, layer: w * gain_of(m, layer)), [("gain applied otherwise", "norm gain applied twice")]),
    "gain of the next layer": (softmax, lambda m: m.edited("gain", lambda g, layer: gain_of(m, 1 - layer)), [("gain applied otherwise", "norm gain of layer ")]),
    "gain moved along": (softmax, lambda m: m.edited("gain", lambda g, _: np.roll(g, 1)), [("gain applied otherwise", "norm gain moved along by +1")]),
    "rows read as columns": (softmax, lambda m: m.edited("weight", lambda w, _: w.reshape(w.shape[::-1]).T), [("columns moved", "rows read as columns")]),
    "halves of the columns exchanged": (softmax, lambda m: m.edited("weight", lambda w, _: np.roll(w, w.shape[1] // 2, axis=1)), [("columns moved", "columns of 2 blocks in reverse order")]),
    "blocks of columns interleaved, and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: noisy(0.02)(w[:, np.arange(w.shape[1]).reshape(4, -1).T.ravel()], layer)), [("columns moved", "columns of 4 blocks interleaved"), ("trained on", "")]),
    "columns in any order": (softmax, lambda m: m.edited("weight", lambda w, layer: w[:, np.random.default_rng(layer).permutation(w.shape[1])]), [("columns moved", "columns in another order (")]),
    "half of the columns zeroed": (softmax, lambda m: m.edited("weight", lambda w, _: w * (np.arange(w.shape[1]) >= w.shape[1] // 2)), [("scaled", "columns 0-")]),
    "scales of blocks in another order": (softmax, lambda m: m.edited("weight", scales_moved), [("blocks scaled", "blocks of 1 x 16")]),
    "swapped": (softmax, lambda m: permuted(m, swapped(32), ("weight",)), [("permuted", "2 of 32 rows")]),
    "permuted and noise": (softmax, lambda m: permuted(m, SORTED, ("weight",)).edited("weight", noisy(0.003)), [("permuted", "30"), ("trained on", "")]),
    "permuted and rounded": (single, lambda m: cast(permuted(m, SORTED, ("weight",))), [("permuted", "30"), ("rounded", BF)]),
    "permuted and folded": (softmax, lambda m: smoothed(permuted(m, SORTED, ("weight",)), 2.0, True), [("permuted", "30"), ("gain folded", "")]),
    "scaled": (softmax, lambda m: m.edited("weight", lambda w, _: 1.7 * w), [("scaled", "by 1.7")]),
    "scaled and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: noisy(0.02)(1.5 * w, layer)), [("scaled", "by 1.5"), ("trained on", "")]),
    "negated": (softmax, lambda m: m.edited("weight", lambda w, _: -w), [("negated", "")]),
    "shifted and scaled": (softmax, lambda m: m.edited("weight", lambda w, layer: common(1.5 * w, layer)), [("scaled", "by 1.5"), ("common shift", "")]),
    "shifted and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: noisy(0.02)(common(w, layer), layer)), [("common shift", ""), ("trained on", "")]),
    "permuted and shifted": (softmax, lambda m: permuted(m, SORTED, ("weight",)).edited("weight", common), [("permuted", "30"), ("common shift", "")]),
    "a little noise": (softmax, lambda m: m.edited("weight", noisy(0.003)), [("trained on", "")]),
    "much noise": (softmax, lambda m: m.edited("weight", noisy(1.0)), [("trained on", "")]),
    "one row": (softmax, lambda m: m.edited("weight", cleared), [("rows scaled", "expert 3 set to zero")]),
    "two rows scaled": (softmax, lambda m: m.edited("weight", lambda w, _: w * times(3.0, 5) * times(-0.25, 7)), [("rows scaled", "expert 5 scaled by 3.0 and expert 7 scaled by -0.25")]),
    "a row times 3 and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: noisy(0.02)(w * times(3.0, 5), layer)), [("rows scaled", "expert 5 scaled by 3.0"), ("trained on", "rows changed by")]),
    "every row scaled": (softmax, lambda m: m.edited("weight", lambda w, _: w * np.linspace(0.5, 2.0, len(w))[:, None]), [("rows scaled", "32 of 32 experts scaled, each by its own factor, 0.5 to 2.0")]),
    "a row of noise": (softmax, lambda m: m.edited("weight", one_noisy), [("trained on", "1 of 32 rows changed by")]),
    "two rows copied": (softmax, lambda m: m.edited("weight", copied({5: 6, 9: 6})), [("rows copied", "row 5 is now a copy of row 6, row 9 is now a copy of row 6")]),
    "a row copied and noise": (softmax, lambda m: m.edited("weight", lambda w, layer: copied({5: 6})(noisy(0.02)(w, layer), layer)), [("rows copied", "row 5 is now a copy of row 6"), ("trained on", "")]),
    "a row copied and all scaled": (softmax, lambda m: m.edited("weight", lambda w, layer: copied({5: 6})(1.5 * w, layer)), [("scaled", "by 1.5, rows 0-4, 6-31 (31 of 32)"), ("rows copied", "row 5 is now a copy of row 6")]),
    "layers exchanged": (softmax, exchanged, [("another layer", "router of layer ")]),
    "unrelated": (softmax, lambda m: m.edited("weight", fresh), [("unrelated", "")]),
    "bias rounded": (sigmoid, lambda m: m.edited("bias", lambda c, _: c, dtype=BF16), [("rounded", "selection bias rounded to bf16")]),
    "bias shifted": (sigmoid, lambda m: m.edited("bias", lambda c, _: c + 3.0), [("selection bias shifted", "")]),
    "bias changed": (sigmoid, lambda m: m.edited("bias", lambda c, layer: c + noise(0.002, layer, c.shape)), [("bias changed", "selection bias")]),
    "bias and rows": (sigmoid, lambda m: m.edited("bias", lambda c, _: c + 3.0).edited("weight", noisy(0.01)), [("trained on", ""), ("selection bias shifted", "")]),
    "bias left behind": (sigmoid, lambda m: permuted(m, swapped(64), ("weight",)), [("permuted", "2 of 64"), ("bias left behind", "selection bias")]),
    "bias moved along": (sigmoid, lambda m: permuted(m, within_groups(64, 2), ("weight", "bias")), [("permuted", "64 of 64")]),
}  # fmt: skip


@pytest.fixture
def differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def compare(a: Checkpoint, b: Checkpoint, **options):
        for name, model in (("a", a), ("b", b)):
            shutil.rmtree(name, ignore_errors=True)
            model.write(tmp_path / name)
        return difference(DifferenceRequest("a", "b", **options))

    return compare


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moved")
    softmax().write(folder / "a")
    softmax().edited("weight", noisy(0.01)).write(folder / "b")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return difference(DifferenceRequest("a", "b"))


def words(router) -> list[str]:
    return [change.word for change in router.changes]


@pytest.mark.parametrize("name", CASES)
def test_what_was_done_is_what_is_said(differ, name):
    model, edit, changes = CASES[name]
    difference_of_case = differ(model(), edit(model()))
    for router in difference_of_case.routers:
        assert words(router) == [word for word, _ in changes], router
        for change, (_, part) in zip(router.changes, changes, strict=True):
            assert part in change.phrase
    for width in (80, 120):
        text = shown(difference_of_case, width=width)
        assert widest(text) <= width
        assert [word for word, _ in changes if f"{word}:" not in text] == []  # what each means
        assert "Not checked" in text


OF_BIASES = {
    "bias multiplied": lambda bias, _: -bias,
    "bias read as another dtype": lambda bias, _: np.nan_to_num(
        bias.view(ml_dtypes.bfloat16)[: len(bias)].astype(np.float32), posinf=0.0, neginf=0.0
    ),
    "bias of another layer": lambda _, other: other,
    "bias of other experts": lambda bias, _: np.roll(bias, 3),
    "rounded": lambda bias, _: bias.astype(ml_dtypes.bfloat16).astype(np.float32),
    "bias changed": lambda bias, other: bias + 0.1 * other,
}


#: What was done to some numbers of a bias or of the scales of experts, and what is said.
OF_SOME = {
    "set to zero, experts 8-15 (8 of 16)": lambda bias: np.where(np.arange(16) < 8, bias, 0.0),
    "negated, experts 0-3 (4 of 16)": lambda bias: np.where(np.arange(16) < 4, -bias, bias),
    "scaled by 2.5, experts 1, 5, 9, 13 (4 of 16)": lambda bias: np.where(
        np.arange(16) % 4 == 1, 2.5 * bias, bias
    ),
    "rounded to bf16, experts 0-7 (8 of 16)": lambda bias: np.where(
        np.arange(16) < 8, bias.astype(ml_dtypes.bfloat16), bias
    ),
    "its bf16 bytes read as float32": VECTOR_EDITS["misread_wide"].make,
    "of other experts": np.flip,
}


@pytest.mark.parametrize("phrase", OF_SOME)
@pytest.mark.parametrize("field", ["selection_bias", "logit_bias", "expert_scale"])
def test_what_was_done_to_some_numbers_is_told_with_these(field, phrase):
    bias = np.random.default_rng(3).uniform(0.5, 1.5, 16).astype(np.float32)
    rows = np.random.default_rng(4).standard_normal((16, 64))
    first = dataclasses.replace(made_up(rows), **{field: bias})
    edited = np.asarray(OF_SOME[phrase](bias), np.float32)
    (change,) = compare_routers(first, dataclasses.replace(first, **{field: edited})).changes
    assert phrase in change.phrase


@pytest.mark.parametrize("kind", ["selection_bias", "logit_bias"])
def test_what_was_done_to_biases_is_what_is_said(kind):
    random = np.random.default_rng(2)
    rows = random.standard_normal((2, 16, 64))
    biases = random.standard_normal((2, 16)).astype(np.float32)
    first, second = (
        dataclasses.replace(made_up(w), name=f"text/{n}", **{kind: bias})
        for n, (w, bias) in enumerate(zip(rows, biases, strict=True))
    )
    for word, change in OF_BIASES.items():
        changed = dataclasses.replace(first, **{kind: change(*biases).astype(np.float32)})
        router = compare_routers(first, changed, RoutersOfA((first, second)))
        assert words(router) == [word]
        assert kind.replace("_", " ") in router.changes[0].phrase


def test_every_word_has_a_case():
    of_cases = {word for _, _, changes in CASES.values() for word, _ in changes}
    # the others have tests of their own below
    elsewhere = {
        "update of low rank",
        "pruned",
        *OF_BIASES,
        "experts left behind",
        "experts moved alone",
        "not folded into experts",
        "not compared",
        "part changed",  # in test_signoff.py
        "logit bias shifted",
        "turned",
    }
    assert of_cases | elsewhere == set(EDITS.names())


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.float32])
def test_a_table_by_token_id_is_compared_id_by_id(tmp_path, kind):
    random, folders = np.random.default_rng(8), {}

    def sentences(change) -> tuple[str, ...]:
        for side, of_side in (("a", lambda table: table), ("b", change)):

            def spoil(tensors, config, of_side=of_side):
                with_token_table(tensors, config)
                table = tensors[TABLE.format(1)]
                tensors[TABLE.format(1)] = np.ascontiguousarray(of_side(table).astype(kind))

            (tmp_path / side).mkdir(exist_ok=True)
            folders[side] = write_model(tmp_path / side, Case(family="deepseek_v3"), spoil)
        request = DifferenceRequest(str(folders["a"]), str(folders["b"]))
        report = difference(request)
        return (*report.unlike, *(note for note in report.notes if "token id" in note))

    def rolled(table):
        return np.roll(table, 1, axis=0)

    def some(table):
        changed = table.copy()
        changed[[5, 700], 2] = 383 - changed[[5, 700], 2]
        return changed

    reordered = sentences(lambda table: random.permuted(table, axis=1))
    assert reordered == ("0 of 2,000 token ids of text/1 go to other experts.",)
    assert sentences(some) == ("2 of 2,000 token ids of text/1 go to other experts, first 5",)
    storage = sign_off(SignOffRequest(str(folders["a"]), str(folders["b"]))).lines[0]
    assert (storage.state, "2 of 2,000 token ids of" in storage.sentence) == ("failed", True)
    (moved,) = sentences(rolled)
    assert moved.startswith(("1,9", "2,000")) and moved.endswith("go to other experts, first 0")
    assert sentences(lambda table: table[:1000]) == (
        "the table of text/1 is 2000 x 4 in A, 1000 x 4 in B",
    )


@pytest.mark.parametrize("change", [lambda w: w, lambda w: -w])
def test_what_looks_like_a_router_and_was_skipped_is_counted_named_and_compared(tmp_path, change):
    name, folders = "layers.1.ffn.gate.weight", []
    for side, edit in (("a", lambda w: w), ("b", change)):

        def spoil(tensors, config, edit=edit):
            with_token_table(tensors, config)
            tensors[name] = edit(tensors[name])

        folders.append(str(write_model(tmp_path / side, Case(family="deepseek_v3"), spoil)))
    report = difference(DifferenceRequest(*folders))
    assert report.skipped == (name,)
    assert "1 more looks like routers" in verdict_sentence(report)
    assert name in report.not_looked_at[-1]
    assert bool(report.unlike) is (change(1) != 1)


def test_experts_tell_whether_they_moved_along(differ):
    model = with_experts(softmax())
    for parts, changes, beside in (
        (("weight",), ["permuted", "experts left behind"], ""),
        (("weight", "experts"), ["permuted"], "all 32 experts moved along"),
        (("experts",), ["experts moved alone"], ""),
        ((), [], "all 32 experts where they were"),
    ):
        for router in differ(model, permuted(model, SORTED, parts), experts=True).routers:
            assert words(router) == changes
            assert beside in " ".join(router.beside)


@pytest.mark.parametrize("leaf", ["gate", "up", "down"])
@pytest.mark.parametrize("experts", [[5], [*range(32)]])
def test_experts_with_other_weights_in_any_tensor_are_named_in_the_verdict(differ, leaf, experts):
    model = with_experts(softmax())
    names = [expert_name(1, expert, leaf) for expert in experts]
    other = model.changed({name: np.roll(model.tensors[name], 1) for name in names})
    for every in (False, True):
        record = differ(model, other, experts=every)
        assert all(router.is_identical for router in record.routers)
        change = record.experts["text/1"]
        assert (list(change.other), change.tensors) == (experts, ("gate", "up", "down"))
        number = f"{len(experts)} of 32 sampled experts differ"
        which = f": 5 ({leaf})" if len(experts) == 1 else f" ({leaf})"
        text = verdict_sentence(record)
        assert f"their experts do not: layer 1, {number}{which}" in text
        (unseen,) = (text for text in record.not_looked_at if text.startswith("expert weights"))
        assert "of gate, up and down" in unseen


@pytest.mark.parametrize("kinds", [(BF16, np.float32), (np.float32, BF16)])
def test_experts_of_the_same_numbers_in_another_dtype_or_fused_are_where_they_were(differ, kinds):
    model = with_experts(softmax())
    sides = [
        model.changed({n: v.astype(kind) for n, v in model.tensors.items() if ".experts." in n})
        for kind in kinds
    ]
    fused = {}
    for layer in model.layers:
        both = [
            np.concatenate([model.tensors[expert_name(layer, e, leaf)] for leaf in ("gate", "up")])
            for e in range(32)
        ]
        downs = [model.tensors[expert_name(layer, e, "down")] for e in range(32)]
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(both)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack(downs)
    rest = {n: v for n, v in model.tensors.items() if ".experts." not in n}
    sides.append(dataclasses.replace(model, tensors=rest | fused))
    for other in sides[1:]:
        record = differ(sides[0], other, experts=True)
        assert verdict_sentence(record).startswith("all 2 routers are identical")
        assert all("all 32 experts where they were" in r.beside for r in record.routers)


def folded(model: Checkpoint, experts: range) -> Checkpoint:
    """The gain in the rows and in the first matrices of some experts, and 1 in front of them."""
    tensors = {}
    for layer in model.layers:
        gain = gain_of(model, layer)
        for expert in experts:
            for leaf in ("gate", "up"):
                name = expert_name(layer, expert, leaf)
                tensors[name] = (model.tensors[name].astype(float) * gain).astype(BF16)
    rows = model.edited("weight", lambda w, layer: w * gain_of(model, layer))
    return rows.edited("gain", lambda g, _: np.ones_like(g)).changed(tensors)


@pytest.mark.parametrize(
    ("number", "phrases", "state"),
    [
        (32, ("gain folded",), "passed"),
        (20, ("gain folded", "not folded into experts (12 of 32)"), "failed"),
        (0, ("gain folded", "not folded into experts (32 of 32)"), "failed"),
    ],
)
def test_a_gain_that_is_folded_is_the_same_model_where_experts_are_folded_too(
    differ, tmp_path, number, phrases, state
):
    model = with_experts(softmax())
    other = folded(model, range(number))
    for router in differ(model, other).routers:
        assert router.phrases == phrases
        assert router.experts is not None and not router.experts.other
    sides = (str(tmp_path / name) for name in "ab")
    assert sign_off(SignOffRequest(*sides)).lines[1].state == state


def test_other_numbers_of_experts_than_rows_are_unlike_and_no_storage_of_the_router(
    differ, tmp_path
):
    model = with_experts(softmax())
    rows = model.edited("weight", lambda w, _: w[:24])
    rows = dataclasses.replace(rows, config={**rows.config, "num_experts": 24})
    record = differ(model, rows)
    assert any("32 experts beside 24 rows" in text for text in record.unlike)
    sides = (str(tmp_path / name) for name in "ab")
    storage = sign_off(SignOffRequest(*sides)).lines[0]
    assert (storage.state, "32 experts beside 24 rows" in storage.sentence) == ("failed", True)


def test_experts_that_moved_alone_fail_a_sign_off(tmp_path):
    model = with_experts(softmax())
    other = permuted(model, SORTED, ("experts",))
    sides = (str(one.write(tmp_path / name)) for one, name in ((model, "a"), (other, "b")))
    line = sign_off(SignOffRequest(*sides)).lines[1]
    assert (line.state, "experts moved alone" in line.sentence) == ("failed", True)


@pytest.mark.parametrize("size", [0.003, 0.01, 0.03])
def test_rows_that_all_moved_alike_are_told_together_whatever_their_dtype(size):
    random = np.random.default_rng(16)
    rows = random.standard_normal((16, 64)).astype(BF16).astype(float)
    gain = random.uniform(0.5, 1.5, 64).astype(np.float32)
    moved = (rows * (1.0 + size * random.standard_normal(rows.shape))).astype(BF16).astype(float)
    router = compare_routers(
        made_up(rows, dtype="BF16", gain=gain), made_up(moved, dtype="BF16", gain=gain)
    )
    assert router.phrases == ("rows changed by {size}, no pattern",)
    assert min(router.moved) > 0.0


def test_a_permutation_is_told_row_by_row_and_of_groups_that_it_mixes(differ):
    (router, _) = differ(softmax(), permuted(softmax(), SORTED, ("weight",))).routers
    assert router.changes[0].evidence["place"] == SORTED
    assert router.experts is not None and "no tensors of experts" in router.experts.reason
    model = with_experts(sigmoid())
    mixed = permuted(model, [*range(1, 64), 0], ("weight", "bias", "experts"))
    (router, _) = differ(model, mixed, experts=True).routers
    assert router.changes[0].evidence["mixes_groups"]
    assert "mixes groups" in router.changes[0].detail


def test_routers_of_another_shape_rule_or_norm_are_told_first(differ):
    record = differ(softmax(), softmax_model(layers=3, experts=16, hidden=128))
    assert [words(router) for router in record.routers] == [["not compared"]] * 2
    assert record.only_second == ("text/2",)
    assert "256 in A, 16 x 128 in B" in record.routers[0].phrases[0]
    record = differ(
        softmax(), softmax().changed(config={"num_experts_per_tok": 8, "rms_norm_eps": 1e-3})
    )
    assert all(router.is_identical for router in record.routers)
    assert "experts chosen 4 in A, 8 in B" in record.unlike[0]
    assert "norm" in " ".join(record.unlike)
    text = unwrapped(shown(record))
    assert "the weights of all 2 routers are identical, and the routers are not" in text
    assert text.index("VERDICT") < text.index("UNLIKE")


def test_a_rounding_has_a_direction_and_a_damaged_router_is_identical_to_itself_alone(differ):
    broken = not_finite(np.nan)(softmax())
    for model, changes in ((broken, []), (softmax(), ["not compared"])):
        for router in differ(model, broken).routers:
            assert (words(router), router.is_identical) == (changes, not changes)
    (router, _) = differ(cast(single()), single()).routers
    assert router.phrases == ("A is B, rounded to bf16",)


def test_few_rows_and_rows_of_zeros_are_judged_by_what_can_be_told():
    for experts in (1, 2, 3):
        rows = np.random.default_rng(experts).standard_normal((experts, 512))
        other = np.random.default_rng(experts + 9).standard_normal((experts, 512))
        pairs = {
            "trained on": rows + 0.05 * other,
            "scaled": 2.0 * rows,
            "negated": -rows,
            "unrelated": other,
        }
        for word, changed in pairs.items():
            assert words(compare_routers(made_up(rows), made_up(changed))) == [word]
    pair = made_up(np.zeros((8, 64))), made_up(np.random.default_rng(0).standard_normal((8, 64)))
    for first, second in (pair, pair[::-1]):
        assert words(compare_routers(first, second)) == ["unrelated"]


def results(values: dict[str, float], num_tokens=4096, version="m/1", blocks=16) -> MemoryResults:
    """One router with these figures, each with a standard error of a tenth."""
    row = {"router": "text/0", "variant": "as_stored", "population": "all"}
    row |= {"num_tokens": num_tokens, "num_blocks": blocks}
    row |= values | {f"{name}_se": 0.1 for name in values}
    return MemoryResults({"column_versions": dict.fromkeys(values, version)}, {"layers": [row]})


def compared(first: MemoryResults, second: MemoryResults) -> Figures:
    figures = figure_changes(first, second)
    assert figures is not None
    return figures


def test_a_change_far_beyond_its_error_is_significant_and_quantiles_need_tokens_below():
    (test,) = compared(results({"margin_p50": 1.0}), results({"margin_p50": 2.0})).tests
    assert test.is_significant
    np.testing.assert_allclose([test.change, test.error], [1.0, 0.1 * np.sqrt(2.0)])
    of_numbers = [results({"margin_p01": 1.0}, number) for number in (4096, 16_384)]
    assert [len(compared(side, side).tests) for side in of_numbers] == [0, 1]


def test_the_p_value_is_that_of_welch_and_more_figures_ask_for_a_smaller_one():
    values = {"margin_p50": 1.0, "z_loss": 1.0, "gini": 1.0}
    sides = results(values, blocks=16), results(values | {"margin_p50": 1.35}, blocks=9)
    # a standard error of a tenth with n - 1 degrees of freedom is that of n numbers
    expected = ttest_ind_from_stats(1.0, 0.1 * 4.0, 16, 1.35, 0.1 * 3.0, 9, equal_var=False)
    assert LEVEL / 3.0 < expected.pvalue < LEVEL
    among = compared(*sides)
    (changed,) = (test for test in among.tests if test.column == "margin_p50")
    np.testing.assert_allclose(changed.p_value, expected.pvalue)
    assert among.significant == []
    alone = (results({"margin_p50": v}, blocks=n) for v, n in ((1.0, 16), (1.35, 9)))
    assert compared(*alone).tests[0].is_significant


def test_figures_of_other_tokens_other_versions_or_without_error_are_not_compared():
    values = {"load_cv_ddof0": 1.0, "margin_p50": 1.0}
    for other, columns, reason in (
        ({"num_tokens": 2048}, ["margin_p50"], "depends on the number of tokens"),
        ({"version": "m/2"}, [], "another version of the metric"),
    ):
        figures = compared(results(values), results(values, **other))
        assert [test.column for test in figures.tests] == columns
        assert figures.left_out == {reason: [name for name in values if name not in columns]}
    sides = results({"margin_p50": 1.0}), results({"margin_p50": 2.0})
    for side in sides:
        side.tables["layers"][0]["margin_p50_se"] = 0.0
    assert compared(*sides).tests == []


def test_the_lists_of_figures_name_figures():
    names = [
        column.name
        for metric in METRICS.all()
        for column in metric.columns.get("layers", ())
        if column.has_se
    ]
    assert [p for p in FREE_OF_T if not any(fnmatchcase(name, p) for name in names)] == []
    assert not any(is_free_of_t(name) for name in ("load_cv_ddof0", "max_vio_global", "num_dead"))


def test_one_changed_layer_stands_beside_the_others(differ):
    model = softmax_model(layers=4)
    text = shown(differ(model, model.edited("weight", noisy(0.01), (2,))), width=120)
    assert "VERDICT  3 of 4 routers identical; 1 changed: layer 2 rows changed by" in text


def test_a_screen_shows_the_routers_that_moved_most_and_a_page_all(moved):
    (first, *_), (change, *_) = moved.routers, moved.routers[0].changes
    routers = [
        dataclasses.replace(
            first, router=f"text/{n}", changes=(dataclasses.replace(change, size=0.01 + n),)
        )
        for n in range(14)
    ]
    record = dataclasses.replace(moved, routers=routers)
    some = assert_cut(document, record, "layer ", "more that moved less")
    assert some == [*range(13, 1, -1)]


def test_a_narrow_screen_shows_the_change_of_a_figure_without_both_values(moved):
    name = "a_figure_with_a_name_of_a_length"
    figure = FigureChange("text/0", name, "", 0.75, 0.25, 0.01, 1e-4, True, 0.1)
    record = dataclasses.replace(moved, figures=Figures([figure], 0.05, (4096, 4096)))
    for width, has_both in ((80, False), (100, True)):
        heading, row = shown(record, width=width).split("figure  ")[1].splitlines()[:2]
        assert ("0.75" in row, "0.25" in row) == (has_both, has_both)
        assert (" A " in heading, " B " in heading) == (has_both, has_both)
        assert "-0.5   0.01" in row
        assert "| 0.75 | 0.25 | -0.5 | 0.01 |" in shown(record, "md", width=width)


FORMS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def stored(dtype: str, *rows: np.ndarray) -> list[Router]:
    return [made_up(w.astype(FORMS[dtype]), dtype=dtype) for w in rows]


NOISY = [(shape, dtype) for shape in ((32, 64), (24, 160), (32, 1024)) for dtype in FORMS]


#: By day each shape in another dtype.
@pytest.mark.parametrize(("shape", "dtype"), by_day(NOISY, NOISY[::4]))
def test_full_rank_noise_of_any_size_is_noise_in_any_dtype(shape, dtype):
    shares = [0.003, 0.005, 0.01, 0.02, 0.025, 0.031, 0.045, 0.0625, 0.08, 0.1, 0.2, 0.5]
    random = np.random.default_rng([11, shape[1]])
    for share in shares[dtype == "BF16" :]:
        rows = random.standard_normal(shape) / 16.0
        pair = stored(dtype, rows, rows + share / 16.0 * random.standard_normal(shape))
        (change,) = compare_routers(*pair).changes
        assert (change.word, "no pattern" in change.phrase) == ("trained on", True), share
        # rounding adds to it
        np.testing.assert_allclose(change.size, share, rtol=0.15 if dtype == "BF16" else 0.1)


def test_a_rotation_in_bfloat16_is_one_and_an_update_of_low_rank_is_none():
    random = np.random.default_rng(3)
    rows, skew = random.standard_normal((32, 256)), random.standard_normal((256, 256)) / 16.0
    for angle in (0.1, 0.5, 3.0):
        turn = expm(angle * (skew - skew.T) / 2.0)
        assert words(compare_routers(*stored("BF16", rows, rows @ turn))) == ["rotated"]
    for rank in (1, 4):
        update = random.standard_normal((32, rank)) @ random.standard_normal((rank, 256))
        other = rows + 0.05 * update / np.sqrt(rank)
        (change,) = compare_routers(made_up(rows), made_up(other)).changes
        assert (change.word, change.evidence["rank"]) == ("update of low rank", rank)


def projected(folder, *models: Checkpoint) -> list[ProjectedRouters]:
    paths = (model.write(folder / f"side_{n}") for n, model in enumerate(models))
    return [projected_routers(lint(str(path))) for path in paths]


def test_exchanged_layers_and_rows_that_turned_are_told_where_results_are_left(tmp_path):
    a, b = projected(tmp_path / "exchanged", softmax(), exchanged(softmax()))
    phrases = [compare_projected(a, b, name).phrases for name in a]
    assert phrases == [("router of layer 1 of A",), ("router of layer 0 of A",)]
    random = np.random.default_rng(6)
    turn, _ = np.linalg.qr(random.standard_normal((256, 256)))
    level = softmax().edited("gain", lambda g, _: np.ones_like(g))
    for word, size in (("turned", 0.0), ("unrelated", 0.3)):
        longer = np.exp(size * random.standard_normal((32, 1)))
        other = level.edited("weight", lambda w, _, longer=longer: w @ turn * longer)
        a, b = projected(tmp_path / word, level, other)
        assert [words(compare_projected(a, b, name)) for name in a] == [[word]] * 2


SUBSET = [0, 2, 3, 7, 8, 9, 14, 15]


def pruned(rows: list[int], biases: list[int], **parts) -> tuple[Router, Router]:
    random = np.random.default_rng(4)
    weight, bias = random.standard_normal((16, 64)), random.standard_normal(16).astype(np.float32)
    first = dataclasses.replace(made_up(weight), selection_bias=bias, **parts)
    return first, dataclasses.replace(first, weight=first.weight[rows], selection_bias=bias[biases])


def test_tokens_of_b_are_refused_before_those_of_a_are_scanned(tmp_path):
    a, rec = sides(BALANCED)
    b, _ = sides(BALANCED, 1000)
    request = DifferenceRequest(str(a), str(b), tokens=(str(rec), str(rec)), out=tmp_path / "out")
    with pytest.raises(RecordingError, match="recorded from another checkpoint"):
        difference(request)
    assert not (tmp_path / "out").exists()


def test_pruned_rows_biases_and_experts_are_one_subset_or_fail():
    pair = pruned(SUBSET, SUBSET)
    router = compare_routers(*pair)
    assert router.phrases == ("pruned: 8 of 16 rows",)
    assert list(router.place) == SUBSET
    assert judge(*pair).state == "inconclusive"
    other = pruned(SUBSET, list(range(8)))
    assert words(compare_routers(*other)) == ["pruned", "bias left behind"]
    assert judge(*other).state == "failed"


def test_what_happened_to_some_rows_is_told_of_them_alone():
    random = np.random.default_rng(8)
    rows = random.standard_normal((12, 64))
    moved = rows + 0.1 * random.standard_normal(rows.shape)
    untouched = [1, 4, 9]
    moved[untouched] = rows[untouched]
    pair = row_pair(made_up(rows), made_up(moved), np.arange(12))
    np.testing.assert_array_equal(np.flatnonzero(pair.row_sizes() == 0.0), untouched)
    rows, other = np.random.default_rng(12).standard_normal((2, 32, 64))
    mixed = np.where(np.arange(32)[:, None] < 8, other, rows)
    routers = RoutersOfA((made_up(rows), dataclasses.replace(made_up(other), name="text/5")))
    (change,) = compare_routers(made_up(rows), made_up(mixed), routers).changes
    assert change.phrase == "router of layer 5 of A, rows 0-7 (8 of 32)"


def test_what_was_done_to_a_gain_or_unequally_to_groups_is_said():
    random = np.random.default_rng(14)
    rows = random.standard_normal((16, 64))
    gain = random.uniform(0.5, 1.5, 64).astype(np.float32)
    edits = {"left out": np.ones(64), "applied twice": gain**2, "taken as 1 + g": 1.0 + gain}
    for phrase, other in edits.items():
        pair = (made_up(rows, gain=g.astype(np.float32)) for g in (gain, other))
        (change,) = compare_routers(*pair).changes
        assert f"gain {phrase}" in change.phrase
    even, uneven = [0, 1, 4, 5, 8, 9, 12, 13], [0, 1, 2, 3, 4, 5, 8, 12]
    states = [judge(*pruned(rows, rows, rule=INF_FILLED)).state for rows in (even, uneven)]
    assert states == ["inconclusive", "failed"]


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


def test_a_faithful_gguf_is_the_same_router_to_diff_signoff_and_gate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, baseline = softmax_model(layers=2), tmp_path / "base.json"
    first, same = str(model.write(tmp_path / "a")), str(as_gguf(model, tmp_path / "b.gguf"))
    record = difference(DifferenceRequest(first, same))
    assert all(router.is_identical for router in record.routers)
    assert record.unlike == ()
    assert any("A is read as" in note for note in record.notes)
    lines = sign_off(SignOffRequest(first, same)).lines
    assert [line.state for line in lines][:3] == ["passed"] * 3
    gate(GateRequest(first, baseline=baseline, update_baseline=True))
    verdict = gate(GateRequest(same, baseline=baseline)).verdict
    assert (verdict.exit_code, verdict.findings) == (0, ())
    other = str(as_gguf(model, tmp_path / "c.gguf", num_experts_per_tok=8))
    assert sign_off(SignOffRequest(first, other)).lines[0].state == "failed"
    verdict = gate(GateRequest(other, baseline=baseline)).verdict
    assert "MGI124" in {finding.code for finding in verdict.findings}


SIGMOID = Rule(4, "sigmoid", Weights("scores", renormalise=True, epsilon=1e-20, scale=2.827))


def test_guards_against_a_sum_of_zero_and_numbers_in_float32_are_the_same_rule():
    stored = dataclasses.replace(
        SIGMOID.weights, epsilon=0.0, floor=2.0**-14, scale=float(np.float32(2.827))
    )
    assert rule_differences(SIGMOID, dataclasses.replace(SIGMOID, weights=stored)) == []
    other = dataclasses.replace(stored, floor=0.1)
    assert rule_differences(SIGMOID, dataclasses.replace(SIGMOID, weights=other)) != []
    for eps, same in ((float(np.float32(1e-6)), True), (1.1e-6, False)):
        assert is_same_norm(Norm("rms", 1e-6, "norm"), Norm("rms", eps, "norm")) is same


CHOSEN = Rule(4, "identity", Weights("softmax_of_selected_logits"), has_logit_bias=True)


def test_a_shift_of_logit_biases_passes_where_weights_are_a_softmax_of_the_chosen():
    random = np.random.default_rng(0)
    bias, rows = random.standard_normal(16).astype(np.float32), random.standard_normal((16, 64))
    sigmoid = dataclasses.replace(CHOSEN, weights=Weights("sigmoid_of_selected_logits"))
    for rule, state in ((CHOSEN, "passed"), (sigmoid, "failed")):
        pair = (made_up(rows, rule, logit_bias=b) for b in (bias, bias + np.float32(0.5)))
        judged = judge(*pair)
        assert [change.word for change, _ in judged.changes] == ["logit bias shifted"]
        assert judged.state == state


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


def test_what_differs_between_two_rules_is_told_in_words_for_every_field():
    assert {*OTHERS, "weights"} == {field.name for field in dataclasses.fields(Rule)}
    assert set(OTHER_WEIGHTS) == {field.name for field in dataclasses.fields(Weights)}
    assert rule_differences(PLAIN, dataclasses.replace(PLAIN)) == []
    for name, (value, words) in OTHERS.items():
        assert rule_differences(PLAIN, dataclasses.replace(PLAIN, **{name: value})) == [words]
    for name, (value, words) in OTHER_WEIGHTS.items():
        weights = dataclasses.replace(PLAIN.weights, **{name: value})
        assert rule_differences(PLAIN, dataclasses.replace(PLAIN, weights=weights)) == [words]
