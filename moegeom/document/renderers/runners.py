"""What runners of CI read of a verdict: annotations of GitHub Actions, and JUnit XML.

Of GitHub Actions a workflow command for each finding, and the verdict at the end:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands. In JUnit, as
Jenkins, GitLab and others read it, a suite per area and a test case per check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element, SubElement

from moegeom.core.finding import SEVERITY_ORDER, Outcome, State, Verdict
from moegeom.document.model import Document, View
from moegeom.document.render import Renderer
from moegeom.document.rule_words import rule_facts
from moegeom.document.verdict_text import (
    finding_lines,
    places,
    profile_line,
    verdict_sentence,
    why_not_judged,
)

#: What the runner decodes in a message, and besides that in a property.
_IN_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_IN_PROPERTY = _IN_MESSAGE | str.maketrans({":": "%3A", ",": "%2C"})

_LEVELS = {"error": "warning", "warning": "warning", "note": "notice"}


def render_github(document: Document, view: View) -> str:
    """Annotations worst first: an error only where the gate fails, so that red means red."""
    del view
    assert document.judged is not None, "render() asks for a verdict"
    verdict, run = document.judged.verdict, document.judged.run
    name = run["checkpoint"]["name"]
    message = f"{verdict_sentence(verdict)} exit {verdict.exit_code}"
    message += f"\nprofile: {profile_line(verdict)}" if verdict.profile else ""
    lines = [*_findings(verdict, run)]
    for one in verdict.open:
        reason = f"{one.title}: {one.reason}"
        lines.append(_command("warning", f"{one.code} inconclusive", reason))
    return "".join(f"{line}\n" for line in (*lines, _command("notice", f"moegeom {name}", message)))


def _findings(verdict: Verdict, run: Mapping[str, Any]) -> Iterator[str]:
    failing = {outcome.code for outcome in verdict.outcomes if verdict.fails(outcome)}
    limit = SEVERITY_ORDER[verdict.fail_on]
    for finding in verdict.findings:
        fails = finding.code in failing and SEVERITY_ORDER[finding.severity] <= limit
        title = f"{finding.code} {places(finding.routers, run)}"
        level = "error" if fails else _LEVELS[finding.severity]
        yield _command(level, title, "\n".join(finding_lines(finding)))


def _command(level: str, title: str, message: str) -> str:
    return f"::{level} title={title.translate(_IN_PROPERTY)}::{message.translate(_IN_MESSAGE)}"


GITHUB = Renderer("github", render_github, of_verdicts=True)


#: The beginning of a code says which area a check is from.
_AREAS = {
    "MGI": "integrity",
    "MGN": "numerics",
    "MGG": "geometry",
    "MGB": "balance",
    "MGP": "profile",
    "MGT": "training",
}

#: What a test case holds when it did not simply pass. There is one at most: of several, Jenkins
#: keeps the last.
_ELEMENTS = {
    "inconclusive": "error",
    "needs tokens": "skipped",
    "needs a baseline": "skipped",
    "needs tokens in the baseline": "skipped",
    "needs experts": "skipped",
    "needs more": "skipped",
    "needs routers": "skipped",
    "does not apply": "skipped",
    "ignored": "skipped",
}

_COUNTERS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def render_junit(document: Document, view: View) -> str:
    """The document; text of others is made printable first, which leaves what XML 1.0 allows."""
    del view
    assert document.judged is not None, "render() asks for a verdict"
    verdict, run = document.judged.verdict, document.judged.run
    root = Element("testsuites", name=f"moegeom {run['checkpoint']['name']}")
    by_area: dict[str, list[Outcome]] = {area: [] for area in _AREAS.values()}
    for outcome in verdict.outcomes:
        by_area.setdefault(_AREAS.get(outcome.code[:3], "other"), []).append(outcome)
    for area, outcomes in by_area.items():
        if outcomes:
            _suite(root, f"moegeom.{area}", outcomes, verdict, run)
    _count(root)
    # the time of the whole run: what is measured serves all checks, judging takes no time
    root.set("time", f"{run.get('seconds') or 0.0:.3f}")
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _suite(
    root: Element, name: str, outcomes: Sequence[Outcome], verdict: Verdict, run: Mapping[str, Any]
) -> None:
    suite = SubElement(root, "testsuite", name=name)
    properties = SubElement(suite, "properties")
    for key, value in _properties(verdict, run).items():
        SubElement(properties, "property", name=key, value=value)
    for outcome in outcomes:
        _case(suite, outcome, verdict, run)
    _count(suite)
    suite.set("time", "0.000")


def _properties(verdict: Verdict, run: Mapping[str, Any]) -> dict[str, str]:
    return {
        "checkpoint": run["checkpoint"]["name"],
        "fingerprint": run["checkpoint"].get("fingerprint", ""),
        "moegeom": run.get("moegeom", ""),
        "rule": rule_facts(run)["rule_trust"] or "",
        "verdict": verdict_sentence(verdict),
        "exit_code": str(verdict.exit_code),
        "profile": profile_line(verdict),
        "detectable": "; ".join(verdict.detectable),
        "not_looked_at": "; ".join(verdict.not_looked_at),
    }


def _case(suite: Element, outcome: Outcome, verdict: Verdict, run: Mapping[str, Any]) -> None:
    case = SubElement(
        suite,
        "testcase",
        classname=suite.attrib["name"],
        name=f"{outcome.code} whether {outcome.statement or outcome.title}".removesuffix("."),
        time="0.000",
    )
    messages = [
        f"{places(finding.routers, run)}: " + "\n".join(finding_lines(finding))
        for finding in outcome.findings
    ]
    messages += [
        f"ignored ({reason}), {places(finding.routers, run)}: {finding.title}"
        for finding, reason in outcome.accepted
    ]
    text = "\n\n".join(messages)
    if verdict.fails(outcome):
        more = f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
        message = (messages[0].splitlines()[0] if messages else outcome.title) + more
        SubElement(case, "failure", message=message, type=outcome.severity).text = text
        return
    state: State = "inconclusive" if outcome.num_open else outcome.state
    if state == "failed":  # it does not stop the run, and is no pass
        message = (
            f"{outcome.severity}: {messages[0].splitlines()[0] if messages else outcome.title}"
        )
        SubElement(case, "skipped", message=message)
    if state in _ELEMENTS:
        element = SubElement(case, _ELEMENTS[state], message=why_not_judged(outcome))
        if element.tag == "error":
            element.set("type", state)
    if text:
        # nobody stops for these, so they are left where a reader of the log finds them
        SubElement(case, "system-out").text = f"{outcome.severity}: {text}"


def _count(parent: Element) -> None:
    parent.set("tests", str(len(parent.findall(".//testcase"))))
    for name, tag in _COUNTERS.items():
        parent.set(name, str(len(parent.findall(f".//testcase/{tag}"))))


JUNIT = Renderer("junit", render_junit, of_verdicts=True)
