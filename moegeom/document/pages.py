"""What pages do alike: headings of several lines become one."""

from __future__ import annotations

from moegeom.document.model import Table


def heads_of(table: Table) -> list[str]:
    """One heading for each column; what runs on over several stands in front of each of theirs."""
    lines: list[list[str]] = []
    for number, line in enumerate(table.heads):
        full = list(line)
        if number < len(table.heads) - 1:
            for place in range(1, len(full)):
                full[place] = full[place] or full[place - 1]
        lines.append(full)
    return [" ".join(part for part in column if part) for column in zip(*lines, strict=True)]
