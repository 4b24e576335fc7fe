"""``moegeom list arithmetics``: the arithmetics that a boundary report can emulate."""

from __future__ import annotations

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.listing import Words, matching, render_listing
from moegeom_cli.options import PrintFormat
from moegeom_cli.streams import Format

COMMAND = Command(Group.list, 5, "moegeom list arithmetics bf16")


def run(words: Words = None, format: PrintFormat = Format.table) -> None:
    """Presets for --arith: what each rounds, the engine and version it copies, its source."""
    from moegeom.variants.arithmetic import describe_arithmetics

    rows = matching(describe_arithmetics(), words, "arithmetic")
    typer.echo(render_listing(rows, format, "arithmetics"))
