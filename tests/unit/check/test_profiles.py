"""Profiles: what a file may say, the built-in ones, where one counts, and how its thresholds judge."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import SyntheticModel, write_checkpoint
from moegeom.checks import CHECKS, measured_results, run_checks
from moegeom.checks.baseline import Baseline, BaselineRouter
from moegeom.checks.profile import (
    BUILT_IN,
    DEFAULT,
    Ignore,
    LayerLimits,
    Profile,
    Threshold,
    deviations,
)
from moegeom.checks.profile_file import find_profile, parse_profile, profile_template, read_profile
from moegeom.core.errors import OutputError, UsageError
from moegeom.core.finding import SEVERITY_ORDER, Outcome
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.results.reader import MemoryResults
from moegeom.studies.check.document import document
from moegeom.studies.check.study import GateRequest, gate, lies_with, profile_path
from tests.unit.check.conftest import BIAS, GATE, Case, with_token_table
from tests.unit.check.defects import SAID, rows, setting, tensor

WHOLE = """
select = ["MGI", "MGB203"]
require = ["MGB203"]
fail_on = "warning"
baseline = "b.json"
family_wise_error = 0.01

[severity]
MGB203 = "error"

[limits.MGB203]
fair_shares = 4
[[limits.MGB203.at]]
layers = "0-2"
fair_shares = 6.5

[[ignore]]
code = "MGN112"
layers = "3-5"
reason = "our engine keeps it"

[[threshold]]
column = "load_cv_ddof0"
at_most = { times_baseline = 1.5 }
layers = "1"
severity = "warning"

[[threshold]]
column = "gini"
at_least = 0.1
percentile = 95
"""


def test_a_whole_profile_is_read():
    profile = parse_profile(tomllib.loads(WHOLE), "moegeom.toml")
    assert profile.selects("MGI101")
    assert not profile.selects("MGN112")
    assert profile.requires("MGB203")
    assert (profile.fail_on, profile.baseline) == ("warning", "b.json")
    assert profile.family_wise_error == 0.01
    assert profile.severity == {"MGB203": "error"}
    assert [profile.limit("MGB203", "fair_shares", layer, 3.0) for layer in (1, 3)] == [6.5, 4.0]
    assert profile.ignore == (Ignore("MGN112", "our engine keeps it", frozenset({3, 4, 5})),)
    first, second = profile.thresholds
    assert first == Threshold(
        "load_cv_ddof0", "at_most", 1.5, True, frozenset({1}), severity="warning"
    )
    assert second == Threshold("gini", "at_least", 0.1, percentile=95.0)


WRONG = {
    'selct = ["MGI"]': "Did you mean select",
    'select = ["MGX"]': "no check has the code 'MGX'",
    "select = []": "select is a list of 0, expected a list of at least 1 entry",
    'fail_on = "note"': "expected one of error, warning",
    "family_wise_error = 1.5": "expected a number below 1",
    '[severity]\nMGB230 = "error"': "Did you mean MGB20",
    "[limits.MGB203]\nfair_share = 2": "Did you mean fair_shares",
    "[limits.MGG206]\nfactor = 0": "factor is 0, expected a number above 0",
    "[limits.MGI104]\nx = 1": "unknown key 'MGI104'",
    "[[limits.MGB203.at]]\nfair_shares = 2": "limits.MGB203.at[0]: key 'layers' is missing",
    '[[limits.MGB203.at]]\nlayers = "x"\nfair_shares = 2': "neither a layer nor a range",
    '[[ignore]]\ncode = "MGN112"': "has no reason",
    '[[ignore]]\ncode = "MGN999"\nreason = "x"': "no check has the code",
    '[ignore]\ncode = "MGN112"': "begins with [[ignore]]",
    '[[threshold]]\ncolumn = "gini"\nat_most = 1\nat_least = 0': "either at_most or at_least",
    '[[threshold]]\ncolumn = "gini"\nat_most = { times_base = 2 }': "Did you mean times_baseline",
    '[[threshold]]\ncolumn = "gini"\nat_most = {times_baseline = 2}\npercentile = 5': "no layer",
}


def test_what_a_profile_cannot_mean_is_an_error_that_helps():
    for text, words in WRONG.items():
        with pytest.raises(UsageError) as raised:
            parse_profile(tomllib.loads(text), "moegeom.toml")
        assert words in str(raised.value)
        assert raised.value.message.startswith("moegeom.toml")


def test_an_empty_profile_and_the_template_until_it_is_edited_are_the_default():
    assert parse_profile({}, "moegeom.toml") == DEFAULT
    assert tomllib.loads(profile_template()) == {}


def live(text: str) -> dict:
    """The lines of a part of the template when they count."""
    lines = [line[2:] for line in text.splitlines() if re.match(r"# (\[|[a-z_0-9]+ = )", line)]
    return tomllib.loads("\n".join(lines))


def test_every_line_of_the_template_is_the_default_when_it_counts():
    text = profile_template()
    profile = parse_profile(live(text[text.index("# [limits.") :]), "moegeom.toml")
    for check in CHECKS.all():
        for limit in check.limits:
            assert profile.limit(check.code, limit.name, 0, float("nan")) == limit.default


def test_the_examples_of_the_template_can_be_read():
    head = profile_template().partition("# Limits of the checks")[0]
    assert parse_profile(live(head), "moegeom.toml").thresholds


def test_moegeom_toml_comes_before_pyproject(tmp_path):
    assert find_profile(tmp_path) is None
    project = tmp_path / "pyproject.toml"
    for text in ("tool = 5", 'tool = "moegeom"', "[tool.other]\nx = 1\n"):
        project.write_text(text)
        assert find_profile(tmp_path) is None
        with pytest.raises(UsageError, match="has no table"):
            read_profile(project)
    project.write_text("tool.moegeom = 5")
    with pytest.raises(UsageError, match=r"pyproject.toml: it is 5, expected a table"):
        read_profile(project)
    project.write_text('[tool.moegeom]\nselect = ["MGI"]\n')
    assert find_profile(tmp_path) == project
    assert read_profile(project).select == ("MGI",)
    own = tmp_path / "moegeom.toml"
    own.write_text('select = ["MGN"]\n')
    assert find_profile(tmp_path) == own


def test_a_file_that_is_no_toml_or_hostile_is_an_error(tmp_path):
    file = tmp_path / "moegeom.toml"
    for content in (*(b"\xff\xfe", b"a = ", b"[" * 100_000, b"x = " + b"9" * 5000),):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"moegeom\.toml"):
            read_profile(file)


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
    lines = [line for line in text.splitlines() if line.startswith("--profile release: ")]
    codes = [o.code for o in report.release.outcomes if report.release.fails(o)]
    assert "MGN118" in codes
    counted = len(report.release.findings)
    noun = "finding" if counted == 1 else "findings"
    assert lines == [f"--profile release: would fail on {', '.join(codes)} ({counted} {noun})"]
    for name in RENDERERS.names():
        assert "MGN118" in render(document(report, View(200)), name, View(200)), name
    as_json = json.loads(render(document(report, View()), "json"))["release"]
    assert as_json == {"verdict": "FAILED", "exit_code": 1, "codes": codes}


def test_a_healthy_checkpoint_would_pass_a_release_and_passes_it(judged):
    text = render(document(judged(), View()), "table", View())
    assert [line for line in text.splitlines() if "release: " in line] == [
        "--profile release: would pass on what was checked"
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
    assert profile.override(by_code["MGB204"]) is None
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


SOFT = 'select = ["MGG"]\n'


@pytest.fixture
def place(tmp_path):
    """``ckpt``, with a profile in it, beside an empty folder ``mine``."""
    shape = SyntheticModel(hidden=16, experts=8, top_k=2, layers=2)
    write_checkpoint(tmp_path / "ckpt", shape)
    (tmp_path / "ckpt" / "moegeom.toml").write_text(SOFT)
    (tmp_path / "ckpt" / "inside").mkdir()
    (tmp_path / "mine").mkdir()
    return tmp_path


#: Where somebody stands, what is typed there, and whether that place is the checkpoint's.
STANDS = [
    ("ckpt", ".", True),
    ("ckpt", "", True),
    ("ckpt", "../ckpt", True),
    ("ckpt", "model.safetensors", True),
    ("ckpt/inside", "..", True),
    ("mine", "../ckpt", False),
    ("mine", "hf://owner/ckpt", False),
    (".", "ckpt", False),
    (".", "ckpt/model.safetensors", False),
    ("link", ".", True),
    ("link", "../ckpt", True),
    ("ckpt", "../link", True),
    ("snapshot", "model.safetensors", True),
]


@pytest.mark.parametrize(("stand", "target", "is_theirs"), STANDS)
def test_a_folder_of_the_checkpoint_is_not_the_users(place, monkeypatch, stand, target, is_theirs):
    (place / "link").symlink_to("ckpt")
    (place / "snapshot").mkdir()  # as the hub's cache has it: files are links into another folder
    (place / "snapshot" / "model.safetensors").symlink_to("../ckpt/model.safetensors")
    monkeypatch.chdir(place / stand)
    (place / stand / "moegeom.toml").write_text(SOFT)
    assert lies_with(place / stand, target) == is_theirs
    found = profile_path(GateRequest(target))
    assert (found is None) == is_theirs
    named = place / "ckpt" / "moegeom.toml"
    assert profile_path(GateRequest(target, profile=named)) == named


@pytest.mark.parametrize("name", ["moegeom.toml", "pyproject.toml"])
def test_a_profile_of_the_checkpoint_changes_no_verdict(place, monkeypatch, name):
    (place / "ckpt" / "moegeom.toml").unlink()
    monkeypatch.chdir(place / "ckpt")
    expected = gate(GateRequest(".")).verdict
    for text in (SOFT, "x = " + "9" * 5000, "[tool", ".".join("a" * 9999)):
        (place / "ckpt" / name).write_text(text)
        found = gate(GateRequest(".")).verdict
        assert dataclasses.replace(found, profile=()) == expected
        assert ("is not used" in "".join(found.profile)) == (name == "moegeom.toml")


def test_every_report_names_the_profile_and_what_it_changes(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "moegeom.toml").write_text(SOFT + '[severity]\nMGG205 = "note"\n')
    report = gate(GateRequest("ckpt"))
    profile = report.verdict.profile
    assert profile[0] == str(place / "moegeom.toml")
    assert profile[1].startswith("not judged: MGA")
    view = View(4000)
    for name in RENDERERS.names():
        text = render(document(report, view), name, view)
        assert str(place / "moegeom.toml") in text.replace("\\", ""), name
        assert "not judged" in text, name
    assert json.loads(render(document(report, view), "json"))["profile"] == list(profile)


SOFTENED = {
    "base": ("training", "built-in profile training (less severe: MGB202, MGB203"),
    "select": (("MGI",), "not judged: MGA"),
    "family_wise_error": (1e-9, "probability of a false alarm 1e-09, not 0.005"),
    "severity": ({"MGI101": "note"}, "MGI101 is a note, not a error"),
    "ignore": ((Ignore("MGI", "known"),), "MGI is accepted: known"),
    "limits": ({"MGB203": (LayerLimits({"fair_shares": 9.0}),)}, "MGB203 fair_shares 9, not 3"),
}

#: What can make a gate only stricter, or is no part of the judgement.
HARMLESS = {"require", "fail_on", "baseline", "thresholds"}


def test_every_way_to_soften_a_verdict_is_told():
    assert deviations(DEFAULT, CHECKS.all()) == ()
    fields = {field.name for field in dataclasses.fields(DEFAULT)}
    assert SOFTENED.keys() | HARMLESS == fields
    for name, (value, sentence) in SOFTENED.items():
        profile = dataclasses.replace(DEFAULT, **{name: value})
        (said,) = deviations(profile, CHECKS.all())
        assert sentence.replace("a error", "an error") in said
    at = (LayerLimits({"fair_shares": 9.0}, frozenset({0, 1})),)
    (said,) = deviations(dataclasses.replace(DEFAULT, limits={"MGB203": at}), CHECKS.all())
    assert said == "MGB203 fair_shares 9 in layers 0-1, not 3"


def test_a_project_that_is_not_ours_is_not_parsed_and_gives_no_profile(place, monkeypatch):
    monkeypatch.chdir(place / "mine")
    (place / "mine" / "pyproject.toml").write_text(".".join("a" * 40_000) + " = 1")
    assert profile_path(GateRequest("../ckpt")) is None
    assert gate(GateRequest("../ckpt")).verdict.profile == ()


def test_a_baseline_that_cannot_be_written_is_refused_before_anything_is_read(place):
    with pytest.raises(OutputError, match="cannot be written"):
        gate(GateRequest("/nowhere", update_baseline=True, baseline=place / "absent" / "b.json"))


def _layers(values: dict[int, float], error: float | None = None) -> list[dict[str, Any]]:
    return [
        {
            "router": f"text/{layer}",
            "variant": "as_stored",
            "population": "all",
            "num_tokens": 1000,
            "num_blocks": 16,
            "load_cv_ddof0": value,
            "load_cv_ddof0_se": error,
        }
        for layer, value in values.items()
    ]


def _judge(threshold: Threshold, layers: list[dict[str, Any]], before: float | None = None, **more):
    baseline = None
    if before is not None:
        facts = {"num_experts": 2, "hidden_size": 2, "top_k": 1, "stored_dtype": "BF16"}
        columns = {"load_cv_ddof0": (before, 0.0), "num_blocks": (16.0, None)}
        empty = np.zeros((2, 32), np.float32)
        router = BaselineRouter(facts, columns, {}, empty[:, 0], empty, empty[0])
        names = [row["router"] for row in layers]
        baseline = Baseline("", {}, 1000, {}, dict.fromkeys(names, router))
    profile = Profile(select=("MGP",), thresholds=(threshold,), **more)
    verdict = run_checks(
        measured_results(MemoryResults({}, {"layers": layers}), baseline=baseline), profile
    )
    (outcome,) = verdict.outcomes
    return outcome


def _routers(outcome: Outcome) -> list[str]:
    return [router for finding in outcome.findings for router in finding.routers]


AT_MOST = Threshold("load_cv_ddof0", "at_most", 0.5)


AT_LEAST = Threshold("load_cv_ddof0", "at_least", 0.5)
RELATIVE = Threshold("load_cv_ddof0", "at_most", 1.2, is_relative=True)
RISING = {layer: 0.1 * layer for layer in range(11)}


def _percentile(bound: float, percentile: float) -> Threshold:
    return Threshold("load_cv_ddof0", "at_most", bound, percentile=percentile)


#: A threshold, values of layers, their error, the value of the baseline: the state, and who is named.
JUDGED = {
    "each layer beyond": (AT_MOST, {0: 0.4, 1: 0.6, 2: 0.5}, None, None, "failed", ["text/1"]),
    "from below": (AT_LEAST, {0: 0.4, 1: 0.6}, None, None, "failed", ["text/0"]),
    "within chance": (AT_MOST, {0: 0.52}, 0.01, None, "passed", []),
    "beyond chance": (AT_MOST, {0: 0.60}, 0.01, None, "failed", ["text/0"]),
    "the median": (_percentile(0.45, 50.0), RISING, None, None, "failed", ["text/5"]),
    "nine tenths": (_percentile(0.95, 90.0), RISING, None, None, "passed", []),
    "times the baseline": (RELATIVE, {0: 0.47}, None, 0.4, "passed", []),
    "more times": (RELATIVE, {0: 0.49}, None, 0.4, "failed", ["text/0"]),
    "no baseline": (RELATIVE, {0: 0.4}, None, None, "inconclusive", []),
    "no column": (Threshold("load_csv", "at_most", 1.0), {0: 0.4}, None, None, "inconclusive", []),
}


@pytest.mark.parametrize(
    ("threshold", "values", "error", "before", "state", "routers"), JUDGED.values(), ids=JUDGED
)
def test_layers_beyond_a_bound_are_named(threshold, values, error, before, state, routers):
    outcome = _judge(threshold, _layers(values, error), before)
    assert (outcome.state, _routers(outcome)) == (state, routers)


def test_the_bound_or_what_is_lacking_is_named():
    bounds = {
        "at most 0.5": _judge(AT_MOST, _layers({1: 0.6})),
        "1.2 times the baseline's 0.4": _judge(RELATIVE, _layers({0: 0.49}), 0.4),
    }
    assert all(words in outcome.findings[0].title for words, outcome in bounds.items())
    assert "load_csv" in _judge(Threshold("load_csv", "at_most", 1.0), _layers({0: 0.4})).reason


def test_what_a_profile_ignores_stays_with_its_reason():
    ignore = (Ignore("MGP901", "known", frozenset({3})),)
    for layer, state, reason, numbers in (
        (3, "ignored", "known", (0, 1)),
        (4, "failed", "", (1, 0)),
    ):
        outcome = _judge(AT_MOST, _layers({layer: 0.9}), ignore=ignore)
        assert (outcome.state, outcome.reason) == (state, reason)
        assert (len(outcome.findings), len(outcome.accepted)) == numbers
