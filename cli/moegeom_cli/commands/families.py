"""``moegeom families``: the model families that are known."""

from __future__ import annotations

import json

import typer

from moegeom_cli.options import PrintFormat
from moegeom_cli.streams import Format

NAME = "families"
NEEDS_ARGUMENTS = False


def run(
    format: PrintFormat = Format.table,
) -> None:
    """Known families: model types, rule, and the source they were checked against."""
    from moegeom.router.describe import describe_families
    from moegeom_cli.listing import render_listing

    rows = describe_families()
    typer.echo(json.dumps(rows) if format is Format.json else render_listing(rows, format))
