"""What must not turn a gate green, red or internal: nonsense, missing parts, no power; a number
that is out of its range is a finding, wherever it stands.
"""

import dataclasses
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checks import measured_results, run_checks
from moegeom.checks.baseline import read_baseline
from moegeom.core.errors import OUT_OF_RANGE, InternalError, RouterError, UsageError
from moegeom.core.finding import EXIT_INCONCLUSIVE
from moegeom.core.tokens import ONE_DOCUMENT
from moegeom.pipeline import ScanRequest, lint, scan
from moegeom.results.reader import MemoryResults, open_results
from moegeom.router import family as records
from moegeom.router.facts import settings_of
from moegeom.router.family import Setting, families, load_family
from moegeom.router.load import load_routers
from moegeom.router.settings import Settings
from moegeom.studies.check.study import GateRequest, gate, measured_of, read_settings
from moegeom.testing.synthetic import write_tokens
from tests.unit.check.conftest import (
    BIAS,
    GAIN,
    GATE,
    Case,
    keep,
    outcome_of,
    with_token_table,
    write_model,
)
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


STACKS = [(name, stack) for name in families() for stack in load_family(name).stacks]

#: Flags and lists of layers.
NO_NUMBERS = {
    *("renormalise", "has_logit_bias", "has_selection_bias"),
    *("dense", "listed", "kinds"),
}


def test_every_field_for_a_number_of_a_family_has_a_range():
    found = {
        item.name
        for record in vars(records).values()
        if dataclasses.is_dataclass(record) and isinstance(record, type)
        for item in dataclasses.fields(record)
        if Setting in get_args(item.type) and "range" not in item.metadata
    }
    assert found == NO_NUMBERS
    with pytest.raises(InternalError, match="has no range"):
        Settings({"key": 1}).number(Setting(("key",)))


def _table(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def test_no_number_of_any_family_is_taken_out_of_its_range():
    """A string, a flag, what is no number, and what is beyond both ends."""
    different = {}
    for _, stack in STACKS:
        for one in settings_of(stack):
            different[one.range, one.keys, one.over, one.zero, bool(one.values)] = one
    for one in different.values():
        limits: Any = one.range
        read = Settings.integer if limits.is_whole else Settings.number
        least, most = limits.least, limits.most
        beyond = [] if one.over or one.values else [most * 10, -most, least - 1e-9 - most / 1e3]
        numbers = [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)]
        for value in ["1", True, "nan", {}, [1], *beyond, *numbers]:
            if one.values and str(value).lower() in one.values:
                continue
            with pytest.raises(RouterError) as caught:
                read(Settings(_table(one.keys[0], value)), one)
            assert caught.value.code == OUT_OF_RANGE or one.values
            assert one.values or limits.text in caught.value.message


def test_what_a_family_takes_by_itself_is_usual():
    for name, stack in STACKS:
        for one in settings_of(stack, of_config=False):
            assert one.range is not None
            for value in (one.value, one.default):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    number = one.over / value if one.over else value
                    assert one.range.holds(number) and one.range.is_usual(number), (name, one)


#: What is spoilt: a config, or a tensor; how much a finding weighs by default; its words.
SPOILT = {
    "eps beyond": (setting(rms_norm_eps=1e10), "error", "'rms_norm_eps' is 10000000000.0 "),
    "eps below": (setting(rms_norm_eps=-1), "error", "expected a number from 0 to 1"),
    "eps unusual": (setting(rms_norm_eps=0.5), "warning", "is 0.5, usual is 1e-12 to 0.001"),
    "no factor": (setting(routed_scaling_factor=0.0), "error", "'routed_scaling_factor' is 0.0 "),
    "clamp": (setting(swiglu_limit=1e5), "warning", "'swiglu_limit' is 100000, usual is 0.1 to 1000"),
    "gains": (tensor(GAIN, lambda g: g * 1e30), "error", "(gain of the norm in front): its large"),
    "gains unusual": (tensor(GAIN, lambda g: g * 1e5), "warning", "usual is 0.0001 to 10000"),
    "bias": (tensor(BIAS, lambda b: b + 1e9), "error", "(selection bias): its largest entry is 1e"),
    "rows": (tensor(GATE, lambda w: w.astype(float) * 1e300), "error", "(router rows): its largest"),
    "rows in half": (
        together(setting(dtype="float16"), tensor(GATE, lambda w: w * 1e7)),
        "error", "the largest of float16 is 65504",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_number_out_of_its_range_is_a_finding_with_and_without_a_baseline(name, judged, tmp_path):
    spoil, severity, words = SPOILT[name]
    case = Case(family="deepseek_v3", made=with_token_table if name == "clamp" else keep)
    judged(case, baseline=tmp_path / "b.json", update_baseline=True)
    for profile in ("default", "release"):
        for baseline in (None, tmp_path / "b.json"):
            verdict = judged(case, spoil, profile=Path(profile), baseline=baseline).verdict
            (finding,) = [f for f in verdict.findings if f.code == OUT_OF_RANGE]
            assert words in finding.title
            assert finding.severity == (severity if profile == "default" else "error")
            if finding.severity == "error":
                assert verdict.exit_code == 1


def test_scan_and_results_say_what_check_says_of_rows_beyond_float32(judged, tmp_path):
    spoil = SPOILT["rows"][0]
    (finding,) = outcome_of(judged(spoil=spoil), OUT_OF_RANGE).findings
    assert finding.detail == "Beyond float32: engines load it as infinity."
    out = scan(ScanRequest(str(write_model(tmp_path, Case(), spoil)), out=tmp_path / "out"))
    results = open_results(out)
    told = [row for row in results.rows("findings") if row["code"] == OUT_OF_RANGE]
    assert [row["title"] for row in told] == [finding.title]
    outcome = outcome_of_results(results)
    assert [f.title for f in outcome.findings] == [finding.title]


def test_tokens_cannot_be_measured_by_rows_beyond_float32_and_that_is_the_finding(outcomes):
    outcome = outcomes(Case(SPOILT["rows"][0], tokens=300, layers=2))[OUT_OF_RANGE]
    assert "the row of expert 0 is beyond float32" in outcome.findings[0].title


def outcome_of_results(results):
    verdict = run_checks(measured_results(results))
    return next(one for one in verdict.outcomes if one.code == OUT_OF_RANGE)


def test_numbers_that_are_not_finite_hide_none_that_are_out_of_range(judged):
    spoil = tensor(GAIN, lambda g: np.where(np.arange(len(g)) == 3, np.nan, g * 1e30))
    assert outcome_of(judged(spoil=spoil), OUT_OF_RANGE).state == "failed"
