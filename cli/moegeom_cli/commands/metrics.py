"""``moegeom metrics``: what a scan measures."""

from __future__ import annotations

import json

import typer

from moegeom_cli.options import PrintFormat
from moegeom_cli.streams import Format

NAME = "metrics"
NEEDS_ARGUMENTS = False


def run(
    format: PrintFormat = Format.table,
) -> None:
    """Every column with its table, unit and meaning."""
    from moegeom.metrics import METRICS
    from moegeom_cli.listing import render_listing

    rows = [
        {
            "column": column.name,
            "metric": metric.name,
            "table": table,
            "unit": column.unit,
            "meaning": column.text,
        }
        for metric in METRICS.all()
        for table, columns in metric.columns.items()
        for column in columns
    ]
    typer.echo(json.dumps(rows) if format is Format.json else render_listing(rows, format))
