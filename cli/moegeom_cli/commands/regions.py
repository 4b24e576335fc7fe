"""``moegeom regions``: between two tokens, do experts change, or their neurons?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ModelOptions, ScreenOptions, TokenOptions, with_groups
from moegeom_cli.options import Checkpoint, Overwrite, Tokens

COMMAND = Command(Group.explore, 8, "moegeom regions CKPT --tokens REC --layers 5")


@with_groups
def run(
    checkpoint: Checkpoint,
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    tokens: Tokens = None,
    segments: Annotated[
        int, typer.Option("--segments", min=2, help="Straight ways of each kind.")
    ] = 1000,
    subspace: Annotated[
        str,
        typer.Option("--subspace", help="The plane: pca:2, random:2, plane:A,B,C or an npz file."),
    ] = "pca:2",
    against: Annotated[
        str | None,
        typer.Option("--against", help="Count the same in this checkpoint too: initialisation."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Read more than 2 GB of experts.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every count: FILE.parquet.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Between two tokens, how often do experts change, and how often their neurons?"""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.regions.document import document
    from moegeom.studies.regions.study import RegionsRequest, regions

    request = request_of(
        RegionsRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        segments=segments,
        subspace=subspace,
        against=against,
        yes=yes,
        out=out,
        overwrite=overwrite,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = regions(request, watch)
    screen.show(document, found)
