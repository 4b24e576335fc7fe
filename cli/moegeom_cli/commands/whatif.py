"""``moegeom whatif``: its study, and a list of what-ifs."""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom.studies.whatif import STUDY
from moegeom_cli.command import Command
from moegeom_cli.groups import command_of
from moegeom_cli.listing import render_listing
from moegeom_cli.streams import Format


def _list(is_asked: bool) -> None:
    if is_asked:
        from moegeom.variants.what_if import describe_what_ifs

        typer.echo(render_listing(describe_what_ifs(), Format.table, "what-ifs"))
        raise typer.Exit


_List = Annotated[
    bool,
    typer.Option("--list", help="What-ifs and their parameters.", callback=_list, is_eager=True),
]

whatif = Command.of(STUDY, command_of(STUDY, list_what_ifs=_List))
