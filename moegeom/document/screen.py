"""How the terminal screens look: words, styles, labelled lines and what wraps."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from moegeom.core.finding import Finding
from moegeom.document._reporter import View

#: Columns of the label in front of a line of the header.
LABEL = 9

#: Columns that text is never narrower than.
_LEAST = 20

STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "note": "dim",
    "plain": "",
    "summary": "dim",
    "good": "bold green",
}

_WORDS = {"error": "ERROR", "warning": "WARN ", "note": "NOTE "}


def to_text(lines: list[Text], view: View) -> str:
    """The lines as they go to stdout, with colour codes if wanted."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=view.width,
        force_terminal=view.colours,
        color_system="standard" if view.colours else None,
        highlight=False,
    )
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    return stream.getvalue()


def wrapped(text: str, width: int, indent: str = "", later: str | None = None) -> list[str]:
    """Lines of at most ``width`` columns; a word that is longer stays whole.

    Beside a name that fills the screen there are twenty columns all the same.

    Lines after the first are indented by ``later``, if given, instead of ``indent``.
    """
    return textwrap.wrap(
        text,
        max(width, len(indent) + _LEAST),
        initial_indent=indent,
        subsequent_indent=indent if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def hanging(head: str, text: str, width: int, style: str) -> list[Text]:
    """``text`` beside ``head``, all further lines indented as far; the head has the style."""
    parts = wrapped(text, width - len(head)) or [""]
    heads = [head, *(" " * len(head) for _ in parts[1:])]
    return [Text.assemble((h, style), part) for h, part in zip(heads, parts, strict=True)]


def labelled(label: str, text: str, width: int, style: str = "bold") -> list[Text]:
    """A line of the header."""
    return hanging(f"{label:<{LABEL}}", text, width, style)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def titled(name: str, text: str, width: int) -> list[Text]:
    """The first line: the name of the checkpoint, and what it is."""
    parts = wrapped(f"{name}  {text}", width, later=" " * LABEL)
    first = Text.assemble((name, "bold"), parts[0].removeprefix(name))
    return [first, *map(Text, parts[1:])]


def finding_head(finding: Finding, places: str, width: int) -> list[Text]:
    """Severity, code, where, and the sentence that is read first; the detail below it."""
    head = f"{_WORDS[finding.severity]} {finding.code}  "
    lines = hanging(head, f"{places}: {finding.title}", width, STYLES[finding.severity])
    return [*lines, *(Text(part) for part in wrapped(finding.detail, width, "   "))]


def command(label: str, text: str) -> Text:
    """A command on one line, however long: it must survive copying."""
    return Text.assemble((f"   {label}", "dim"), text)
