"""``moegeom arithmetics``: the arithmetics that a boundary report can emulate."""

from __future__ import annotations

import json

import typer

from moegeom_cli.options import PrintFormat
from moegeom_cli.streams import Format

NAME = "arithmetics"
NEEDS_ARGUMENTS = False


def run(format: PrintFormat = Format.table) -> None:
    """Presets for --arith: what each rounds, the engine and version it copies, its source."""
    from moegeom.variants.describe import describe_arithmetics
    from moegeom_cli.listing import render_listing

    rows = describe_arithmetics()
    typer.echo(json.dumps(rows) if format is Format.json else render_listing(rows, format))
