"""``moegeom routes``: traces of choices, before any checkpoint is at hand."""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom.studies.routes.record import RoutesRequest
from moegeom_cli.command import Group
from moegeom_cli.groups import ScreenOptions, command


@command(Group.ship, 3, "moegeom routes replies.jsonl --validate")
def routes(
    request: RoutesRequest,
    screen: ScreenOptions,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Exit code 1 for a trace with defects, 4 for one that says too little to judge.",
        ),
    ] = False,
) -> int:
    """Judge traces of choices, without a checkpoint."""
    from moegeom.studies.routes.document import document
    from moegeom.studies.routes.study import routes

    with screen.watching() as watch:
        report = routes(request, watch)
    screen.show(document, report)
    return report.exit_code if validate else 0
