"""Each check fails on its defect, passes on the healthy twin, and says when it cannot judge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegeom.checks import CHECKS
from moegeom.checks.check import SECTIONS, all_pages
from tests.unit.check.conftest import BIAS, Case, keep
from tests.unit.check.defects import COMPARED, DEFECTS, MEASURED, WEIGHTS, tensor

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
