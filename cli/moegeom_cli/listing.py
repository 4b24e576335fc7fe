"""Rows as a plain table or as Markdown, all of them or those with a word."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from moegeom.core.errors import UsageError
from moegeom.core.registry import nearest_name
from moegeom.document.model import Document, Table
from moegeom.document.render import render
from moegeom_cli.streams import Format, folded, width

#: Columns that the last cell of a line needs; where they are not left, each cell gets a line.
_LEAST_ROOM = 24

#: What ``| less`` shows on a common screen.
_UNKNOWN_WIDTH = 120


#: What lists are filtered by.
Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="Only what has each of these words; 'margin_*' is a pattern of whole names.",
        metavar="WORD",
    ),
]


def matching(
    rows: Sequence[Mapping[str, object]], words: Sequence[str] | None, kind: str
) -> list[Mapping[str, object]]:
    """Rows in which every word occurs, whatever its case; UsageError where none is left.

    The first column holds the names that a wrong word is compared with.
    """
    terms = [word.lower() for word in words or ()]
    matches = [row for row in rows if all(_has(row, word) for word in terms)]
    if not matches:
        names = {str(next(iter(row.values()))) for row in rows}
        guess = nearest_name(" ".join(terms), names)
        raise UsageError(f"No {kind} with {' and '.join(words or ())}.{guess}", "Try another word.")
    return matches


def _has(row: Mapping[str, object], word: str) -> bool:
    """Is the word anywhere in the row, or, with a ``*`` or a ``?``, the pattern of a whole cell?"""
    cells = [str(cell).lower() for cell in row.values()]
    if "*" in word or "?" in word:
        return any(fnmatchcase(cell, word) for cell in cells)
    return word in " ".join(cells)


def render_briefly(rows: Sequence[Mapping[str, object]], indent: str = "") -> str:
    """One line for each row, without heads; what is too long for the screen ends in ``...``."""
    cells = [[str(cell) for cell in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        head = indent + "".join(
            f"{cell:<{w}}  " for cell, w in zip(line[:-1], widths, strict=False)
        )
        room = max(width(_UNKNOWN_WIDTH) - len(head), _LEAST_ROOM)
        lines.append((head + textwrap.shorten(line[-1], room, placeholder=" ...")).rstrip())
    return "\n".join(lines)


def render_listing(rows: Sequence[Mapping[str, object]], format: Format, kind: str) -> str:
    """All rows, which are ``kind``; the last column is wrapped to the width of the terminal.

    Where the others leave no room for it, each row becomes a paragraph.
    """
    heads = list(rows[0])
    cells = [[str(row[head]) for head in heads] for row in rows]
    if format is Format.json:
        return json.dumps(rows)
    if format is not Format.table:
        table = Table([heads], cells, left=range(len(heads)))
        page = Document(kind, f"all {len(rows)}", [[table]], lambda: {kind: rows})
        return render(page, format.value).rstrip("\n")
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads) - 1)]
    indent = sum(widths) + 2 * len(widths)
    room = width(_UNKNOWN_WIDTH) - indent
    if room < _LEAST_ROOM:
        return "\n".join(_paragraph(heads, line) for line in cells)
    lines = []
    for line in [heads, *cells]:
        head = "".join(f"{cell:<{w}}  " for cell, w in zip(line, widths, strict=False))
        parts = textwrap.wrap(line[-1], room, break_long_words=False) or [""]
        lines.append((head + parts[0]).rstrip())
        lines += [" " * indent + part for part in parts[1:]]
    return "\n".join(lines)


def _paragraph(heads: Sequence[str], cells: Sequence[str]) -> str:
    """The first cell, and below it a line for each other one that says something."""
    label = max(map(len, heads)) + 4
    lines = [
        folded(f"  {head:<{label - 2}}{cell}", width(_UNKNOWN_WIDTH), " " * label)
        for head, cell in zip(heads[1:], cells[1:], strict=True)
        if cell
    ]
    return "\n".join([cells[0], *lines])
