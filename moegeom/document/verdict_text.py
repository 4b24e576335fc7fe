"""Texts that all reports of a verdict share: counts, places, findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from moegeom.core.text import number_of

#: Runs of layers, or whole names of routers, that are listed before the rest is counted.
_MOST_PLACES = 8

#: Why checks were not judged, for one and for several, in the order in which they are counted.
_UNJUDGED: dict[State, tuple[str, str]] = {
    "inconclusive": ("inconclusive", "inconclusive"),
    "needs tokens": ("needs tokens", "need tokens"),
    "needs a baseline": ("needs a baseline", "need a baseline"),
    "needs tokens in the baseline": (
        "needs a baseline made with tokens",
        "need a baseline made with tokens",
    ),
    "needs experts": ("needs experts", "need experts"),
    "needs more": ("needs more", "need more"),
    "needs routers": ("needs routers that can be read", "need routers that can be read"),
}

#: Checks that are about nothing here, or whose findings a profile accepts.
_BESIDE: dict[State, tuple[str, str]] = {
    "ignored": ("accepted", "accepted"),
    "does not apply": ("does not apply", "do not apply"),
}

#: Fine, and not.
_JUDGED: tuple[State, State] = ("passed", "failed")

_FAILING: dict[Severity, str] = {
    "error": "",
    "warning": " Warnings fail.",
    "note": " Warnings and notes fail.",
}


def verdict_sentence(verdict: Verdict) -> str:
    """The word, then how many checks are fine, are not, and were not judged.

    ``WARNINGS: 27 checks fine; 3 not: 4 warnings; 13 not judged: 13 need a baseline; ...``.
    """
    severities = [finding.severity for finding in verdict.findings]
    findings = [
        number_of(number, severity)
        for severity in SEVERITY_ORDER
        if (number := severities.count(severity))
    ]
    unjudged = _counts(verdict, _UNJUDGED)
    fine, not_fine, not_judged = check_classes(verdict)
    counted = [f"{number_of(fine, 'check')} fine", f"{not_fine} not{_after(findings)}"]
    counted.append(f"{not_judged} not judged{_after(unjudged)}")
    counted += [", ".join(beside)] if (beside := _counts(verdict, _BESIDE)) else []
    unseen = f" Not checked: {', '.join(verdict.unseen)}." if verdict.unseen else ""
    text = f"{'; '.join(counted)}.{_FAILING[verdict.fail_on]}"
    return f"{verdict_word(verdict)}: {text}{unseen}"


def check_classes(verdict: Verdict) -> tuple[int, int, int]:
    """Checks that were judged and are fine, were judged and are not, and were not judged."""
    passed, failed = (len(verdict.in_state(state)) for state in _JUDGED)
    return passed, failed, _number(verdict, _UNJUDGED)


def _after(parts: Sequence[str]) -> str:
    return f" ({', '.join(parts)})" if parts else ""


def _number(verdict: Verdict, states: Iterable[State]) -> int:
    return sum(len(verdict.in_state(state)) for state in states)


def _counts(verdict: Verdict, states: Mapping[State, tuple[str, str]]) -> list[str]:
    numbers = [(len(verdict.in_state(state)), words) for state, words in states.items()]
    return [f"{number} {words[number != 1]}" for number, words in numbers if number]


def verdict_word(verdict: Verdict) -> str:
    """The first word of every report. PASSED is said where everything was judged and is fine.

    FAILED is exit code 1 and INCONCLUSIVE 4. With 0 ERRORS, WARNINGS or NOTES are the worst that
    was found and does not fail the gate; PASSED IN PART: what was judged is fine, and something
    was not judged, routers or checks.
    """
    if verdict.exit_code != EXIT_OK:
        return "FAILED" if verdict.exit_code == EXIT_FAILED else "INCONCLUSIVE"
    if verdict.findings:
        return f"{verdict.findings[0].severity}s".upper()
    is_whole = not (_number(verdict, _UNJUDGED) or verdict.unseen)
    return "PASSED" if is_whole else "PASSED IN PART"


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
