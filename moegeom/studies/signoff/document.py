"""A sign-off as a document: both sides, the verdict, four lines, what was not checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.core.text import all_of
from moegeom.document.excerpts import in_part
from moegeom.document.header import size
from moegeom.document.model import (
    Block,
    Command,
    Document,
    Fact,
    Gallery,
    Look,
    Note,
    Title,
    View,
)
from moegeom.studies.diff.record import Side
from moegeom.studies.signoff.figures import sign_off_figures
from moegeom.studies.signoff.record import Line, LineState, SignOff

#: How each state looks.
_LOOKS: dict[LineState, Look] = {
    "failed": "error",
    "inconclusive": "warning",
    "not judged": "warning",
    "passed": "good",
}

#: Columns of the state in front of a line.
_STATE = 14


def document(report: SignOff, view: View) -> Document:
    """What ``moegeom signoff`` says."""
    first, second = report.sides
    sides = [
        block for name, side in zip("AB", report.sides, strict=True) for block in _side(name, side)
    ]
    # green only when every line passed
    look: Look = next(look for state, look in _LOOKS.items() if report.in_state(state))
    verdict = Fact("VERDICT", verdict_sentence(report), look, f"exit {report.exit_code}")
    ending = [*report.notes]
    if report.not_looked_at:
        ending.append(f"Not checked: {'; '.join(report.not_looked_at)}.")
    return Document(
        "signoff",
        f"{first.name} and {second.name}",
        [
            [verdict],
            sides,
            *(_line(line, view.detail) for line in report.lines),
            [Gallery(lambda: [*sign_off_figures(report)])],
            [*map(Note, ending)],
        ],
        lambda: _record(report),
    )


def verdict_sentence(report: SignOff) -> str:
    """``PASSED, signed off: all 4 lines passed; 3 things not checked.``, or what is in the way."""
    by_state = {
        state: ", ".join(line.name for line in lines)
        for state in _LOOKS
        if state != "passed" and (lines := report.in_state(state))
    }
    unseen = _unseen(report)
    if not by_state:
        return f"PASSED, signed off: {all_of(len(report.lines), 'line')} passed{unseen}."
    stands = "; ".join(f"{names} {state}" for state, names in by_state.items())
    if "failed" in by_state:
        return f"FAILED, not signed off: {stands}{unseen}."
    return f"INCONCLUSIVE, not signed off: {_missing(report)}{stands}; nothing failed{unseen}."


def _missing(report: SignOff) -> str:
    """The options that would have set a limit; one that set none is not asked for again."""
    lines = report.in_state("not judged")
    if not lines:
        return ""
    has_rerun = any(line.evidence.get("rerun") for line in lines)
    return f"give --max-flipped{'' if has_rerun else ' (or --rerun)'}; "


def _unseen(report: SignOff) -> str:
    """How many of the things listed at the end nobody looked at."""
    number = len(report.not_looked_at)
    if not number:
        return ""
    return f"; {number} thing{'' if number == 1 else 's'} not checked"


def _side(name: str, side: Side) -> Sequence[Block]:
    title = Title(f"{name}  {side.name}", f"{side.rule}." if side.rule else "")
    return title, Fact("", _read(side))


def _read(side: Side) -> str:
    """How many routers a side has, and how much of it was read."""
    if not side.bytes_total:
        return "its routers could not be read."
    plural = "" if side.num_routers == 1 else "s"
    part = side.bytes_read < side.bytes_total
    of = f" of {size(side.bytes_total)}" if part else ""
    tokens = f" Tokens: {side.tokens}." if side.tokens else ""
    return f"{side.num_routers} router{plural}, read {size(side.bytes_read)}{of}.{tokens}"


def _line(line: Line, detail: bool) -> list[Block]:
    look = _LOOKS[line.state]
    details = [Note(text, indent=_STATE) for text in line.details]
    return [
        Fact(line.state, f"{line.name}: {line.sentence}", look, indent=_STATE),
        in_part(details, "paragraph", detail, indent=_STATE),
        *(Command("fill in ", text) for text in line.commands),
    ]


def _record(report: SignOff) -> Mapping[str, Any]:
    return {
        "verdict": verdict_sentence(report),
        "exit_code": report.exit_code,
        **{name: dataclasses.asdict(side) for name, side in zip("ab", report.sides, strict=True)},
        "lines": [dataclasses.asdict(line) for line in report.lines],
        "notes": report.notes,
        "not_looked_at": report.not_looked_at,
    }
