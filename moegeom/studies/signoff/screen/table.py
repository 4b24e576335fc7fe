"""The screen: both sides, the verdict, the four lines, what was not looked at."""

from __future__ import annotations

from rich.text import Text

from moegeom.document._reporter import Reporter, View
from moegeom.document.screen import STYLES, command, hanging, labelled, titled, to_text, wrapped
from moegeom.document.untrusted import printable
from moegeom.studies.diff.screen import Side
from moegeom.studies.signoff.screen._signoff import Line, SignOff
from moegeom.studies.signoff.screen._wording import MOODS, ending, mood, read_line, verdict_sentence

#: Columns of the state in front of a line.
_STATE = 14


def render(found: SignOff, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, but for commands, which stay whole."""
    found = printable(found)
    parts = [
        [line for pair in zip("AB", found.sides, strict=True) for line in _side(*pair, view.width)],
        _verdict(found, view.width),
        *(_line(line, view.width) for line in found.lines),
        [Text(part, style="dim") for text in ending(found) for part in wrapped(text, view.width)],
    ]
    lines: list[Text] = []
    for part in parts:
        lines += [Text(""), *part] if lines and part else part
    return to_text(lines, view)


def _side(name: str, side: Side, width: int) -> list[Text]:
    lines = titled(f"{name}  {side.name}", f"{side.rule}." if side.rule else "", width)
    return [*lines, *labelled("", read_line(side), width)]


def _verdict(found: SignOff, width: int) -> list[Text]:
    """The exit code stands at the right end, where there is room for it."""
    lines = labelled("VERDICT", verdict_sentence(found), width, STYLES[mood(found)])
    code = f"exit {found.exit_code}"
    room = width - len(lines[-1])
    if room < len(code) + 2:
        return [*lines, Text(f"{code:>{width}}")]
    lines[-1].append(f"{code:>{room}}")
    return lines


def _line(line: Line, width: int) -> list[Text]:
    head, style = f"{line.state:<{_STATE}}", STYLES[MOODS[line.state]]
    found = hanging(head, f"{line.name}: {line.sentence}", width, style)
    for text in line.details:
        found += [Text(part, style="dim") for part in wrapped(text, width, " " * _STATE)]
    return [*found, *(command("fill in ", text) for text in line.commands)]


REPORTER = Reporter("table", render)
