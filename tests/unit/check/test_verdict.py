"""Each check fails on its defect, passes on the healthy twin, and says when it cannot judge, and
why. The exit code follows from the outcomes alone: failed before inconclusive before passed.

Of figures with a standard error the worst is told first, and its p-value is Student's.
"""

import dataclasses
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from moegeom.checks import CHECKS, Check, Measured, check, measured_results, run_checks
from moegeom.checks.baseline import baseline_of
from moegeom.checks.check import NOTHING_FOUND, SECTIONS, all_pages, without_saying
from moegeom.checks.profile import DEFAULT
from moegeom.checks.run import JudgedCheck, verdict_of
from moegeom.core.finding import STATES, Finding, Outcome, Verdict
from moegeom.pipeline import ScanRequest, results_of
from moegeom.results.reader import MemoryResults
from moegeom.studies.check.study import drifts_since
from moegeom.testing.synthetic import write_tokens
from tests.unit.check.conftest import BIAS, Case, keep, write_model
from tests.unit.check.defects import COMPARED, DEFECTS, MEASURED, WEIGHTS, tensor

SEVERITIES = ("error", "warning", "note")


def _outcome(state, severity) -> Outcome:
    findings = (Finding(severity, "MGI999", (), "said."),) if state == "failed" else ()
    return Outcome("MGI999", "a title", severity, state, findings=findings)


EVERY = [_outcome(state, severity) for state, severity in product(STATES, SEVERITIES)]


@pytest.mark.parametrize("fail_on", ["error", "warning"])
def test_the_exit_code_of_no_outcome_and_of_every_pair(fail_on):
    failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    for pair in ((), *combinations(EVERY, 2)):
        fails = any(o.state == "failed" and o.severity in failing for o in pair)
        open_ = any(o.state == "inconclusive" for o in pair)
        judged = any(o.state in ("passed", "failed", "ignored") for o in pair)
        expected = 1 if fails else 4 if open_ or not judged else 0
        assert Verdict(pair, fail_on).exit_code == expected


def test_findings_of_failed_checks_come_worst_first():
    verdict = Verdict(tuple(_outcome("failed", severity) for severity in reversed(SEVERITIES)))
    assert [finding.severity for finding in verdict.findings] == list(SEVERITIES)


def test_a_failure_that_does_not_count_hides_no_open_layer():
    outcome = Outcome("MGB203", "a title", "warning", "failed", "open", num_open=1)
    assert Verdict((outcome,), "error").exit_code == 4
    assert Verdict((outcome,), "warning").exit_code == 1


def claims(name: str, column: str, values: list[float], error: float = 0.01) -> list[check.Tested]:
    shared = {"variant": "as_stored", "population": "all", "num_blocks": 16, f"{column}_se": error}
    facts = {"effective_experts": 1.0, "router": ""}
    rows = [shared | facts | {column: v, "router": f"text/{i}"} for i, v in enumerate(values)]
    experts = [{**shared, "router": row["router"], "expert": 0} for row in rows]
    results = MemoryResults({}, {"layers": rows, "experts": experts})
    return list(CHECKS[name].judge(measured_results(results), lambda name, router: 0.5))


@pytest.mark.parametrize(
    ("name", "column", "order"),
    [
        ("angular_collapse", "mean_resultant_length", [2, 0, 1]),
        ("uneven_load", "load_entropy_normalised", [1, 0, 2]),
    ],
)
def test_the_worst_figure_comes_first_also_where_it_is_0(name, column, order):
    found = claims(name, column, [0.4, 0.0, 0.9])
    assert [claim.router for claim in found] == [f"text/{i}" for i in order]


@pytest.mark.parametrize(
    ("name", "column", "beyond"),
    [
        ("angular_collapse", "mean_resultant_length", 1.0),
        ("uneven_load", "load_entropy_normalised", -1.0),
    ],
)
def test_the_p_value_is_that_of_a_one_sided_t_test_towards_the_finding(name, column, beyond):
    for value in (0.48, 0.5, 0.53):
        (claim,) = claims(name, column, [value], 0.02)
        expected = stats.t(df=15).sf(beyond * (value - 0.5) / 0.02)
        assert claim.p_value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("value", "error", "state"),
    [(0.4, 0.001, "passed"), (0.4, 0.3, "inconclusive"), (0.0, 0.05, "passed")],
)
def test_a_test_without_power_is_open_unless_the_figure_is_within_its_limit(value, error, state):
    """A limit of 0.5 leaves 0.5 of room; with the last error 0.31 beyond it would be found."""
    found = claims("angular_collapse", "mean_resultant_length", [value], error)
    (outcome,) = verdict_of([JudgedCheck(CHECKS["angular_collapse"], found)], DEFAULT).outcomes
    assert (outcome.state, NOTHING_FOUND in outcome.reason) == (state, state == "inconclusive")


def test_what_is_within_its_limit_needs_no_room_beyond_it():
    """As the load of 4 chosen of 16 experts on 20 documents: far below 3 of at most 4 shares."""
    (claim,) = claims("angular_collapse", "mean_resultant_length", [0.1], 0.02)
    narrow = dataclasses.replace(claim, room=0.01)
    (passed,) = verdict_of([JudgedCheck(CHECKS["angular_collapse"], [narrow])], DEFAULT).outcomes
    near = dataclasses.replace(narrow, p_beyond=0.3)
    (left,) = verdict_of([JudgedCheck(CHECKS["angular_collapse"], [near])], DEFAULT).outcomes
    assert (passed.state, left.state) == ("passed", "inconclusive")


#: Judged on thresholds of a profile, under one profile alone, and on files beside the weights: see
#: test_thresholds.py, test_built_in_profiles.py and oracle/test_loaders.py.
ELSEWHERE = ("MGP901", "MGI115", "MGI117")


def test_every_check_is_in_the_table_of_defects_once():
    codes = sorted(check.code for check in CHECKS.all())
    assert codes == sorted([*DEFECTS, *ELSEWHERE])


@pytest.mark.parametrize("code", sorted(DEFECTS))
def test_a_check_fails_on_its_defect(outcomes, code):
    outcome = outcomes(DEFECTS[code])[code]
    assert outcome.state == "failed", outcome.reason
    for finding in outcome.findings:
        assert finding.code == code
        assert finding.title.endswith(".")
        assert finding.title[0].islower() or finding.title[0].isdigit() or "/" in finding.title
        assert finding.next_command.startswith("moegeom ") or not finding.next_command
        if code in WEIGHTS:  # it leads to the page of its check
            assert finding.next_command == f"moegeom check --explain {code}"


#: Every healthy twin: the checkpoint of a defect before it is spoilt, with the codes it judges.
DUPLICATES: dict[Case, list[str]] = {}
for _code, _defect in DEFECTS.items():
    _asked = {name: True for name in ("experts", "attention") if _defect.request.get(name)}
    _duplicate = replace(_defect, spoil=keep, lean=0.05, fingerprint=None, request=_asked)
    DUPLICATES.setdefault(_duplicate, []).append(_code)


@pytest.mark.parametrize(
    "duplicate", DUPLICATES, ids=lambda duplicate: "-".join(DUPLICATES[duplicate])
)
def test_checks_pass_on_the_healthy_duplicate(outcomes, duplicate):
    of_each = outcomes(duplicate)
    states = {code: of_each[code].state for code in DUPLICATES[duplicate]}
    assert states == dict.fromkeys(DUPLICATES[duplicate], "passed")


def test_nothing_else_is_judged_when_routers_cannot_be_read(outcomes):
    for refusal in ("MGI105", "MGI106", "MGI107"):
        of_each = outcomes(WEIGHTS[refusal])
        others = {(of_each[c].state, of_each[c].reason) for c in WEIGHTS.keys() - {refusal}}
        assert others == {("does not apply", "the routers cannot be read")}


def test_what_is_lacking_is_named(outcomes):
    of_each = outcomes(Case())
    assert {of_each[code].state for code in COMPARED} == {"needs a baseline"}
    assert {of_each[code].state for code in MEASURED} == {"needs tokens"}
    without = [code for code in sorted(WEIGHTS) if code.startswith("MGN11")]
    without = [code for code in without if code not in ("MGN117", "MGN118", "MGN119")]
    assert {of_each[code].reason for code in without} == {"no router has a selection bias"}


def test_a_baseline_without_tokens_cannot_judge_load(outcomes, judged, tmp_path):
    file = tmp_path / "weights.json"
    judged(Case(layers=1), baseline=file, update_baseline=True)
    outcome = outcomes(Case(tokens=300, layers=1, request={"baseline": file}))["MGB401"]
    assert (outcome.state, outcome.reason) == (
        "needs tokens in the baseline",
        "the baseline was made without tokens",
    )


def test_experts_and_layers_of_a_spoilt_bias_are_named(outcomes):
    cannot_lose = tensor(
        BIAS, lambda bias: np.where(np.arange(16) == 6, 3.0, bias).astype(np.float32)
    )
    (finding,) = outcomes(Case(cannot_lose, "deepseek_v3"))["MGI110"].findings
    assert "1 of 16 experts are chosen for every input: expert 6" in finding.title
    never_updated = tensor(BIAS, lambda bias: 0.0 * bias, layer=2)
    (finding,) = outcomes(Case(never_updated, "deepseek_v3"))["MGN116"].findings
    assert finding.routers == ("text/2",)


def test_every_page_reads_as_sentences():
    for page in all_pages():
        code = page.check.code
        assert page.statement.endswith("."), code
        assert tuple(page.sections) == SECTIONS, code
        assert all(text.endswith(".") and len(text) > 20 for text in page.sections.values()), code
        for limit in page.check.limits:
            if limit.basis == "heuristic" and page.check.severity == "error":
                assert code.startswith(("MGI", "MGN111"))


#: Checks with a figure that a router can lack for no reason but that it cannot be computed.
OF_FIGURES = [check for check in CHECKS.all() if check.needs and check.concerns != without_saying]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> list[Measured]:
    """Checkpoints with and without a selection bias on tokens, each beside its own baseline."""
    found = []
    for family in ("deepseek_v3", "qwen3_moe"):
        folder, case = tmp_path_factory.mktemp(family), Case(family=family, layers=8)
        model = str(write_model(folder, case, keep))
        tokens = str(write_tokens(folder / "rec", case.model, 2048, "sha256:0", 0, 0.05))
        results = results_of(ScanRequest(model, tokens=tokens, stale_inputs=True, num_workers=1))
        before = baseline_of(results)
        drifts = drifts_since(results, before)
        found.append(measured_results(results, model, tokens, before, "", drifts))
    return found


def _judged(check: Check, healthy: list[Measured]) -> Measured:
    """The one that the check judges in full."""
    ends = [(_outcome_of_one(one, check.code), one) for one in healthy]
    return next(one for end, one in ends if (end.state, end.num_open) == ("passed", 0))


def _without(measured: Measured, column: str, routers: set[str]) -> Measured:
    def blank(row: Any) -> Any:
        return type(row)({**row, column: None}) if row["router"] in routers else row

    return dataclasses.replace(measured, layers=[blank(row) for row in measured.layers])


def _outcome_of_one(measured: Measured, code: str):
    profile = dataclasses.replace(DEFAULT, select=(code,))
    return run_checks(measured, profile).outcomes[0]


@pytest.mark.parametrize("check", OF_FIGURES, ids=lambda check: check.code)
def test_a_check_whose_figure_is_missing_is_not_judged(check, healthy):
    measured = _judged(check, healthy)
    for column in check.needs:
        some = _without(measured, column, {"text/1"})
        outcome = _outcome_of_one(some, check.code)
        assert outcome.num_open == 1, column
        assert outcome.reason == f"text/1: {column} cannot be computed"
        every = _without(measured, column, {row["router"] for row in measured.layers})
        assert _outcome_of_one(every, check.code).state == "inconclusive"
        if "tokens" in check.inputs:  # rule or recording say why there is none
            metric = measured.run["column_versions"][column].split("/")[0]
            reasons = {"text/1": {"reasons": {metric: "counts only"}}}
            explained = dataclasses.replace(some, run={**measured.run, "parts": reasons})
            assert _outcome_of_one(explained, check.code).num_open == 0


def test_what_is_not_a_number_is_a_missing_figure():
    nothing = {"router": "text/0", "variant": "as_stored", "population": "all", "row_rank": np.nan}
    measured = measured_results(MemoryResults({}, {"layers": [nothing]}))
    assert measured.layers[0]["row_rank"] is None
