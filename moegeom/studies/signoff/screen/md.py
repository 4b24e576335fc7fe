"""Markdown of GitHub: the verdict, and a table with the four lines."""

from __future__ import annotations

from moegeom.document._reporter import Reporter, View
from moegeom.document.markdown import escaped
from moegeom.document.untrusted import printable
from moegeom.studies.signoff.screen._signoff import Line, SignOff
from moegeom.studies.signoff.screen._wording import ending, read_line, verdict_sentence


def render(found: SignOff, view: View) -> str:
    """A heading, the verdict, both sides, the lines, and the commands that are next."""
    del view
    found = printable(found)
    first, second = found.sides
    lines = [f"## moegeom signoff: {escaped(first.name)} and {escaped(second.name)}", ""]
    lines += [f"**{escaped(verdict_sentence(found))}** Exit code {found.exit_code}.", ""]
    for name, side in zip("AB", found.sides, strict=True):
        rule = f": {side.rule}" if side.rule else ""
        lines.append(f"- **{name}** {escaped(f'{side.name}{rule}. {read_line(side)}')}")
    lines += ["", "| line | state | what was found |", "| --- | --- | --- |"]
    lines += [_row(line) for line in found.lines]
    lines.append("")
    if commands := [text for line in found.lines for text in line.commands]:
        # indented code needs no fence that a name could close
        lines += [*(f"    {text}" for text in commands), ""]
    lines += [escaped(text) + "\n" for text in ending(found)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(line: Line) -> str:
    said = " ".join((line.sentence, *line.details))
    return f"| {escaped(line.name)} | {line.state} | {escaped(said)} |"


REPORTER = Reporter("md", render)
