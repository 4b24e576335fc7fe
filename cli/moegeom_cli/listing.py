"""Rows as a plain table or as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from moegeom_cli.streams import Format, folded, width

#: Columns that the last cell of a line needs; where they are not left, each cell gets a line.
_LEAST_ROOM = 24

#: What ``| less`` shows on a common screen.
_UNKNOWN_WIDTH = 120


def render_listing(rows: Sequence[Mapping[str, object]], format: Format) -> str:
    """All rows; the last column is wrapped to the width of the terminal.

    Where the others leave no room for it, each row becomes a paragraph.
    """
    heads = list(rows[0])
    cells = [[str(row[head]) for head in heads] for row in rows]
    if format is Format.md:
        lines = [heads, ["---"] * len(heads), *cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
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
    said = [
        folded(f"  {head:<{label - 2}}{cell}", width(_UNKNOWN_WIDTH), " " * label)
        for head, cell in zip(heads[1:], cells[1:], strict=True)
        if cell
    ]
    return "\n".join([cells[0], *said])
