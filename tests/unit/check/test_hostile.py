"""What must not turn a gate green, red or internal: nonsense, missing parts, no power."""

from __future__ import annotations

import shlex
from dataclasses import replace

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checks import run_checks
from moegeom.checks.baseline import read_baseline
from moegeom.core.errors import UsageError
from moegeom.core.finding import EXIT_INCONCLUSIVE
from moegeom.core.tokens import ONE_DOCUMENT
from moegeom.pipeline import lint
from moegeom.results.reader import MemoryResults
from moegeom.router.load import load_routers
from moegeom.studies.check.study import GateRequest, gate, measured_of, read_settings
from moegeom.testing.synthetic import write_tokens
from tests.unit.check.conftest import BIAS, GAIN, GATE, Case, keep, outcome_of, write_model
from tests.unit.check.defects import row, rows, setting, tensor, together


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path, Case(), keep)


@pytest.fixture
def baseline(tmp_path, model):
    file = tmp_path / "b.json"
    gate(GateRequest(str(model), baseline=file, update_baseline=True))
    return file


@pytest.fixture
def under(tmp_path, judged):
    """The gate under a profile of these words."""

    def judge(words, *arguments, **options):
        (tmp_path / "moegeom.toml").write_text(words)
        return judged(*arguments, **options)

    return judge


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
    outcome = outcomes(Case(tensor(GAIN, lambda gain: 0 * gain), before=keep))["MGI103"]
    assert outcome.state == "failed"
    assert "gain" in outcome.findings[0].detail


def test_rows_that_cannot_be_compared_are_not_passed(outcomes):
    huge = tensor(GATE, lambda w: w.astype(np.float64) * 1e80)
    of_each = outcomes(Case(huge, before=keep))
    states = {of_each[code].state for code in ("MGG401", "MGI121", "MGI122")}
    assert states == {"inconclusive"}


def test_a_permuted_bias_is_seen_beside_renumbered_rows(outcomes):
    spoil = together(
        rows(lambda w: w[[1, 0, *range(2, 16)]]), tensor(BIAS, lambda bias: np.roll(bias, 5))
    )
    outcome = outcomes(Case(spoil, "deepseek_v3", before=keep))["MGI121"]
    assert outcome.state == "failed"
    assert "bias did not move along" in outcome.findings[0].detail


def test_the_factor_of_one_row_is_told_from_its_projections(outcomes):
    factors = {4.0: "scaled by 4.0", 3.0: "scaled by 3.0", 0.0: "set to zero", 1.2: "scaled by 1.2"}
    for factor, words in factors.items():
        of_each = outcomes(Case(row(5, lambda w, by=factor: by * w), before=keep))
        (finding,) = of_each["MGI128"].findings
        assert finding.title == f"the rows: expert 5 {words}."
        assert of_each["MGG401"].findings == ()  # one long row does not make all rows long


def test_a_column_that_older_results_lack_is_inconclusive(model):
    results = lint(str(model))
    experts = [
        {k: v for k, v in row.items() if k != "duplicate_of"} for row in results.rows("experts")
    ]
    older = MemoryResults(results.run, {"layers": results.rows("layers"), "experts": experts})
    request = GateRequest(str(model))
    verdict = run_checks(measured_of(request, older, None), read_settings(request)[0])
    states = {o.code: o for o in verdict.open}
    assert "MGG205" not in states
    broken = [{**row, "num_duplicate_rows": 1} for row in results.rows("layers")]
    older = MemoryResults(results.run, {"layers": broken, "experts": experts})
    verdict = run_checks(measured_of(request, older, None), read_settings(request)[0])
    assert "duplicate_of" in {o.code: o for o in verdict.open}["MGI104"].reason


def test_a_test_that_could_find_nothing_is_inconclusive(outcomes):
    outcome = outcomes(Case(tokens=200, layers=1))["MGB203"]
    assert outcome.state == "inconclusive"
    assert "too few documents" in outcome.reason
    assert outcome.reason.endswith(f"needed: tokens of more ({ONE_DOCUMENT})")


def test_what_one_document_leaves_open_says_what_is_needed_layer_by_layer(outcomes):
    of_each = outcomes(Case(tokens=100, layers=2))
    for code in ("MGB202", "MGB203", "MGG301", "MGN301"):
        assert of_each[code].state == "inconclusive"
        assert of_each[code].reason == (
            "text/0, text/1: one block of documents gives no standard error; needed: "
            f"tokens of 2 documents at least, better of 16 ({ONE_DOCUMENT})"
        )
        assert " not " not in f" {of_each[code].statement} "


def test_accepted_layers_are_not_inconclusive(outcomes, tmp_path):
    (tmp_path / "p.toml").write_text('[[ignore]]\ncode = "MG"\nreason = "a trial"\n')
    case = Case(tokens=100, layers=1, request={"profile": tmp_path / "p.toml"})
    states = {outcome.state for outcome in outcomes(case).values()}
    assert states & {"inconclusive", "failed"} == set()


def test_what_is_required_must_be_selected_and_a_refusal_that_only_warns_is_no_pass(under):
    judged = under('select = ["MGI"]\nrequire = ["MGN117"]\n')
    assert judged.exit_code == EXIT_INCONCLUSIVE
    assert [o.reason for o in judged.verdict.open] == ["required, and not selected"]
    judged = under('[severity]\nMGI105 = "warning"\n', Case(setting(num_experts=99)))
    assert judged.exit_code == EXIT_INCONCLUSIVE


def test_thresholds_name_figures_of_the_layers_and_are_told_apart(under):
    for column in ("load_csv", "router", "weight_digest"):
        with pytest.raises(UsageError, match="column of layers"):
            under(f'[[threshold]]\ncolumn = "{column}"\nat_most = 1\n')
    verdict = under(
        '[[threshold]]\ncolumn = "effective_rank"\nat_most = 1\nseverity = "warning"\n'
        '[[threshold]]\ncolumn = "row_rank"\nat_most = 3\n'
    ).verdict
    assert verdict.exit_code == 1
    assert [f.severity for f in verdict.findings] == ["error", "warning"]
    assert "row_rank" in verdict.findings[0].title


def test_a_checkpoint_is_within_1_times_its_own_baseline(under, baseline):
    words = '[[threshold]]\ncolumn = "effective_rank"\nat_most = { times_baseline = 1.0 }\n'
    assert outcome_of(under(words, baseline=baseline), "MGP901").state == "passed"


def test_exact_thresholds_do_not_cost_power(outcomes, tmp_path):
    lines = '[[threshold]]\ncolumn = "row_rank"\nat_most = 100\n' * 200
    (tmp_path / "p.toml").write_text(lines)
    case = Case(tokens=2048, layers=1)
    with_many = outcomes(replace(case, request={"profile": tmp_path / "p.toml"}))
    assert with_many["MGB203"].state == outcomes(case)["MGB203"].state == "passed"


def test_results_refuse_options_that_say_how_to_measure(judged, tmp_path):
    judged(out=tmp_path / "results")
    for option in ({"layers": "1"}, {"out": tmp_path / "x"}, {"tokens": "rec"}):
        with pytest.raises(UsageError, match="comes too late"):
            gate(GateRequest("results", **option))


def test_commands_can_be_pasted(tmp_path):
    folder = tmp_path / "sp ace;x"
    folder.mkdir()
    case = Case(tokens=2048, layers=1, lean=2.0)
    model = write_model(folder, case, keep)
    print_of = load_routers(open_checkpoint(model)).fingerprint
    tokens = write_tokens(folder / "rec", case.model, 2048, print_of, 0, case.lean)
    verdict = gate(GateRequest(str(model), tokens=str(tokens), num_workers=1)).verdict
    commands = [shlex.split(f.next_command) for f in verdict.findings if "scan" in f.next_command]
    assert commands
    assert all(words[2:5] == [str(model), "--tokens", str(tokens)] for words in commands)


# ------------------------------------------------------------- rows and tokens without direction
def _one_row_left(weight: np.ndarray) -> np.ndarray:
    """All rows but the first are zero: no two raw rows have a cosine."""
    return weight * (np.arange(len(weight)) == 0)[:, None]


def test_rows_of_zeros_have_no_score_as_stored_and_the_finding_says_so(outcomes):
    found = outcomes(Case(rows(_one_row_left)))["MGG204"]
    assert found.state == "failed"
    assert "no score, for rows of zeros have no direction" in found.findings[0].detail


def test_rows_of_any_size_have_a_score_as_stored(outcomes):
    for exponent in (-100, 100):
        sized = rows(lambda w, e=exponent: np.ldexp(w + w[:1] * 4.0, e).astype(np.float32))
        found = outcomes(Case(sized))
        assert all("no score" not in f.detail for f in found["MGG204"].findings)
        assert found["MGI103"].state == "passed"


def test_tokens_that_are_equal_are_named(outcomes):
    """300 equal tokens: shares of them are those of one."""
    found = outcomes(Case(tokens=300, layers=1, lean=1e4))["MGI127"]
    assert found.state == "failed"
    assert found.findings[0].title == "all 300 tokens choose the same 4 of 16 experts."
    assert outcomes(Case(tokens=300, layers=1))["MGI127"].state == "passed"
