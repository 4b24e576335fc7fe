"""Two results beside each other: findings of one alone, figures of each layer, and their curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.core.text import figure_text, half_width, number_of
from moegeom.document.chart import Axis, Chart, Panel, Polyline
from moegeom.document.excerpts import in_part, worst_excerpt
from moegeom.document.header import tokens_line
from moegeom.document.model import Block, Document, Fact, Gallery, Headline, Look, Note, Table, View
from moegeom.document.place import place
from moegeom.document.results import LOOKS, LayerColumn, layer_columns, results_record
from moegeom.document.summary import Summary, summarise
from moegeom.results.reader import Results

Row = Mapping[str, Any]


def beside_document(first: Results, second: Results, view: View) -> Document:
    """What ``moegeom report A B`` says: it measures and judges nothing anew."""
    pair = (first, second)
    a, b = (summarise(results) for results in pair)
    rows = [{row["router"]: row for row in one.layers} for one in (a, b)]
    routers = [router for router in rows[0] if router in rows[1]]
    others = {*layer_columns(b)}
    columns = [column for column in layer_columns(a) if column in others]
    pairs = [(rows[0][router], rows[1][router]) for router in routers]
    names = [place(router, routers) for router in routers]
    alone = [len(one) - len(routers) for one in rows]
    apart = _apart(a, b)
    return Document(
        "report",
        f"{pair[0].name} and {pair[1].name}",
        [
            _result(apart),
            [
                Fact(
                    "A", f"{pair[0].name}: {a.run['checkpoint']['name']}, tokens {tokens_line(a)}"
                ),
                Fact(
                    "B", f"{pair[1].name}: {b.run['checkpoint']['name']}, tokens {tokens_line(b)}"
                ),
            ],
            [in_part([*_findings(apart)], "line", view.detail, least=2)],
            [
                worst_excerpt(
                    [*zip(names, pairs, strict=True)],
                    lambda line: max((_change(c, *line[1]) for c in columns), default=0.0),
                    view,
                    lambda lines: _table(columns, lines),
                )
            ],
            [Gallery(lambda: [*_figures(columns, names, pairs)])],
            [
                Note(f"{number_of(number, 'layer')} of {side} alone: not compared.")
                for side, number in zip("AB", alone, strict=True)
                if number
            ],
        ],
        lambda: {"a": results_record(pair[0]), "b": results_record(pair[1])},
    )


#: Code and router of a finding; what is about the whole checkpoint has none.
Findings = set[tuple[str, str]]


def _apart(a: Summary, b: Summary) -> dict[str, tuple[Summary, Findings]]:
    """Findings of B alone, of A alone and of both, with the side that says them."""
    of_a, of_b = (
        {(f.code, router) for f in one.findings for router in f.routers or ("",)} for one in (a, b)
    )
    return {"B alone": (b, of_b - of_a), "A alone": (a, of_a - of_b), "both": (b, of_a & of_b)}


def _result(apart: Mapping[str, tuple[Summary, Findings]]) -> list[Block]:
    counts = {f"in {where}": len(apart[where][1]) for where in ("A alone", "B alone", "both")}
    text = ", ".join(f"{count} {where}" for where, count in counts.items())
    looks: dict[str, Look] = {"in B alone": "warning"} if counts["in B alone"] else {}
    numbers: list[tuple[str, str, Look]] = [
        (str(count), f"findings {where}, by check and layer", looks.get(where, "plain"))
        for where, count in counts.items()
    ]
    fact = Fact("RESULT", f"findings by check and layer: {text}. Not tested for chance.")
    return [fact, Headline(numbers)]


def _findings(apart: Mapping[str, tuple[Summary, Findings]]) -> Iterator[Fact]:
    """A line for each finding and side; what both have once."""
    for label, (summary, keys) in apart.items():
        for finding in summary.findings:
            routers = [r for r in finding.routers or ("",) if (finding.code, r) in keys]
            if routers:
                where = summary.places(routers) if any(routers) else "checkpoint"
                yield Fact(
                    label, f"{finding.code} {where}: {finding.title}", LOOKS[finding.severity]
                )
                label = ""


#: Columns that stay on a narrow screen.
_LEAST = 2


def _heading(column: LayerColumn) -> str:
    return " ".join(part for part in column.heading if not part.startswith("+-"))


def _change(column: LayerColumn, a: Row, b: Row) -> float:
    """By how much of the larger value a figure differs; 1 where one side has none."""
    before, after = column.value(a), column.value(b)
    if before is None or after is None:
        return float(before is not after)
    return abs(after - before) / max(abs(before), abs(after), 1e-300)


def _table(columns: Sequence[LayerColumn], lines: Sequence[tuple[str, tuple[Row, Row]]]) -> Table:
    heads = [part for column in columns for part in (_heading(column), "")]
    rows = [
        [name, *(_cell(column, side) for column in columns for side in pair)]
        for name, pair in lines
    ]
    drops = [0, *(max(0, place - _LEAST) for place in range(len(columns)) for _ in "AB")]
    return Table([["", *heads], ["layer", *["A", "B"] * len(columns)]], rows, drops=drops)


def _cell(column: LayerColumn, row: Row) -> str:
    value = column.value(row)
    return "-" if value is None else column.text(value)


def _figures(
    columns: Sequence[LayerColumn], names: Sequence[str], pairs: Sequence[tuple[Row, Row]]
) -> Iterator[Chart]:
    """A panel for each figure that differs: A and B by layer, with their 95 % intervals."""
    panels, behind = [], []
    for column in columns:
        if all(column.value(a) == column.value(b) for a, b in pairs):
            continue
        label, marks = _heading(column), []
        for number, (side, role) in enumerate((("A", "tokens"), ("B", "other"))):
            values = [column.value(pair[number]) for pair in pairs]
            widths = [_width(column, pair[number]) for pair in pairs]
            ends = [
                [
                    None if v is None or w is None else v + sign * w
                    for v, w in zip(values, widths, strict=True)
                ]
                for sign in (-1, 1)
            ]
            marks.append(Polyline(side, role, [*range(len(names))], values, *ends))
            behind.append((f"{side} {label}", values))
        panels.append(Panel(label, Axis("layer", names=names), Axis(""), marks, is_wide=False))
    if not panels:
        return
    column = max(columns, key=lambda column: max(_change(column, *pair) for pair in pairs))
    name, (a, b) = max(zip(names, pairs, strict=True), key=lambda line: _change(column, *line[1]))
    before, after = (
        "nothing" if (value := column.value(row)) is None else figure_text(value) for row in (a, b)
    )
    yield Chart(
        "beside",
        "A and B by layer",
        "Figures that differ, of each layer in A and in B, with 95 % intervals where there are "
        "blocks to have them of.",
        "Whether a difference is more than chance: on other tokens both would differ.",
        f"{_heading(column)} differs most: {before} in A, {after} in B, layer {name}.",
        panels,
        [("layer", names), *behind],
    )


def _width(column: LayerColumn, row: Row) -> float | None:
    error = column.error(row)
    return None if error is None else half_width(error, row.get("num_blocks"))
