"""Texts that all reports of a verdict share: counts, places, findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.core.finding import (
    EXIT_FAILED,
    EXIT_OK,
    SEVERITY_ORDER,
    Finding,
    Outcome,
    Severity,
    State,
    Verdict,
)
from moegeom.core.router import format_layers, parse_layers

#: Runs of layers, or whole names of routers, that are listed before the rest is counted.
_MOST_PLACES = 8

#: For one check and for several, in the order in which they are told.
_COUNTED: dict[State, tuple[str, str]] = {
    "passed": ("check passed", "checks passed"),
    "inconclusive": ("inconclusive", "inconclusive"),
    "needs tokens": ("needs tokens", "need tokens"),
    "needs a baseline": ("needs a baseline", "need a baseline"),
    "needs tokens in the baseline": (
        "needs a baseline made with tokens",
        "need a baseline made with tokens",
    ),
    "needs experts": ("needs experts", "need experts"),
    "does not apply": ("does not apply", "do not apply"),
    "ignored": ("ignored", "ignored"),
}

_FAILING: dict[Severity, str] = {
    "error": "",
    "warning": " Warnings fail.",
    "note": " Warnings and notes fail.",
}


def verdict_sentence(verdict: Verdict) -> str:
    """``PASSED: 0 errors, 1 warning; 31 checks passed, 14 need tokens. Not checked: ...``."""
    severities = [finding.severity for finding in verdict.findings]
    findings = [
        f"{severities.count(severity)} {severity}{'' if severities.count(severity) == 1 else 's'}"
        for severity in SEVERITY_ORDER
        if severity != "note" or severity in severities
    ]
    checks = [
        f"{number} {words[number != 1]}"
        for state, words in _COUNTED.items()
        if (number := len(verdict.in_state(state))) or state == "passed"
    ]
    counted = f"{', '.join(findings)}; {', '.join(checks)}.{_FAILING[verdict.fail_on]}"
    unseen = f" Not checked: {', '.join(verdict.unseen)}." if verdict.unseen else ""
    return f"{verdict_word(verdict)}: {counted}{unseen}"


def verdict_word(verdict: Verdict) -> str:
    """PASSED, FAILED or INCONCLUSIVE: the exit code in one word, the first of every report."""
    return {EXIT_OK: "PASSED", EXIT_FAILED: "FAILED"}.get(verdict.exit_code, "INCONCLUSIVE")


def profile_line(verdict: Verdict) -> str:
    """By which profile was judged and what it changes; empty where moegeom judges by itself."""
    return f"{'; '.join(verdict.profile)}." if verdict.profile else ""


def places(routers: Sequence[str], run: Mapping[str, Any]) -> str:
    """``layers 3-7,9``, or whole names where layers of several stacks or slots could be meant."""
    if not routers:
        return "checkpoint"
    names = {*(router["name"] for router in run["routers"]), *routers}
    parts = [name.split("/") for name in names]
    if len({stack for stack, *_ in parts}) == 1 and all(
        len(rest) == 1 and rest[0].isdecimal() for _, *rest in parts
    ):
        return _layers({int(name.split("/")[1]) for name in routers})
    if len(names) == len(routers) > 1:
        return f"all {len(names)} routers"
    rest = len(routers) - _MOST_PLACES
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(routers[:_MOST_PLACES]) + more


def _layers(layers: set[int]) -> str:
    if len(layers) == 1:
        return f"layer {format_layers(layers)}"
    ranges = ",".join(format_layers(layers).split(",")[:_MOST_PLACES])
    rest = len(layers - parse_layers(ranges))
    return f"layers {ranges}" + (f" and {rest} more" if rest else "")


def finding_lines(finding: Finding) -> list[str]:
    """A finding as plain lines, without its place; the first is read first."""
    lines = [finding.title, finding.detail]
    lines += [f"fix: {finding.fix}"] if finding.fix else []
    lines += [f"next: {finding.next_command}"] if finding.next_command else []
    return [line.strip() for line in lines if line.strip()]


def why_not_judged(outcome: Outcome) -> str:
    """``needs tokens: there are no tokens``; the state alone when no reason is given."""
    return f"{outcome.state}: {outcome.reason}" if outcome.reason else outcome.state
