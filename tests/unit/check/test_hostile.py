"""What must not turn a gate green, red or internal: nonsense, missing parts, no power."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checks.baseline import read_baseline
from moegeom.checks.profile_file import find_profile, parse_profile, read_profile
from moegeom.core.errors import ResultsError, UsageError
from moegeom.core.finding import EXIT_INCONCLUSIVE
from moegeom.core.tokens import ONE_DOCUMENT
from moegeom.pipeline import ScanRequest, lint, scan
from moegeom.results.memory import MemoryResults
from moegeom.router.load import load_routers
from moegeom.studies.check.study import GateRequest, gate, judge_results, read_settings
from moegeom.testing.synthetic import write_tokens
from tests.unit.check.conftest import BIAS, GAIN, GATE, Case, keep, write_model
from tests.unit.check.defects import rows, tensor


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path, Case(), keep)


@pytest.fixture
def baseline(tmp_path, model):
    file = tmp_path / "b.json"
    gate(GateRequest(str(model), baseline=file, update_baseline=True))
    return file


NONSENSE = {
    "text for a number": ["columns", "row_condition", ["NaN", None]],
    "a number beyond floats": ["columns", "row_condition", [10**400, None]],
    "a truth value": ["columns", "row_condition", [True, None]],
    "a negative error": ["columns", "row_condition", [1.0, -1.0]],
    "an endless shape": ["facts", "num_experts", float("inf")],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_in_a_baseline_is_an_error(baseline, name):
    table, key, value = NONSENSE[name]
    document = json.loads(baseline.read_text("utf-8"))
    document["routers"]["text/0"][table][key] = value
    baseline.write_text(json.dumps(document), "utf-8")
    with pytest.raises(ResultsError):
        read_baseline(baseline)


def test_a_baseline_that_is_not_there_says_how_to_write_it(tmp_path):
    with pytest.raises(ResultsError, match="--update-baseline --baseline"):
        read_baseline(tmp_path / "none.json")


def test_a_link_to_a_baseline_stays_a_link(tmp_path, model, baseline):
    link = tmp_path / "link.json"
    link.symlink_to(baseline)
    baseline.write_text("old", "utf-8")
    gate(GateRequest(str(model), baseline=link, update_baseline=True))
    assert link.is_symlink()
    assert read_baseline(baseline).routers
    with pytest.raises(UsageError, match="Is a directory"):
        gate(GateRequest(str(model), baseline=tmp_path, update_baseline=True))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_gain_of_zeros_is_an_error(outcomes):
    found = outcomes(Case(tensor(GAIN, lambda gain: 0 * gain), before=keep))
    assert found["MGI103"].state == "failed"
    assert "gain" in found["MGI103"].findings[0].detail


def test_rows_that_cannot_be_compared_are_not_passed(outcomes):
    huge = np.array(1e80)
    found = outcomes(Case(tensor(GATE, lambda w: w.astype(np.float64) * huge), before=keep))
    states = {code: found[code].state for code in ("MGG401", "MGI121", "MGI122")}
    assert set(states.values()) == {"inconclusive"}


def test_a_permuted_bias_is_seen_beside_renumbered_rows(outcomes):
    def spoil(tensors, config):
        rows(lambda w: w[[1, 0, *range(2, 16)]])(tensors, config)
        tensor(BIAS, lambda bias: np.roll(bias, 5))(tensors, config)

    found = outcomes(Case(spoil, "deepseek_v3", before=keep))
    assert found["MGI121"].state == "failed"
    assert "bias did not move along" in found["MGI121"].findings[0].detail


def test_one_long_row_does_not_make_all_rows_long(outcomes):
    def lengthen(values):
        values[5] *= 4.0
        return values

    found = outcomes(Case(rows(lengthen), before=keep))
    (finding,) = found["MGI128"].findings
    assert finding.title == "the rows: expert 5 scaled by 4.0."
    assert found["MGG401"].findings == ()


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (3.0, "scaled by 3.0"),
        (0.0, "set to zero"),
        (1.2, "scaled by 1.2"),
    ],
)
def test_the_factor_of_a_scaled_row_is_told_from_its_projections(outcomes, factor, said):
    def change(values):
        values[5] *= factor
        return values

    (finding,) = outcomes(Case(rows(change), before=keep))["MGI128"].findings
    assert finding.title == f"the rows: expert 5 {said}."


def test_a_column_that_older_results_lack_is_inconclusive(model):
    results = lint(str(model))
    experts = [
        {k: v for k, v in row.items() if k != "duplicate_of"} for row in results.rows("experts")
    ]
    older = MemoryResults(results.run, {"layers": results.rows("layers"), "experts": experts})
    request = GateRequest(str(model))
    verdict = judge_results(request, older, read_settings(request)[0], None)
    states = {o.code: o for o in verdict.open}
    assert "MGG205" not in states
    broken = [{**row, "num_duplicate_rows": 1} for row in results.rows("layers")]
    older = MemoryResults(results.run, {"layers": broken, "experts": experts})
    verdict = judge_results(request, older, read_settings(request)[0], None)
    assert "duplicate_of" in {o.code: o for o in verdict.open}["MGI104"].reason


def test_a_test_that_could_find_nothing_is_inconclusive(outcomes):
    found = outcomes(Case(tokens=200, layers=1))
    assert found["MGB203"].state == "inconclusive"
    assert "too few documents" in found["MGB203"].reason
    assert found["MGB203"].reason.endswith(f"needed: tokens of more ({ONE_DOCUMENT})")


def test_what_one_document_leaves_open_says_what_is_needed_layer_by_layer(outcomes):
    found = outcomes(Case(tokens=100, layers=3))
    for code in ("MGB202", "MGB203", "MGG301", "MGN301"):
        assert found[code].state == "inconclusive"
        assert found[code].reason == (
            "text/0, text/1, text/2: one block of documents gives no standard error; needed: "
            f"tokens of 2 documents at least, better of 16 ({ONE_DOCUMENT})"
        )
        assert " not " not in f" {found[code].statement} "


def test_accepted_layers_are_not_inconclusive(outcomes, tmp_path):
    (tmp_path / "p.toml").write_text('[[ignore]]\ncode = "MG"\nreason = "a trial"\n')
    found = outcomes(Case(tokens=100, layers=1, request={"profile": tmp_path / "p.toml"}))
    assert {outcome.state for outcome in found.values()} & {"inconclusive", "failed"} == set()


def test_what_is_required_must_be_selected(tmp_path, model):
    (tmp_path / "moegeom.toml").write_text('select = ["MGI"]\nrequire = ["MGN117"]\n')
    found = gate(GateRequest(str(model)))
    assert found.verdict.exit_code == EXIT_INCONCLUSIVE
    assert [o.reason for o in found.verdict.open] == ["required, and not selected"]


def test_a_refusal_that_is_only_a_warning_is_no_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path, Case(), lambda t, config: config.update(num_experts=99))
    (tmp_path / "moegeom.toml").write_text('[severity]\nMGI105 = "warning"\n')
    assert gate(GateRequest(str(model))).verdict.exit_code == EXIT_INCONCLUSIVE


def test_thresholds_name_figures_of_the_layers(tmp_path, model):
    for column in ("load_csv", "router", "weight_digest"):
        (tmp_path / "moegeom.toml").write_text(f'[[threshold]]\ncolumn = "{column}"\nat_most = 1\n')
        with pytest.raises(UsageError, match="column of layers"):
            gate(GateRequest(str(model)))


def test_a_checkpoint_is_within_1_times_its_own_baseline(tmp_path, model, baseline):
    text = '[[threshold]]\ncolumn = "effective_rank"\nat_most = { times_baseline = 1.0 }\n'
    (tmp_path / "moegeom.toml").write_text(text)
    found = gate(GateRequest(str(model), baseline=baseline))
    assert [o.state for o in found.verdict.outcomes if o.code == "MGP901"] == ["passed"]


def test_two_thresholds_are_told_apart(tmp_path, model):
    (tmp_path / "moegeom.toml").write_text(
        '[[threshold]]\ncolumn = "effective_rank"\nat_most = 1\nseverity = "warning"\n'
        '[[threshold]]\ncolumn = "row_rank"\nat_most = 3\n'
    )
    verdict = gate(GateRequest(str(model))).verdict
    assert verdict.exit_code == 1
    assert [f.severity for f in verdict.findings] == ["error", "warning"]
    assert "row_rank" in verdict.findings[0].title


def test_exact_thresholds_do_not_cost_power(outcomes, tmp_path):
    lines = '[[threshold]]\ncolumn = "row_rank"\nat_most = 100\n' * 200
    (tmp_path / "p.toml").write_text(lines)
    case = Case(tokens=2048, layers=1)
    with_many = outcomes(replace(case, request={"profile": tmp_path / "p.toml"}))
    assert with_many["MGB203"].state == outcomes(case)["MGB203"].state == "passed"


def test_results_refuse_options_that_say_how_to_measure(tmp_path, model):
    out = scan(ScanRequest(str(model), tmp_path / "results"))
    for option in ({"layers": "1"}, {"out": tmp_path / "x"}, {"tokens": "rec"}):
        with pytest.raises(UsageError, match="comes too late"):
            gate(GateRequest(str(out), **option))


@pytest.mark.parametrize("text", ["tool = 5", 'tool = "moegeom"', "[tool.other]"])
def test_a_project_without_a_profile_is_no_profile(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    assert find_profile(tmp_path) is None
    with pytest.raises(UsageError, match="has no table"):
        read_profile(tmp_path / "pyproject.toml")


@pytest.mark.parametrize("limit", [0, -1, 10**400])
def test_a_limit_is_a_size(limit):
    with pytest.raises(UsageError):
        parse_profile({"limits": {"MGG206": {"factor": limit}}}, "moegeom.toml")


def test_commands_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sp ace;x"
    folder.mkdir()
    case = Case(tokens=2048, layers=2, lean=2.0)
    model = write_model(folder, case, keep)
    print_of = load_routers(open_checkpoint(model)).fingerprint
    tokens = write_tokens(folder / "rec", case.model, 2048, print_of, 0, case.lean)
    found = gate(GateRequest(str(model), tokens=str(tokens), num_workers=1)).verdict.findings
    commands = [shlex.split(f.next_command) for f in found if "scan" in f.next_command]
    assert commands
    assert all(words[2:5] == [str(model), "--tokens", str(tokens)] for words in commands)
