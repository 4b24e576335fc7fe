"""Blocks of every document with a verdict: sentence, checks, open checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.finding import SEVERITY_ORDER, STATES, Finding, Outcome, Verdict
from moegeom.core.text import number_of
from moegeom.document.excerpts import MOST, in_part
from moegeom.document.model import Block, Excerpt, Fact, Headline, Look, Note, Problem, Table
from moegeom.document.verdict_text import (
    check_classes,
    places,
    verdict_sentence,
    verdict_word,
    why_not_judged,
)


def verdict_card(verdict: Verdict) -> list[Block]:
    """The verdict in a sentence, with the exit code at the right, and its three classes."""
    sentence, look = verdict_sentence(verdict), _look(verdict)
    worst: Look = "error" if verdict.exit_code == 1 else "warning"
    return [
        Fact("VERDICT", sentence, look, f"exit {verdict.exit_code}"),
        Headline.of_classes(*check_classes(verdict), "checks", worst),
    ]


def _look(verdict: Verdict) -> Look:
    """Only a gate that judged everything and found nothing looks good."""
    if verdict.exit_code == 1:
        return "error"
    looks: dict[str, Look] = {"PASSED": "good", "PASSED IN PART": "strong"}
    return looks.get(verdict_word(verdict), "warning")


def findings_excerpt(
    findings: Sequence[Finding], run: Mapping[str, Any], detail: bool
) -> Sequence[Block]:
    """Findings, worst first: on a screen without room the last by their titles, then counted."""
    whole = [Problem(finding, places(finding.routers, run)) for finding in findings]
    bare = {"detail": "", "fix": "", "next_command": ""}
    titles = [
        Problem(dataclasses.replace(problem.finding, **bare), problem.places) for problem in whole
    ]
    most = min(len(whole), MOST)
    steps = [(full, most) for full in range(min(most, len(whole) - 1), 0, -1)]
    steps += [(1, title) for title in range(most - 1, 0, -1)]
    shorter = [
        [*whole[:full], *titles[full:title], *_left_out(titles[full:title], titles[title:])]
        for full, title in steps
    ]
    return [Excerpt(whole, whole, shorter=shorter)] if whole and not detail else whole


def _left_out(brief: Sequence[Problem], hidden: Sequence[Problem]) -> Iterator[Note]:
    """A note on the findings that a screen leaves out."""
    codes = ", ".join(dict.fromkeys(problem.finding.code for problem in hidden))
    parts = [f"the evidence of {number_of(len(brief), 'finding')}"] if brief else []
    parts += [f"{number_of(len(hidden), 'more finding')} ({codes})"] if hidden else []
    if parts:
        yield Note(f"Not shown: {'; '.join(parts)}: --detail")


def unjudged(verdict: Verdict, run: Mapping[str, Any], detail: bool) -> Iterator[Block]:
    """Checks that could not be judged, and those whose findings are accepted; one line each."""
    yield in_part([*_unjudged(verdict, run)], "check", detail, least=1)


def _unjudged(verdict: Verdict, run: Mapping[str, Any]) -> Iterator[Fact]:

    def line(label: str, text: str, look: Look) -> Fact:
        return Fact(label, text, look, indent=len(label) + 2)

    for outcome in verdict.open:
        text = f"not known whether {outcome.statement.removesuffix('.')}: {outcome.reason}"
        yield line(f"INCONCLUSIVE {outcome.code}", text, "warning")
    for outcome in verdict.outcomes:
        for finding, reason in outcome.accepted:
            text = f"{places(finding.routers, run)}: {outcome.title}: {reason}"
            yield line(f"ignored {outcome.code}", text, "dim")


def checks_table(verdict: Verdict) -> Table:
    """Every check by what holds when it passes, and its state; a row has the name of its check."""
    rows = [(o.code, o.statement or o.title, _state(o)) for o in verdict.outcomes]
    anchors = [f"check-{outcome.code}" for outcome in verdict.outcomes]
    return Table([("check", "statement", "state")], rows, left=(0, 1, 2), anchors=anchors)


def _state(outcome: Outcome) -> str:
    if outcome.state == "failed":
        return f"failed ({outcome.severity})"
    return why_not_judged(outcome)


def verdict_record(verdict: Verdict) -> Mapping[str, Any]:
    """Exit code, and every check with its findings."""
    severities = [finding.severity for finding in verdict.findings]
    return {
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
    }
