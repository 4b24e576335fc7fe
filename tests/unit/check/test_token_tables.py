"""Token tables that are wrong in any one way are an error, and what was not checked is counted."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from moegeom.checks.fixes import either
from moegeom.checks.measured import Measured
from moegeom.checks.unseen import unseen_routers
from moegeom.core.router import TokenTable
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.verdict_text import verdict_sentence
from moegeom.router.token_tables import looked_up
from moegeom.studies.check.document import document
from moegeom.studies.check.record import Gate
from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import TABLE, Case, keep, with_token_table, write_model

BF16 = ml_dtypes.bfloat16

HASHED = Case(family="deepseek_v3", made=with_token_table)


def ids(num_experts: int, k: int = 6, rows: int = 2000, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.random((rows, num_experts)).argsort(axis=1)[:, :k].astype(np.int64)


def table(values: np.ndarray, num_experts: int) -> TokenTable:
    return looked_up(TokenTable("text/0", "t", "I64", num_experts=num_experts), values)


def test_a_table_through_bfloat16_has_no_odd_id_above_256_and_ids_beyond_the_experts():
    found = table(ids(384).astype(BF16).astype(np.int64), 384)
    assert found.is_rounded
    assert found.largest == 384
    assert found.num_outside > 0
    assert found.num_repeated > 0
    healthy = table(ids(384), 384)
    assert not healthy.is_rounded
    assert (healthy.num_outside, healthy.num_repeated, healthy.num_used) == (0, 0, 384)
    assert healthy.num_large_odd == int((ids(384)[ids(384) > 256] % 2).sum())


def test_up_to_256_experts_bfloat16_holds_every_id():
    np.testing.assert_array_equal(ids(256).astype(BF16).astype(np.int64), ids(256))
    assert not table(ids(256), 256).is_rounded


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(200))
def test_no_healthy_table_is_taken_for_a_rounded_one(seed):
    assert not table(ids(300, 2, 400, seed), 300).is_rounded


DAMAGE = {
    "through bf16": (lambda t: t.astype(BF16).astype(np.int64), "it went through bfloat16"),
    "stored in bf16": (lambda t: t.astype(BF16), "bf16, which is no integer type"),
    "an id too large": (lambda t: np.where(t == 7, 384, t), "largest 384, experts 0 to 383"),
    "an id below 0": (lambda t: np.where(t == 7, -1, t), "ids are no expert"),
    "an expert twice": (lambda t: np.concatenate([t[:, :3], t[:, :1]], 1), "name an expert twice"),
    "too few": (lambda t: t[:, :3], "3 experts for each token, and the rule chooses 4"),
    "halves": (lambda t: (t + 0.5).astype(np.float32), "no integer type"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_fails_the_gate_and_its_duplicate_does_not(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    change, said = DAMAGE[damage]

    def spoil(tensors, config):
        tensors[TABLE.format(1)] = change(tensors[TABLE.format(1)])

    verdict = gate(GateRequest(str(write_model(tmp_path, HASHED, spoil)))).verdict
    (outcome,) = [o for o in verdict.outcomes if o.code == "MGI111"]
    assert (verdict.exit_code, outcome.state) == (1, "failed")
    assert said in f"{outcome.findings[0].title} {outcome.findings[0].detail}".lower()


def test_routers_that_are_not_looked_at_are_counted_in_every_verdict_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = gate(GateRequest(str(write_model(tmp_path, HASHED, keep))))
    assert found.verdict.exit_code == 0
    said = verdict_sentence(found.verdict)
    assert said.startswith("PASSED: ")
    assert "Not checked: 1 of 3 routers, whether routers were trained." in said
    view = View(width=200)
    for name in RENDERERS.names():
        text = render(document(found, view), name, view)
        assert "1 of 3 routers" in text, name
        assert "PASSED" in text, name


def test_layers_that_were_not_asked_for_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = Case()
    found = gate(GateRequest(str(write_model(tmp_path, case, keep)), layers="1"))
    assert found.verdict.unseen[0] == "2 of 3 routers"


def test_a_table_that_cannot_be_read_is_inconclusive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def flat(tensors, config):
        tensors[TABLE.format(1)] = tensors[TABLE.format(1)].ravel()

    verdict = gate(GateRequest(str(write_model(tmp_path, HASHED, flat)))).verdict
    (outcome,) = [o for o in verdict.outcomes if o.code == "MGI111"]
    assert (verdict.exit_code, outcome.state) == (4, "inconclusive")


# ------------------------------------------------------------------------- experts of the baseline


def with_experts(tensors, config):
    random = np.random.default_rng(2)
    for layer in range(3):
        for expert in range(16):
            name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
            tensors[name] = random.standard_normal((8, 64)).astype(np.float32)


def exchanged(tensors, config):
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    a, b = name.format(3), name.format(9)
    tensors[a], tensors[b] = tensors[b], tensors[a]


def trained(tensors, config):
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = tensors[name] * 1.01


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """The verdict on a checkpoint with experts beside the baseline of the unspoilt one."""
    monkeypatch.chdir(tmp_path)
    case = Case(made=with_experts)
    folders = [tmp_path / name for name in ("before", "now")]
    for folder in folders:
        folder.mkdir()
    old = GateRequest(str(write_model(folders[0], case, keep)), baseline=tmp_path / "base.json")
    gate(replace(old, update_baseline=True))

    def judged(spoil, baseline=tmp_path / "base.json", **options):
        target = str(write_model(folders[1], case, spoil))
        return gate(GateRequest(target, baseline=baseline, **options)).verdict

    return judged


def test_exchanged_experts_fail_where_the_baseline_holds_their_hashes(compared):
    verdict = compared(exchanged)
    (finding,) = verdict.findings
    assert (verdict.exit_code, finding.code) == (1, "MGI121")
    assert "2 experts are those of other rows in the baseline: 3 was 9, 9 was 3" in finding.title
    assert finding.fix.startswith("exchange experts 3 and 9")


def test_the_mirror_fault_stays_found_and_says_what_to_exchange(compared):
    def rows(tensors, config):
        name = "model.layers.1.mlp.gate.weight"
        tensors[name] = tensors[name][[0, 1, 2, 9, *range(4, 9), 3, *range(10, 16)]]

    (finding,) = compared(rows).findings
    assert finding.code == "MGI121"
    assert finding.fix.startswith("exchange rows 3 and 9 of model.layers.1.mlp.gate.weight")


@pytest.mark.parametrize("healthy", [keep, trained])
def test_experts_that_stayed_or_were_trained_pass(compared, healthy):
    verdict = compared(healthy)
    assert verdict.exit_code == 0
    assert not any("hashes" in text for text in verdict.unseen)


def test_experts_that_went_with_their_rows_pass(compared):
    def both(tensors, config):
        exchanged(tensors, config)
        name = "model.layers.1.mlp.gate.weight"
        tensors[name] = tensors[name][[0, 1, 2, 9, *range(4, 9), 3, *range(10, 16)]]

    assert "MGI121" not in {finding.code for finding in compared(both).findings}


def test_hashes_that_cannot_be_compared_are_told_in_the_verdict(compared):
    def without(tensors, config):
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]

    verdict = compared(without)
    assert "experts (hashes in the baseline, not compared)" in verdict.unseen
    assert "hashes in the baseline, not compared" in verdict_sentence(verdict)


# ------------------------------------------------------------------------- words of all formats


@pytest.mark.parametrize(("spoil", "word"), [(keep, "PASSED"), (exchanged, "FAILED")])
def test_every_format_says_the_word_of_the_exit_code_and_names_checks_by_what_holds(
    compared, spoil, word
):
    verdict = compared(spoil)
    told = document(Gate(verdict, gate(GateRequest("now/model")).run), View())
    for name in RENDERERS.names():
        assert word in render(told, name, View(width=200)), name
    assert 'name="MGI103 no router row is zero."' in render(told, "junit")
    assert "| MGI103 | no router row is zero. | passed |" in render(told, "md")
    assert json.loads(render(told, "json"))["verdict"] == word


# ------------------------------------------------------------------------- rows that did not move


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: np.where(np.arange(16)[:, None] == 5, 3 * w, w), id="times 3"),
        pytest.param(lambda w: np.where(np.arange(16)[:, None] == 5, 0.0, w), id="zero"),
        pytest.param(lambda w: np.where(np.arange(16)[:, None] == 5, 100 * w, w), id="times 100"),
    ],
)
@pytest.mark.parametrize(("factor", "common"), [(1.0, 0.0), (1.0, 0.5), (2.0, 0.0)])
def test_only_the_row_that_changed_is_said_to_have_moved(compared, change, common, factor):
    def spoil(tensors, config):
        name = "model.layers.1.mlp.gate.weight"
        w = tensors[name].astype(np.float64)
        tensors[name] = (factor * change(w) + common * w[2]).astype(np.float32)

    found = [f for f in compared(spoil).findings if f.code in ("MGG401", "MGI128")]
    assert {f.routers for f in found} == {("text/1",)}
    # a factor of the other rows is told as one
    told = [f.title for f in found if "rows: scaled by 2" not in f.title]
    assert len(told) == 1
    assert "expert 5 " in told[0]
    if found[0].code == "MGG401":
        assert "1 of 16 rows moved" in told[0]


def test_a_copied_row_blames_no_other_one(compared):
    def copied(tensors, config):
        name = "model.layers.1.mlp.gate.weight"
        tensors[name] = tensors[name][[*range(5), 6, *range(6, 16)]]

    found = {finding.code: finding for finding in compared(copied).findings}
    assert found.keys() == {"MGI104", "MGI128"}
    assert found["MGI128"].title == "the rows: row 5 is now a copy of row 6."


def test_no_repair_begins_with_or():
    assert either("", "keep it.") == "keep it."
    assert either("shift it. ", "keep it.") == "shift it. Another way: keep it."


# ------------------------------------------------------------------------- what is not looked at


def counted(num_routers, skipped=(), measured=()):
    """What is said of a checkpoint of so many routers, some skipped and some measured."""
    run = {
        "checkpoint": {
            "num_routers": num_routers,
            "skipped": [{"tensor": name, "reason": "a reason"} for name in skipped],
        },
        "routers": [{"name": f"text/{i}", "tensors": [n]} for i, n in enumerate(measured)],
    }
    return list(unseen_routers(Measured([], {}, {}, {}, run=run)))


def test_a_listed_router_whose_choices_were_counted_was_looked_at_and_counts_once():
    assert counted(3, skipped=["c"], measured=["a", "b", "c"]) == []
    assert counted(2, skipped=["c"], measured=["a", "b"]) == ["1 of 3 routers"]


def test_a_tensor_that_is_skipped_for_two_reasons_counts_once():
    assert counted(2, skipped=["c", "c"], measured=["a", "b"]) == ["1 of 3 routers"]


def test_routers_that_were_not_asked_for_and_skipped_ones_are_counted_together():
    assert counted(3, skipped=["d"], measured=["a"]) == ["3 of 4 routers"]
