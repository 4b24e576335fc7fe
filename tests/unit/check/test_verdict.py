"""The exit code follows from the outcomes alone: failed before inconclusive before passed."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from moegeom.core.finding import STATES, Finding, Outcome, Verdict

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
