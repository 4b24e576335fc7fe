"""The part of docs/benchmarks.md that is made of the results of the field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.field.members import MEMBERS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/field/members.json"
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- field: begin -->", "<!-- field: end -->"

Row = Mapping[str, Any]

_HEAD = (
    "**The field** (`benchmarks/field/`). Checkpoints with names, shapes and files of real ones, "
    "made of holes but for routers, norms and the experts of one layer; 100,000 tokens recorded at "
    "one router, 20,000 where it is wider than 2,880, the first of them 1,000 times as long as "
    "others ('outlier'); and 4,096 tokens at a router whose rows all point one way, two of them "
    "equal ('collapsed'). Every command is typed on each, with one thread for products. A cell: "
    "seconds of the processor, GB at the peak of memory, and in brackets the largest of three "
    "ratios: seconds, memory and bytes read over those that "
    "`every_command_answers_within_its_budget.py` allows. Bold: above 1; 'more than': ended there "
    "(`--most`); empty: not run. Taken on {core}, {cores} "
    "cores that others used too, {date}, commit {commit}.\n"
)

_PLANTED = """\
What screens say of the layer whose rows all point one way, by the first line that names it, of \
{member}:
"""


def table(document: Mapping[str, Any]) -> str:
    """Everything between the marks."""
    rows: Sequence[Row] = document["rows"]
    members = [name for name in MEMBERS if any(row["member"] == name for row in rows)]
    cells = {(row["line"], row["recording"], row["member"]): row for row in rows}
    lines = sorted({(row["line"], row["recording"]) for row in rows})
    parts = [
        _HEAD.format(**document),
        f"| line | layer | {' | '.join(members)} |",
        f"|---|---|{'---|' * len(members)}",
    ]
    for line, recording in lines:
        of_line = [cells.get((line, recording, member)) for member in members]
        reasons = {row["reason"] for row in of_line if row and "reason" in row}
        if reasons:
            parts.append(f"| {line} | | {'; '.join(sorted(reasons))} |{' |' * (len(members) - 1)}")
        else:
            parts.append(f"| {line} | {recording} | {' | '.join(map(_cell, of_line))} |")
    parts += ["", *_of_planted(cells, lines, members)]
    return "\n".join(parts)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    used = f"{row['seconds']:.0f} s, {row['memory_bytes'] / 1e9:.1f} GB"
    if row["ending"] == "out of time":
        return f"**more than {used}**"
    if row["ending"] != "answered":
        return f"**{row['ending']}**"
    most = max(row["over"].values())
    text = f"{used} ({most:.2f})"
    return f"**{text}**" if most > 1 else text


def _of_planted(
    cells: Mapping[tuple[str, str, str], Row],
    lines: Sequence[tuple[str, str]],
    members: Sequence[str],
) -> Iterator[str]:
    """A line for each that looked at the layer, or at all layers."""
    if not members:
        return
    yield _PLANTED.format(member=members[0])
    yield "| line | first line that names it |"
    yield "|---|---|"
    for line, recording in lines:
        row = cells.get((line, recording, members[0]))
        if row and recording != "outlier" and row.get("ending") == "answered":
            text = (row.get("planted") or "none").replace("|", "/")
            yield f"| {line} | {text} |"


def refresh() -> None:
    """Writes the table between the marks of the page."""
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    document = json.loads(RESULTS.read_text("utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n{table(document)}\n{END}{after}", "utf-8")
