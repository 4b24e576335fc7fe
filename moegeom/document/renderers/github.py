"""Workflow commands of GitHub Actions: annotations, one per finding, and the verdict at the end.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moegeom.core.finding import SEVERITY_ORDER, Verdict
from moegeom.document.model import Document, View
from moegeom.document.render import Renderer
from moegeom.document.verdict_text import finding_lines, places, profile_line, verdict_sentence

#: What the runner decodes in a message, and besides that in a property.
_IN_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_IN_PROPERTY = _IN_MESSAGE | str.maketrans({":": "%3A", ",": "%2C"})

_LEVELS = {"error": "warning", "warning": "warning", "note": "notice"}


def render(document: Document, view: View) -> str:
    """Annotations worst first: an error only where the gate fails, so that red means red."""
    del view
    assert document.judged is not None, "render() asks for a verdict"
    verdict, run = document.judged.verdict, document.judged.run
    name = run["checkpoint"]["name"]
    message = f"{verdict_sentence(verdict)} exit {verdict.exit_code}"
    message += f"\nprofile: {profile_line(verdict)}" if verdict.profile else ""
    lines = [*_findings(verdict, run), *_inconclusive(verdict)]
    return "".join(f"{line}\n" for line in (*lines, _command("notice", f"moegeom {name}", message)))


def _findings(verdict: Verdict, run: Mapping[str, Any]) -> Iterator[str]:
    failing = {outcome.code for outcome in verdict.outcomes if verdict.fails(outcome)}
    limit = SEVERITY_ORDER[verdict.fail_on]
    for finding in verdict.findings:
        fails = finding.code in failing and SEVERITY_ORDER[finding.severity] <= limit
        title = f"{finding.code} {places(finding.routers, run)}"
        level = "error" if fails else _LEVELS[finding.severity]
        yield _command(level, title, "\n".join(finding_lines(finding)))


def _inconclusive(verdict: Verdict) -> Iterator[str]:
    for outcome in verdict.open:
        title = f"{outcome.code} inconclusive"
        yield _command("warning", title, f"{outcome.title}: {outcome.reason}")


def _command(level: str, title: str, message: str) -> str:
    return f"::{level} title={title.translate(_IN_PROPERTY)}::{message.translate(_IN_MESSAGE)}"


RENDERER = Renderer("github", render, of_verdicts=True)
