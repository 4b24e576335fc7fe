"""Each check fails on its defect, passes on the healthy twin, and says when it cannot judge, and
why. The exit code follows from the outcomes alone: failed before inconclusive before passed.
Nonsense, missing parts and too little power never turn a gate green, red or internal; a number out of
its range is a finding wherever it stands. So are token tables and gates of attention that are wrong in
any one way, and what was not checked is counted.

Of figures with a standard error the worst is told first, and its p-value is Student's.
"""

import dataclasses
import shlex
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from benchmarks.synthetic import write_tokens
from moegeom.checkpoint.open import open_checkpoint
from moegeom.checks import CHECKS, Check, Measured, check, measured_results, run_checks
from moegeom.checks.baseline import baseline_of, read_baseline
from moegeom.checks.catalogue.biases import either
from moegeom.checks.catalogue.tokens import large_logits
from moegeom.checks.check import NOTHING_FOUND, SECTIONS, all_pages, without_saying
from moegeom.checks.measured import unseen_routers
from moegeom.checks.profile import DEFAULT
from moegeom.checks.run import JudgedCheck, verdict_of
from moegeom.core.errors import OUT_OF_RANGE, InternalError, RouterError, UsageError
from moegeom.core.finding import EXIT_INCONCLUSIVE, STATES, Finding, Outcome, Verdict
from moegeom.core.router import TokenTable
from moegeom.core.tokens import ONE_DOCUMENT
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.verdict_text import verdict_sentence
from moegeom.pipeline import ScanRequest, lint, results_of, scan
from moegeom.results.reader import MemoryResults, open_results
from moegeom.router import family as records
from moegeom.router.facts import looked_up, settings_of
from moegeom.router.family import Setting, families, load_family
from moegeom.router.load import load_routers
from moegeom.router.settings import Settings
from moegeom.studies.check.document import document
from moegeom.studies.check.study import GateRequest, drifts_since, gate, measured_of, read_settings
from tests.unit.check.conftest import (
    BIAS,
    GAIN,
    GATE,
    TABLE,
    Case,
    keep,
    outcome_of,
    with_token_table,
    write_model,
)
from tests.unit.check.defects import (
    COMPARED,
    DEFECTS,
    MEASURED,
    OF_ATTENTION,
    WEIGHTS,
    _set,
    gates,
    row,
    rows,
    setting,
    tensor,
    together,
    with_attention,
)

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


#: Judged on thresholds of a profile, under one profile alone, on files beside the weights, and on
#: traces: see test_thresholds.py, test_built_in_profiles.py, oracle/test_loaders.py and
#: e2e/test_check.py.
ELSEWHERE = ("MGP901", "MGI115", "MGI117", "MGI129", "MGB205")


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
        assert others == {("needs routers", "the routers cannot be read")}


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
                assert code.startswith(("MGI", "MGN111", "MGN122"))


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


# ----------------------------------------------------------------------- numbers out of their range
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


def test_logits_that_bfloat16_ties_at_the_border_are_a_finding_and_others_none():
    random = np.random.default_rng(3)
    for level, spread, experts in product(
        (0.0, -3.0, 40.0, -300.0, 2e4), (0.1, 1.0, 8.0), (16, 256)
    ):
        logits = level + spread * random.standard_normal((2000, experts))
        ordered = np.sort(logits)[:, ::-1]
        sums = logsumexp(logits, axis=1)
        row = {
            "router": "text/0",
            "num_tokens": 2000,
            "margin_p50": np.median(ordered[:, 3] - ordered[:, 4]),
            "log_sum_exp_mean": sums.mean(),
            "z_loss": (sums**2).mean(),
        }
        facts = {"name": "text/0", "num_experts": experts, "is_affine": True}
        outcome = _outcome_of_one(
            Measured([row], {}, {}, {}, run={"routers": [facts]}), large_logits.code
        )
        # the last expert chosen and the first left out are one number in bfloat16
        rounded = ordered.astype(ml_dtypes.bfloat16).astype(np.float64)
        tied = (rounded[:, 3] == rounded[:, 4]).mean()
        if outcome.findings:
            assert tied > 0.5
            at = abs(sums.mean() - np.log(experts)) - sums.std()
            at = np.array(at, np.float32).view(np.uint32) & 0xFFFF0000  # bfloat16, cut
            at = at.view(np.float32).astype(ml_dtypes.bfloat16)
            assert f"steps by {abs(float(np.spacing(at))):.2g}." in outcome.findings[0].title
        else:
            assert tied < 0.9


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


# --------------------------------------------------------------------------------- tables of tokens
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
    "too short": (lambda t: t[:1999], "it has 1,999 rows, and the config 2,000 token ids"),
}


@pytest.mark.parametrize(("change", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_table_fails_the_gate(judged, change, words):
    report = judged(HASHED, together(tensor(TABLE, change), setting(vocab_size=2000)))
    outcome = outcome_of(report, "MGI111")
    assert (report.exit_code, outcome.state) == (1, "failed")
    assert words in f"{outcome.findings[0].title} {outcome.findings[0].detail}".lower()


@pytest.mark.parametrize(
    ("factor", "words"),
    [(0.0, "1 row of zeros"), (np.nan, "1 row with values that are not finite")],
)
def test_rows_that_weigh_the_experts_of_a_table_are_judged_with_it(judged, factor, words):
    weight = tensor("layers.{}.ffn.gate.weight", lambda w: _set(w, 5, factor))
    (finding,) = outcome_of(judged(HASHED, weight), "MGI111").findings
    assert f"the router weight beside it has {words}" in finding.title


def test_a_baseline_tells_a_table_that_sends_ids_elsewhere_and_not_one_in_another_order(
    judged, tmp_path
):
    base = tmp_path / "tables.json"
    judged(HASHED, baseline=base, update_baseline=True)
    for change, state in (
        (lambda t: t, "passed"),
        (lambda t: t[:, ::-1].copy(), "passed"),
        (lambda t: np.concatenate([t[1:], t[:1]]), "failed"),
    ):
        outcome = outcome_of(judged(HASHED, tensor(TABLE, change), baseline=base), "MGI130")
        assert outcome.state == state


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
            for leaf in ("down", "gate", "up"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj.weight"
                tensors[name] = random.standard_normal((8, 64)).astype(np.float32)


def exchanged(tensors, config):
    for leaf in ("down", "gate", "up"):
        a, b = (f"model.layers.1.mlp.experts.{e}.{leaf}_proj.weight" for e in (3, 9))
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
