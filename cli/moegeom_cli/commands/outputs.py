"""``moegeom outputs``: what do experts give on recorded tokens?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ModelOptions, PlotOptions, ScreenOptions, TokenOptions, with_groups
from moegeom_cli.options import Checkpoint, Overwrite, Tokens

COMMAND = Command(Group.explore, 9, "moegeom outputs CKPT --tokens REC --layers 5")


@with_groups
def run(
    checkpoint: Checkpoint,
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Tokens = None,
    sample: Annotated[
        int, typer.Option("--sample", min=2, help="Tokens that experts are computed on.")
    ] = 512,
    every_expert: Annotated[
        bool, typer.Option("--every-expert", help="Every expert on every token, chosen or not.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Read more than 2 GB of experts.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A recording with these outputs, or FILE.parquet: experts."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """What do experts give on recorded tokens: how long, how constant, how alike?"""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.outputs.document import document
    from moegeom.studies.outputs.study import OutputsRequest, outputs

    request = request_of(
        OutputsRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        sample=sample,
        every_expert=every_expert,
        yes=yes,
        out=out,
        overwrite=overwrite,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = outputs(request, watch)
    screen.show(document, found, plots=plots)
