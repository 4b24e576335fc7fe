"""The screen of the gate: what was judged, the verdict, findings worst first, what was not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from moegeom.core.finding import Finding
from moegeom.core.verdict import Verdict
from moegeom.document._reporter import View
from moegeom.document._verdict_reporter import VerdictReporter
from moegeom.document.header import gate_rule_line, routers_line, rule_line, skipped, tokens_line
from moegeom.document.recording_hint import recording_hint
from moegeom.document.screen import (
    STYLES,
    command,
    finding_head,
    hanging,
    labelled,
    titled,
    to_text,
    wrapped,
)
from moegeom.document.summary import Summary, summarise_verdict
from moegeom.document.untrusted import printable
from moegeom.document.verdict_text import (
    detectable,
    mood,
    not_looked_at,
    places,
    profile_line,
    refusal,
    verdict_sentence,
)

_REPAIR, _NEXT = "   repair  ", "   next    "


def render(verdict: Verdict, run: Mapping[str, Any], view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    verdict, run = printable(verdict), printable(run)
    summary = summarise_verdict(verdict, run)
    parts = (
        _header(verdict, summary, view.width),
        _verdict(verdict, view.width),
        [line for f in verdict.findings for line in _finding(f, run, view.width)],
        _unjudged(verdict, run, view.width),
        _ending(verdict, summary, view.width),
    )
    lines: list[Text] = []
    for part in parts:
        lines += [Text(), *part] if lines and part else part
    return to_text(lines, view)


def _header(verdict: Verdict, summary: Summary, width: int) -> list[Text]:
    run, name = summary.run, summary.run["checkpoint"]["name"]
    if "refused" in run:
        head = [Text(name, style="bold"), *labelled("routers", refusal(verdict, run), width)]
        return [*head, *_profile(verdict, width)]
    lines = [
        *titled(name, rule_line(summary), width),
        *labelled("routers", routers_line(summary), width),
        *labelled("rule", gate_rule_line(run), width),
    ]
    if run["tokens"] is not None:
        lines += labelled("tokens", tokens_line(summary), width)
    return [*lines, *_profile(verdict, width)]


def _profile(verdict: Verdict, width: int) -> list[Text]:
    return labelled("profile", profile_line(verdict), width) if verdict.profile else []


def _verdict(verdict: Verdict, width: int) -> list[Text]:
    """The exit code stands at the right end, where there is room for it."""
    lines = labelled("VERDICT", verdict_sentence(verdict), width, STYLES[mood(verdict)])
    code = f"exit {verdict.exit_code}"
    room = width - len(lines[-1])
    if room >= len(code) + 2:
        lines[-1].append(f"{code:>{room}}")
    else:
        lines.append(Text(f"{code:>{width}}"))
    return lines


def _finding(finding: Finding, run: Mapping[str, Any], width: int) -> list[Text]:
    lines = finding_head(finding, places(finding.routers, run), width)
    if finding.repair:
        lines += hanging(_REPAIR, finding.repair, width, "dim")
    if finding.next_command:
        lines.append(command(_NEXT.lstrip(), finding.next_command))
    return lines


def _unjudged(verdict: Verdict, run: Mapping[str, Any], width: int) -> list[Text]:
    """Checks that could not be judged, and those whose findings are accepted; one line each."""
    lines = []
    for outcome in verdict.open:
        text = f"not known whether {outcome.statement.removesuffix('.')}: {outcome.reason}"
        lines += hanging(f"INCONCLUSIVE {outcome.code}  ", text, width, STYLES["warning"])
    for outcome in verdict.outcomes:
        for finding, reason in outcome.accepted:
            text = f"{places(finding.routers, run)}: {outcome.title}: {reason}"
            lines += hanging(f"ignored {outcome.code}  ", text, width, STYLES["note"])
    return lines


def _ending(verdict: Verdict, summary: Summary, width: int) -> list[Text]:
    said = (detectable(verdict), not_looked_at(verdict), *skipped(summary))
    lines = [Text(part, style="dim") for text in said for part in wrapped(text, width)]
    routers = summary.run["routers"]
    if routers and summary.run["tokens"] is None:
        lines += hanging("   record  ", recording_hint(routers), width, "dim")
    return lines


REPORTER = VerdictReporter("table", render)
