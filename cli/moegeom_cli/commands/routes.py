"""``moegeom routes``: traces of choices, before any checkpoint is at hand."""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ScreenOptions, with_groups

COMMAND = Command(Group.judge, 3, "moegeom routes replies.jsonl --validate")


@with_groups
def run(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Traces of engines or trainers: files, or folders and patterns in quotes, whose "
            "files are one trace."
        ),
    ],
    screen: ScreenOptions,
    dialect: Annotated[
        str | None,
        typer.Option("--dialect", help="Whose traces they are, where files do not show it."),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Exit code 1 for a trace with defects, 4 for one that says too little to judge.",
        ),
    ] = False,
) -> int:
    """What traces of choices hold, and what is wrong with them that shows without a checkpoint."""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.routes.document import document
    from moegeom.studies.routes.record import RoutesRequest
    from moegeom.studies.routes.study import routes

    with screen.watching() as watch:
        found = routes(request_of(RoutesRequest, files=files, dialect=dialect), watch)
    screen.show(document, found)
    return found.exit_code if validate else 0
