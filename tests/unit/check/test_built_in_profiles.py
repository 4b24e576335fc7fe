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
from tests.unit.check.conftest import BIAS, GATE, Case, with_token_table
from tests.unit.check.defects import SAID, rows, setting, tensor

RELEASE, TRAINING = Path("release"), Path("training")


def rounded(tensors, config):
    """Routers of layer 1 that were quantised to 15 steps a row: a warning by default."""
    rows(lambda w: np.rint(7 * w / abs(w).max(axis=1, keepdims=True)) / 56)(tensors, config)


def test_release_is_nowhere_milder_and_training_nowhere_stricter_than_the_default():
    offenders = []
    for check in CHECKS.all():
        strict, mild = check.weighs("release"), check.weighs("training")
        usual = check.weighs("default") or check.severity
        if strict is None or SEVERITY_ORDER[strict] > SEVERITY_ORDER[usual]:
            offenders.append((check.code, "release"))
        if mild is not None and SEVERITY_ORDER[mild] < SEVERITY_ORDER[check.severity]:
            offenders.append((check.code, "training"))
        if not {*check.severities, *check.only_in} <= {*BUILT_IN} - {"default"}:
            offenders.append((check.code, "a profile that is not built in"))
    assert offenders == []


def test_a_pass_says_in_one_line_what_would_fail_a_release(judged):
    report = judged(spoil=rounded)
    assert report.exit_code == 0
    for name, exit_code in (("default", 0), ("release", 1)):
        assert gate(GateRequest("model", profile=Path(name))).exit_code == exit_code
    text = render(document(report, View(200)), "table", View(200))
    lines = [line for line in text.splitlines() if line.startswith("release: ")]
    codes = [o.code for o in report.release.outcomes if report.release.fails(o)]
    assert "MGN118" in codes
    counted = len(report.release.findings)
    noun = "finding" if counted == 1 else "findings"
    assert lines == [f"release: would fail on {', '.join(codes)} ({counted} {noun})"]
    for name in RENDERERS.names():
        assert "MGN118" in render(document(report, View(200)), name, View(200)), name
    as_json = json.loads(render(document(report, View()), "json"))["release"]
    assert as_json == {"verdict": "FAILED", "exit_code": 1, "codes": codes}


def test_a_healthy_checkpoint_would_pass_a_release_and_passes_it(judged):
    text = render(document(judged(), View()), "table", View())
    assert [line for line in text.splitlines() if "release: " in line] == [
        "release: would pass on what was checked"
    ]
    release = gate(GateRequest("model", profile=RELEASE))
    assert (release.exit_code, release.verdict.profile) == (0, ("built-in profile release",))
    training = gate(GateRequest("model", profile=TRAINING))
    assert training.verdict.profile[0].startswith("built-in profile training (less severe: ")
    failed = judged(spoil=rows(lambda w: np.nan * w))
    for report in (release, training, failed):  # asked for, or the run failed
        assert report.release is None
        assert "release: would" not in render(document(report, View()), "table", View())


def test_routers_that_were_not_looked_at_leave_a_release_inconclusive(judged, tmp_path):
    assert judged(Case(family="deepseek_v3", made=with_token_table)).exit_code == 0
    report = gate(GateRequest("model", profile=RELEASE))
    (outcome,) = report.verdict.open
    assert (report.exit_code, outcome.code) == (4, "MGI115")
    assert "1 of 3 routers were not looked at" in outcome.reason
    (tmp_path / "p.toml").write_text(
        'extends = "release"\n[[ignore]]\ncode = "MGI115"\nreason = "tables"\n'
    )
    assert gate(GateRequest("model", profile=tmp_path / "p.toml")).exit_code == 0
    assert judged(layers="1").exit_code == 0
    assert gate(GateRequest("model", profile=RELEASE, layers="1")).exit_code == 4


def test_a_bias_that_was_never_updated_is_a_note_while_training_runs(judged):
    untouched = tensor(BIAS, lambda bias: 0.0 * bias)
    case = Case(family="deepseek_v3", made=setting(**SAID))
    report = judged(case, untouched, profile=TRAINING)
    assert [(f.code, f.severity) for f in report.verdict.findings] == [("MGN116", "note")]
    assert gate(GateRequest("model", profile=RELEASE)).exit_code == 1


def test_rows_that_moved_are_a_note_while_training_runs_and_stop_a_release(judged, tmp_path):
    base = tmp_path / "base.json"
    judged(baseline=base, update_baseline=True)
    noise = np.random.default_rng(0).standard_normal((16, 64))
    moved = rows(lambda w: w * (1.0 + 0.2 * noise))
    for name, exit_code, severity in (("training", 0, "note"), ("release", 1, "error")):
        report = judged(spoil=moved, baseline=base, profile=Path(name))
        assert report.exit_code == exit_code
        assert {f.severity for f in report.verdict.findings if f.code == "MGG401"} == {severity}


def test_a_file_extends_a_built_in_profile_and_its_own_words_come_first():
    profile = parse_profile({"extends": "release", "severity": {"MGN118": "note"}}, "p.toml")
    by_code = {check.code: check for check in CHECKS.all()}
    assert profile.override(by_code["MGN118"]) == "note"
    assert profile.override(by_code["MGG401"]) == "error"
    assert profile.override(by_code["MGB201"]) is None
    for value in ("strict", "", 3, ["release"]):
        with pytest.raises(
            UsageError, match="extends is .*expected one of default, release, training"
        ):
            parse_profile({"extends": value}, "p.toml")


def test_a_built_in_profile_leaves_the_file_of_the_folder_aside(judged, tmp_path):
    (tmp_path / "moegeom.toml").write_text('select = ["MGG"]\n')
    report = judged(profile=RELEASE)
    assert "MGI101" in {outcome.code for outcome in report.verdict.outcomes}
    # and a missing gate is not a passed release
    assert judged(spoil=tensor(GATE, lambda gate: None), profile=RELEASE).exit_code == 1


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
    assert listed == {code: each for code, each in weights.items() if len({*each}) > 1}
