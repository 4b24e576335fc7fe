"""Token tables and gates of attention that are wrong in any one way are a finding, and what was not
checked is counted.
"""

import ml_dtypes
import numpy as np
import pytest

from moegeom.checks.catalogue.biases import either
from moegeom.checks.measured import Measured, unseen_routers
from moegeom.core.errors import UsageError
from moegeom.core.router import TokenTable
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.verdict_text import verdict_sentence
from moegeom.router.facts import looked_up
from moegeom.studies.check.document import document
from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import GATE, TABLE, Case, keep, outcome_of, with_token_table
from tests.unit.check.defects import OF_ATTENTION, gates, rows, tensor, together, with_attention

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


def test_no_healthy_table_is_taken_for_a_rounded_one():
    """Up to 256 experts bfloat16 holds every id."""
    np.testing.assert_array_equal(ids(256).astype(BF16).astype(np.int64), ids(256))
    assert not table(ids(256), 256).is_rounded
    for seed in range(200):
        assert not table(ids(300, 2, 400, seed), 300).is_rounded, seed


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
def test_a_damaged_table_fails_the_gate(judged, damage):
    change, words = DAMAGE[damage]
    report = judged(HASHED, tensor(TABLE, change))
    outcome = outcome_of(report, "MGI111")
    assert (report.exit_code, outcome.state) == (1, "failed")
    assert words in f"{outcome.findings[0].title} {outcome.findings[0].detail}".lower()


def test_a_table_that_cannot_be_read_is_inconclusive(judged):
    report = judged(HASHED, tensor(TABLE, np.ravel))
    assert (report.exit_code, outcome_of(report, "MGI111").state) == (4, "inconclusive")


def test_routers_that_are_not_looked_at_are_counted_in_every_verdict_line(judged):
    report = judged(HASHED)
    assert report.exit_code == 0
    sentence = verdict_sentence(report.verdict)
    assert sentence.startswith("PASSED IN PART: ")
    assert "Not checked: 1 of 3 routers, whether routers were trained." in sentence
    view = View(width=200)
    for name in RENDERERS.names():
        text = render(document(report, view), name, view)
        assert "1 of 3 routers" in text, name
        assert "PASSED" in text, name
    assert judged(layers="1").verdict.unseen[0] == "2 of 3 routers"


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
def compared(judged, tmp_path, records):
    """The gate on a checkpoint with experts beside the baseline of the unspoilt one."""
    case, base = Case(made=with_experts), tmp_path / "base.json"
    if case not in records:
        judged(case, baseline=base, update_baseline=True)
        records[case] = base.read_text("utf-8")
    base.write_text(records[case], "utf-8")
    return lambda spoil: judged(case, spoil, baseline=base)


ROWS = rows(lambda w: w[[0, 1, 2, 9, *range(4, 9), 3, *range(10, 16)]])


def test_exchanged_experts_or_rows_fail_and_are_told_with_what_to_exchange(compared):
    report = compared(exchanged)
    (finding,) = report.verdict.findings
    assert (report.exit_code, finding.code) == (1, "MGI121")
    assert "2 experts are those of other rows in the baseline: 3 was 9, 9 was 3" in finding.title
    assert finding.fix.startswith("exchange experts 3 and 9")
    (finding,) = compared(ROWS).verdict.findings
    assert finding.code == "MGI121"
    assert finding.fix.startswith("exchange rows 3 and 9 of model.layers.1.mlp.gate.weight")


def test_experts_that_stayed_were_trained_or_went_with_their_rows_pass(compared):
    for healthy in (keep, trained):
        verdict = compared(healthy).verdict
        assert verdict.exit_code == 0
        assert not any("hashes" in text for text in verdict.unseen)
    findings = compared(together(exchanged, ROWS)).verdict.findings
    assert "MGI121" not in {finding.code for finding in findings}


def test_hashes_that_cannot_be_compared_are_told_in_the_verdict(compared):
    def without(tensors, config):
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]

    verdict = compared(without).verdict
    assert "experts (hashes in the baseline, not compared)" in verdict.unseen
    assert "hashes in the baseline, not compared" in verdict_sentence(verdict)


def test_every_format_says_that_it_failed(compared):
    page = document(compared(exchanged), View())
    for name in RENDERERS.names():
        assert "FAILED" in render(page, name, View(width=200)), name


@pytest.mark.parametrize("times", [3, 0.0, 100])
@pytest.mark.parametrize(("factor", "common"), [(1.0, 0.0), (1.0, 0.5), (2.0, 0.0)])
def test_only_the_row_that_changed_has_moved(compared, times, common, factor):
    def spoil(tensors, config):
        name = GATE.format(1)
        w = tensors[name].astype(np.float64)
        changed = np.where(np.arange(16)[:, None] == 5, times * w, w)
        tensors[name] = (factor * changed + common * w[2]).astype(np.float32)

    findings = [f for f in compared(spoil).verdict.findings if f.code in ("MGG401", "MGI128")]
    assert {f.routers for f in findings} == {("text/1",)}
    # a factor of the other rows is told as one
    (title,) = [f.title for f in findings if "rows: scaled by 2" not in f.title]
    assert "expert 5 " in title
    if findings[0].code == "MGG401":
        assert "1 of 16 rows moved" in title


def test_a_copied_row_blames_no_other_one(compared):
    copied = rows(lambda w: w[[*range(5), 6, *range(6, 16)]])
    findings = {finding.code: finding for finding in compared(copied).verdict.findings}
    assert findings.keys() == {"MGI104", "MGI128"}
    assert findings["MGI128"].title == "the rows: row 5 is now a copy of row 6."


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


def test_each_router_that_was_not_looked_at_counts_once():
    assert counted(3, skipped=["c"], measured=["a", "b", "c"]) == []  # its choices were counted
    assert counted(2, skipped=["c"], measured=["a", "b"]) == ["1 of 3 routers"]
    assert counted(2, skipped=["c", "c"], measured=["a", "b"]) == ["1 of 3 routers"]
    assert counted(3, skipped=["d"], measured=["a"]) == ["3 of 4 routers"]


def test_no_repair_begins_with_or():
    assert either("", "keep it.") == "keep it."
    assert either("shift it. ", "keep it.") == "shift it. Another way: keep it."


ATTENTIVE = Case(made=with_attention)


def test_gates_are_not_read_unless_asked_for(outcomes):
    assert not outcomes(ATTENTIVE).keys() & OF_ATTENTION.keys()


def test_checks_do_not_apply_where_no_gate_is_known(outcomes):
    of_each = outcomes(Case(request={"attention": True}))
    assert {(of_each[code].state, of_each[code].reason) for code in OF_ATTENTION} == {
        ("does not apply", "no gate and no sink of attention is known in this checkpoint")
    }


def test_a_check_that_is_required_and_not_asked_for_is_inconclusive(judged, tmp_path):
    (tmp_path / "moegeom.toml").write_text('require = ["MGA101"]\n')
    outcome = outcome_of(judged(ATTENTIVE), "MGA101")
    assert outcome.state == "inconclusive"
    assert "--attention" in outcome.reason


@pytest.mark.parametrize(("code", "change"), [("MGA101", 0.0), ("MGA102", np.inf)])
def test_the_head_that_was_spoilt_is_named(judged, code, change):
    spoil = gates(lambda rows: rows.fill(change))
    (finding,) = outcome_of(judged(ATTENTIVE, spoil, attention=True), code).findings
    assert finding.routers == ("text/1",)
    assert finding.title.startswith("1 of 4 attention")
    assert "head 1." in finding.title


@pytest.mark.parametrize("option", ["attention", "experts"])
def test_results_hold_neither_gates_nor_experts(judged, tmp_path, option):
    judged(out=tmp_path / "results")
    with pytest.raises(UsageError, match=f"--{option} comes too late"):
        gate(GateRequest("results", **{option: True}))
