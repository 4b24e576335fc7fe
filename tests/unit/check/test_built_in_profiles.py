"""Built-in profiles: release is nowhere milder, training lets a run go on, and both are told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moegeom.checks import CHECKS
from moegeom.checks.profile import BUILT_IN
from moegeom.checks.profile_file import parse_profile
from moegeom.core.errors import UsageError
from moegeom.core.finding import SEVERITY_ORDER
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.studies.check.document import document
from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import BIAS, GATE, Case, keep, with_token_table, write_model
from tests.unit.check.defects import SAID, rows, setting, tensor

RELEASE, TRAINING = Path("release"), Path("training")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def judged(tmp_path, case=Case(), spoil=keep, **options):  # noqa: B008
    return gate(GateRequest(str(write_model(tmp_path, case, spoil)), **options))


def rounded(tensors, config):
    """Routers of layer 1 that were quantised to 15 steps a row: a warning by default."""
    rows(lambda w: np.rint(7 * w / abs(w).max(axis=1, keepdims=True)) / 56)(tensors, config)


def test_release_is_nowhere_milder_than_the_default():
    for check in CHECKS.all():
        strict, usual = check.weighs("release"), check.weighs("default") or check.severity
        assert strict is not None, check.code
        assert SEVERITY_ORDER[strict] <= SEVERITY_ORDER[usual], check.code


def test_training_is_nowhere_stricter_than_the_default():
    for check in CHECKS.all():
        mild = check.weighs("training")
        if mild is not None:
            assert SEVERITY_ORDER[mild] >= SEVERITY_ORDER[check.severity], check.code


def test_no_check_names_a_profile_that_is_not_built_in():
    for check in CHECKS.all():
        assert {*check.severities, *check.only_in} <= {*BUILT_IN} - {"default"}, check.code


@pytest.mark.parametrize(("name", "exit_code"), [(None, 0), ("default", 0), ("release", 1)])
def test_a_router_that_was_rounded_passes_and_fails_a_release(tmp_path, name, exit_code):
    profile = None if name is None else Path(name)
    assert judged(tmp_path, spoil=rounded, profile=profile).exit_code == exit_code


def test_a_pass_says_in_one_line_what_would_fail_a_release(tmp_path):
    found = judged(tmp_path, spoil=rounded)
    text = render(document(found, View(200)), "table", View(200))
    lines = [line for line in text.splitlines() if line.startswith("release: ")]
    codes = [o.code for o in found.release.outcomes if found.release.fails(o)]
    assert "MGN118" in codes
    counted = len(found.release.findings)
    noun = "finding" if counted == 1 else "findings"
    assert lines == [f"release: would fail on {', '.join(codes)} ({counted} {noun})"]
    for name in RENDERERS.names():
        assert "MGN118" in render(document(found, View(200)), name, View(200)), name
    told = json.loads(render(document(found, View()), "json"))["release"]
    assert told == {"verdict": "FAILED", "exit_code": 1, "codes": codes}


def test_a_healthy_checkpoint_would_pass_a_release_and_passes_it(tmp_path):
    found = judged(tmp_path)
    text = render(document(found, View()), "table", View())
    assert [line for line in text.splitlines() if "release: " in line] == [
        "release: would pass on what was checked"
    ]
    assert gate(GateRequest("model", profile=RELEASE)).exit_code == 0


@pytest.mark.parametrize(
    ("spoil", "profile"), [(keep, RELEASE), (keep, TRAINING), (rows(lambda w: np.nan * w), None)]
)
def test_nothing_is_said_of_a_release_where_it_was_asked_for_or_the_run_failed(
    tmp_path, spoil, profile
):
    found = judged(tmp_path, spoil=spoil, profile=profile)
    assert found.release is None
    assert "release: would" not in render(document(found, View()), "table", View())


def test_a_router_that_was_not_looked_at_leaves_a_release_inconclusive(tmp_path):
    case = Case(family="deepseek_v3", made=with_token_table)
    assert judged(tmp_path, case).exit_code == 0
    found = gate(GateRequest("model", profile=RELEASE))
    (outcome,) = found.verdict.open
    assert (found.exit_code, outcome.code) == (4, "MGI115")
    assert "1 of 3 routers were not looked at" in outcome.reason
    (tmp_path / "p.toml").write_text(
        'extends = "release"\n[[ignore]]\ncode = "MGI115"\nreason = "tables"\n'
    )
    assert gate(GateRequest("model", profile=tmp_path / "p.toml")).exit_code == 0


def test_layers_that_were_not_asked_for_leave_a_release_inconclusive(tmp_path):
    judged(tmp_path)
    assert gate(GateRequest("model", profile=RELEASE, layers="1")).exit_code == 4
    assert gate(GateRequest("model", layers="1")).exit_code == 0


def test_a_bias_that_was_never_updated_is_a_note_while_training_runs(tmp_path):
    untouched = tensor(BIAS, lambda bias: 0.0 * bias)
    case = Case(family="deepseek_v3", made=setting(**SAID))
    found = judged(tmp_path, case, untouched, profile=TRAINING)
    assert [(f.code, f.severity) for f in found.verdict.findings] == [("MGN116", "note")]
    assert gate(GateRequest("model", profile=RELEASE)).exit_code == 1


def test_rows_that_moved_are_a_note_while_training_runs_and_stop_a_release(tmp_path):
    base = tmp_path / "base.json"
    judged(tmp_path, baseline=base, update_baseline=True)
    noise = np.random.default_rng(0).standard_normal((16, 64))
    moved = rows(lambda w: w * (1.0 + 0.2 * noise))
    (tmp_path / "now").mkdir()
    target = str(write_model(tmp_path / "now", Case(), moved))
    for name, exit_code, severity in (("training", 0, "note"), ("release", 1, "error")):
        found = gate(GateRequest(target, baseline=base, profile=Path(name)))
        assert found.exit_code == exit_code
        assert {f.severity for f in found.verdict.findings if f.code == "MGG401"} == {severity}


def test_a_file_extends_a_built_in_profile_and_its_own_words_come_first(tmp_path):
    profile = parse_profile({"extends": "release", "severity": {"MGN118": "note"}}, "p.toml")
    by_code = {check.code: check for check in CHECKS.all()}
    assert profile.override(by_code["MGN118"]) == "note"
    assert profile.override(by_code["MGG401"]) == "error"
    assert profile.override(by_code["MGB201"]) is None


@pytest.mark.parametrize("value", ["strict", "", 3, ["release"]])
def test_a_profile_that_is_not_built_in_cannot_be_extended(value):
    with pytest.raises(UsageError, match="extends is .*expected default, release, training"):
        parse_profile({"extends": value}, "p.toml")


def test_the_profile_is_told_with_what_it_judges_more_mildly(tmp_path):
    found = judged(tmp_path, profile=TRAINING)
    (said,) = found.verdict.profile
    assert said.startswith("built-in profile training (less severe: ")
    assert gate(GateRequest("model", profile=RELEASE)).verdict.profile == (
        "built-in profile release",
    )


def test_a_built_in_profile_leaves_the_file_of_the_folder_aside(tmp_path):
    (tmp_path / "moegeom.toml").write_text('select = ["MGG"]\n')
    found = judged(tmp_path, profile=RELEASE)
    assert "MGI101" in {outcome.code for outcome in found.verdict.outcomes}


def test_a_missing_gate_is_not_a_passed_release(tmp_path):
    found = judged(tmp_path, spoil=tensor(GATE, lambda gate: None), profile=RELEASE)
    assert found.exit_code == 1


def test_the_page_of_the_gate_lists_every_check_that_weighs_differently():
    page = (Path(__file__).resolve().parents[3] / "docs/gate.md").read_text("utf-8")
    table = page.partition("| default | release | training | checks |\n")[2].partition("\n\n")[0]
    listed = {}
    for line in table.splitlines()[1:]:
        *weights, codes = (cell.strip() for cell in line.strip("|").split("|"))
        listed |= dict.fromkeys(codes.split(", "), tuple(weights))
    weights = {
        check.code: tuple(check.weighs(name) or "not judged" for name in BUILT_IN)
        for check in CHECKS.all()
    }
    assert listed == {code: found for code, found in weights.items() if len({*found}) > 1}
