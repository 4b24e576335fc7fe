"""``moegeom list metrics``: what a scan measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.listing import Words, matching, render_briefly, render_listing
from moegeom_cli.options import PrintFormat
from moegeom_cli.streams import Format, folded, width

COMMAND = Command(Group.list, 3, "moegeom list metrics margin")


def run(words: Words = None, format: PrintFormat = Format.table) -> None:
    """What a scan measures: every column by topic, or in full those with a word."""
    from moegeom.metrics import METRICS, read_columns_of

    rows = matching(
        [
            {
                "column": column.name,
                "metric": metric.name,
                "table": table,
                "unit": column.unit,
                "meaning": column.text,
            }
            for metric in METRICS.all()
            for table in metric.columns
            for column in read_columns_of(metric, table)
        ],
        words,
        "column",
    )
    if format is not Format.table or words:
        typer.echo(render_listing(rows, format, "metrics"))
    else:
        typer.echo("\n\n".join(_topic(METRICS[name].text, rows, name) for name in METRICS.names()))
        typer.echo("\nmoegeom list metrics WORD prints the columns with a word in full.")


def _topic(text: str, rows: Sequence[Mapping[str, object]], name: str) -> str:
    """Name and text of a metric, and a line for each of its columns, whichever tables have it."""
    columns = {row["column"]: row for row in reversed(rows) if row["metric"] == name}
    lines = [{key: row[key] for key in ("column", "unit", "meaning")} for row in columns.values()]
    head = folded(f"{name}: {text}", width(120), " " * 4)
    return f"{head}\n{render_briefly(lines[::-1], '  ')}"
