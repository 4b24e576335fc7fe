"""One JSON document: exit code, every check with its findings, and the facts of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moegeom.core.finding import SEVERITY_ORDER
from moegeom.core.verdict import STATES, Verdict
from moegeom.document._reporter import View
from moegeom.document._verdict_reporter import VerdictReporter
from moegeom.document.rule_trust import rule_facts
from moegeom.document.strict_json import document_text
from moegeom.document.verdict_text import verdict_word


def render(verdict: Verdict, run: Mapping[str, Any], view: View) -> str:
    """The verdict as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    severities = [finding.severity for finding in verdict.findings]
    document = {
        "verdict": verdict_word(verdict),
        "exit_code": verdict.exit_code,
        "fail_on": verdict.fail_on,
        "checks": {state: len(verdict.in_state(state)) for state in STATES},
        "findings": {severity: severities.count(severity) for severity in SEVERITY_ORDER},
        "outcomes": [
            {**dataclasses.asdict(outcome), "is_failing": verdict.fails(outcome)}
            for outcome in verdict.outcomes
        ],
        "profile": verdict.profile,
        "detectable": verdict.detectable,
        "not_looked_at": verdict.not_looked_at,
        "unseen": verdict.unseen,
        **rule_facts(run),
        "run": run,
    }
    return document_text(document)


REPORTER = VerdictReporter("json", render)
