"""Markdown of GitHub: the verdict, and a table with the four lines."""

from __future__ import annotations

from moegeom.report._reporter import Reporter, View
from moegeom.report.signoffs._signoff import Line, SignOff
from moegeom.report.signoffs._wording import ending, read_line, verdict_sentence
from moegeom.report.untrusted import printable

#: What HTML and tables begin with becomes an entity; what Markdown and formulas do is escaped.
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
_ESCAPES = str.maketrans(_ENTITIES | {character: f"\\{character}" for character in "\\`*_[]~$#!"})


def render(found: SignOff, view: View) -> str:
    """A heading, the verdict, both sides, the lines, and the commands that are next."""
    del view
    found = printable(found)
    first, second = found.sides
    lines = [f"## moegeom signoff: {_plain(first.name)} and {_plain(second.name)}", ""]
    lines += [f"**{_plain(verdict_sentence(found))}** Exit code {found.exit_code}.", ""]
    for name, side in zip("AB", found.sides, strict=True):
        rule = f": {side.rule}" if side.rule else ""
        lines.append(f"- **{name}** {_plain(f'{side.name}{rule}. {read_line(side)}')}")
    lines += ["", "| line | state | what was found |", "| --- | --- | --- |"]
    lines += [_row(line) for line in found.lines]
    lines.append("")
    if commands := [text for line in found.lines for text in line.commands]:
        # indented code needs no fence that a name could close
        lines += [*(f"    {text}" for text in commands), ""]
    lines += [_plain(text) + "\n" for text in ending(found)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(line: Line) -> str:
    said = " ".join((line.sentence, *line.details))
    return f"| {_plain(line.name)} | {line.state} | {_plain(said)} |"


def _plain(text: str) -> str:
    return text.translate(_ESCAPES)


REPORTER = Reporter("md", render)
