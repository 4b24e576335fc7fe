"""``moegeom attention``: gates, sinks and heads of attention layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ScreenOptions, with_groups
from moegeom_cli.options import Checkpoint, Overwrite

COMMAND = Command(Group.explore, 12, "moegeom attention CKPT --layers 0-3")


@with_groups
def run(
    checkpoint: Checkpoint,
    screen: ScreenOptions,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", help="What capture --keep attention wrote, of this checkpoint."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", "--layer", help="Layers, such as 0,3-7.")
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Ask the server of a URL for everything; keep nothing."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Read more than 2 GB of attention.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a row for each head: FILE.parquet.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Gates and sinks of attention: where they are, what they do on tokens, dead heads."""
    from moegeom.checkpoint.remote.options import RemoteOptions
    from moegeom.engine.parameters import request_of
    from moegeom.research.attention.document import document
    from moegeom.research.attention.study import AttentionRequest, attention

    request = request_of(
        AttentionRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        layers=layers,
        remote=RemoteOptions(cache_folder=None) if no_cache else None,
        yes=yes,
        out=out,
        overwrite=overwrite,
    )
    with screen.watching("layers") as watch:
        found = attention(request, watch)
    screen.show(document, found)
