"""Markdown of GitHub, for a job summary: the verdict, the findings, all checks folded away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.finding import Finding
from moegeom.core.verdict import Verdict
from moegeom.document._reporter import View
from moegeom.document._verdict_reporter import VerdictReporter
from moegeom.document.header import gate_rule_line, routers_line, rule_line, tokens_line
from moegeom.document.markdown import code_span, escaped
from moegeom.document.summary import summarise_verdict
from moegeom.document.untrusted import printable
from moegeom.document.verdict_text import (
    detectable,
    not_looked_at,
    places,
    profile_line,
    refusal,
    verdict_sentence,
    why_not_judged,
)


def render(verdict: Verdict, run: Mapping[str, Any], view: View) -> str:
    """A heading, the verdict, a list of findings, and a table of all checks."""
    verdict, run = printable(verdict), printable(run)
    lines = [f"## moegeom check: {escaped(run['checkpoint']['name'])}", ""]
    lines += [f"**{escaped(verdict_sentence(verdict))}** Exit code {verdict.exit_code}.", ""]
    lines += [f"- **{label}** {escaped(text)}" for label, text in _facts(verdict, run)]
    lines += [f"- **profile** {escaped(profile_line(verdict))}"] if verdict.profile else []
    for finding in verdict.findings:
        lines += ["", *_finding(finding, run)]
    for outcome in verdict.open:
        said = escaped(f"not known whether {outcome.statement.removesuffix('.')}: {outcome.reason}")
        lines += ["", f"**INCONCLUSIVE {escaped(outcome.code)}** {said}"]
    lines += ["", "<details>", f"<summary>All checks ({len(verdict.outcomes)})</summary>", ""]
    lines += [*_checks(verdict), "", "</details>", ""]
    lines += [
        escaped(text) + "\n" for text in (detectable(verdict), not_looked_at(verdict)) if text
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _facts(verdict: Verdict, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "refused" in run:
        return [("routers", refusal(verdict, run))]
    summary = summarise_verdict(verdict, run)
    rule = f"{rule_line(summary)} Rule {gate_rule_line(run)}"
    return [
        ("rule", rule),
        ("routers", routers_line(summary)),
        ("tokens", tokens_line(summary)),
    ]


def _finding(finding: Finding, run: Mapping[str, Any]) -> list[str]:
    where = places(finding.routers, run)
    head = f"**{finding.severity.upper()} {escaped(finding.code)}** "
    lines = [f"{head}{escaped(f'{where}: {finding.title}')} {escaped(finding.detail)}".rstrip(), ""]
    lines += [f"- repair: {escaped(finding.repair)}"] if finding.repair else []
    lines += [f"- next: {code_span(finding.next_command)}"] if finding.next_command else []
    return lines


def _checks(verdict: Verdict) -> Iterator[str]:
    yield _row(("check", "statement", "state"))
    yield _row(("---", "---", "---"))
    for outcome in verdict.outcomes:
        state = f"failed ({outcome.severity})" if outcome.state == "failed" else None
        statement = outcome.statement or outcome.title
        cells = (outcome.code, statement, state or why_not_judged(outcome))
        yield _row([escaped(cell) for cell in cells])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


REPORTER = VerdictReporter("md", render)
