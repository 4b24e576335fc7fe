"""``moegeom doctor``: what this installation can do."""

from __future__ import annotations

import typer

from moegeom_cli.command import Group
from moegeom_cli.groups import PrintFormat, command
from moegeom_cli.streams import Format


@command(Group.more, 2, "moegeom doctor")
def doctor(format: PrintFormat = Format.table) -> None:
    """What is installed: versions, BLAS, extras."""
    from moegeom.core.extras import install_command
    from moegeom.engine.diagnosis import diagnose
    from moegeom_cli.listing import render_listing

    rows = diagnose()
    typer.echo(render_listing(rows, format, "doctor"))
    absent = {row["meaning"] for row in rows if row["found"] == "absent"}
    if format is Format.table and "core" in absent:
        typer.echo(f"\nTo have the whole core: {install_command()}")
    if format is Format.table and absent - {"core"}:
        typer.echo(f"\nTo add an extra: {install_command('EXTRA')}")
