"""Each check fails on its defect, passes on the healthy twin, and says when it cannot judge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegeom.checks import CHECKS
from moegeom.checks.pages import SECTIONS, all_pages
from moegeom.studies.check.study import GateRequest, gate
from tests.unit.check.conftest import BIAS, Case, keep, write_model
from tests.unit.check.defects import COMPARED, DEFECTS, MEASURED, WEIGHTS, tensor

#: Judged on thresholds of a profile, and under one profile alone: see test_thresholds.py and
#: test_built_in_profiles.py.
OF_THE_PROFILE = ("MGP901", "MGI115")


def test_every_check_is_in_the_table_of_defects() -> None:
    assert sorted(check.code for check in CHECKS.all()) == sorted([*DEFECTS, *OF_THE_PROFILE])


def test_codes_are_unique() -> None:
    codes = [check.code for check in CHECKS.all()]
    assert len(codes) == len(set(codes))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("code", sorted(DEFECTS))
def test_a_check_fails_on_its_defect(outcomes, code) -> None:
    outcome = outcomes(DEFECTS[code])[code]
    assert outcome.state == "failed", outcome.reason
    for finding in outcome.findings:
        assert finding.code == code
        assert finding.title.endswith(".")
        assert finding.title[0].islower() or finding.title[0].isdigit() or "/" in finding.title
        assert finding.next_command.startswith("moegeom ") or not finding.next_command


@pytest.mark.parametrize("code", sorted(WEIGHTS))
def test_a_finding_in_the_weights_leads_to_the_page_of_its_check(outcomes, code) -> None:
    found = {finding.next_command for finding in outcomes(WEIGHTS[code])[code].findings}
    assert found == {f"moegeom check --explain {code}"}


#: Every healthy twin: the checkpoint of a defect before it is spoilt, with the codes it judges.
DUPLICATES: dict[Case, list[str]] = {}
for _code, _defect in DEFECTS.items():
    _asked = {name: True for name in ("experts", "attention") if _defect.request.get(name)}
    _duplicate = replace(_defect, spoil=keep, lean=0.05, fingerprint=None, request=_asked)
    DUPLICATES.setdefault(_duplicate, []).append(_code)


@pytest.mark.parametrize(
    "duplicate", DUPLICATES, ids=lambda duplicate: "-".join(DUPLICATES[duplicate])
)
def test_checks_pass_on_the_healthy_duplicate(outcomes, duplicate) -> None:
    found = outcomes(duplicate)
    states = {code: found[code].state for code in DUPLICATES[duplicate]}
    assert states == dict.fromkeys(DUPLICATES[duplicate], "passed"), [
        o.findings for o in found.values()
    ]


@pytest.mark.parametrize("refusal", ["MGI105", "MGI106", "MGI107"])
def test_nothing_else_is_judged_when_routers_cannot_be_read(outcomes, refusal) -> None:
    found = outcomes(WEIGHTS[refusal])
    for code in WEIGHTS.keys() - {refusal}:
        assert found[code].state == "does not apply"
        assert found[code].reason == "the routers cannot be read"


def test_checks_of_biases_do_not_apply_without_one(outcomes) -> None:
    found = outcomes(Case())
    of_biases = [code for code in sorted(WEIGHTS) if code.startswith("MGN11")]
    without = [code for code in of_biases if code not in ("MGN117", "MGN118", "MGN119")]
    assert {found[code].reason for code in without} == {"no router has a selection bias"}


def test_what_is_lacking_is_named(outcomes) -> None:
    found = outcomes(Case())
    assert {found[code].state for code in COMPARED} == {"needs a baseline"}
    assert {found[code].state for code in MEASURED} == {"needs tokens"}


def test_a_baseline_without_tokens_cannot_judge_load(outcomes, tmp_path) -> None:
    (tmp_path / "a").mkdir()
    model = write_model(tmp_path / "a", Case(), keep)
    file = tmp_path / "weights.json"
    gate(GateRequest(str(model), baseline=file, update_baseline=True))
    case = Case(tokens=2048, request={"baseline": file})
    outcome = outcomes(case)["MGB401"]
    assert (outcome.state, outcome.reason) == (
        "needs tokens in the baseline",
        "the baseline was made without tokens",
    )


def test_an_expert_that_cannot_lose_is_named(outcomes) -> None:
    case = Case(
        tensor(BIAS, lambda bias: np.where(np.arange(16) == 6, 3.0, bias).astype(np.float32)),
        "deepseek_v3",
    )
    (finding,) = outcomes(case)["MGI110"].findings
    assert "1 of 16 experts are chosen for every input: expert 6" in finding.title


def test_a_bias_spoilt_in_one_layer_is_told_of_that_layer(outcomes) -> None:
    case = Case(tensor(BIAS, lambda bias: 0.0 * bias, layer=2), "deepseek_v3")
    (finding,) = outcomes(case)["MGN116"].findings
    assert finding.routers == ("text/2",)


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.check.code)
def test_every_page_reads_as_sentences(page) -> None:
    assert page.statement.endswith(".")
    assert tuple(page.sections) == SECTIONS
    for text in page.sections.values():
        assert text.endswith(".")
        assert len(text) > 20
    for limit in page.check.limits:
        if limit.basis == "heuristic" and page.check.severity == "error":
            assert page.check.code.startswith(("MGI", "MGN111"))
