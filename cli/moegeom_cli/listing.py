"""Rows as a plain table or as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from moegeom_cli.streams import Format, width


def render_listing(rows: Sequence[Mapping[str, object]], format: Format) -> str:
    """All rows; the last column is wrapped to the width of the terminal."""
    heads = list(rows[0])
    cells = [[str(row[head]) for head in heads] for row in rows]
    if format is Format.md:
        lines = [heads, ["---"] * len(heads), *cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads) - 1)]
    indent = sum(widths) + 2 * len(widths)
    room = max(width() - indent, 24)
    lines = []
    for line in [heads, *cells]:
        head = "".join(f"{cell:<{w}}  " for cell, w in zip(line, widths, strict=False))
        parts = textwrap.wrap(line[-1], room, break_long_words=False) or [""]
        lines.append((head + parts[0]).rstrip())
        lines += [" " * indent + part for part in parts[1:]]
    return "\n".join(lines)
