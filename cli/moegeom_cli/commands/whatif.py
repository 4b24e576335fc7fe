"""``moegeom whatif``: what would another router choose on the same tokens?"""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom.studies.whatif import STUDY
from moegeom.studies.whatif.record import WhatIfRequest
from moegeom_cli.command import Command, Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, with_groups
from moegeom_cli.listing import render_listing
from moegeom_cli.study_command import show_study

COMMAND = Command(Group.explore, STUDY.place, STUDY.example)


def _list(is_asked: bool) -> None:
    if is_asked:
        from moegeom.variants.what_if import describe_what_ifs
        from moegeom_cli.streams import Format

        typer.echo(render_listing(describe_what_ifs(), Format.table, "what-ifs"))
        raise typer.Exit


@with_groups
def run(
    request: WhatIfRequest,
    screen: ScreenOptions,
    plots: PlotOptions,
    list_what_ifs: Annotated[
        bool,
        typer.Option(
            "--list", help="What-ifs and their parameters.", callback=_list, is_eager=True
        ),
    ] = False,
) -> int:
    """What would another router choose on the same tokens: loads, sets, weight, compute?"""
    return show_study(STUDY, request, screen, plots)
