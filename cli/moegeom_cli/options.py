"""Options that several commands have, each with one spelling and one help text."""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom_cli.streams import Format

Layers = Annotated[str | None, typer.Option("--layers", help="Layers, such as 0,3-7.")]
RouterMap = Annotated[
    list[str] | None,
    typer.Option("--map", help="KEY=ROUTER: key in a foreign file, router it belongs to."),
]
StaleInputs = Annotated[
    bool, typer.Option("--stale-inputs", help="Accept a recording of another checkpoint.")
]
Unverified = Annotated[
    bool, typer.Option("--unverified", help="Accept a recording that fails its tests.")
]
AllLayers = Annotated[bool, typer.Option("--all-layers", help="A line for every layer.")]
ExcludeFirst = Annotated[
    int,
    typer.Option(
        "--exclude-first", min=0, help="Leave out the first N tokens of each document (sinks)."
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard unfinished results instead of going on.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Worker threads [default: all].")
]
PrintFormat = Annotated[Format, typer.Option("--format", help="How to print.")]
