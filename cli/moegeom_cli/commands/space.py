"""``moegeom space``: what makes the loads uneven, and what do the data let the router use?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import (
    ModelOptions,
    PlotOptions,
    ScreenOptions,
    TokenOptions,
    with_groups,
)
from moegeom_cli.options import Checkpoint, Overwrite, Tokens

COMMAND = Command(Group.explore, 2, "moegeom space CKPT --tokens REC")


@with_groups
def run(
    checkpoint: Checkpoint,
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Tokens = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write the laws, FILE.parquet, or the biases of centring, FILE.npz or "
            "FILE.safetensors.",
        ),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            help="Write FILE.parquet: shares near ties of two, three and four experts at every "
            "width, of tokens, laws and balls. Takes about 20 s a layer.",
        ),
    ] = None,
    radius: Annotated[
        float | None,
        typer.Option("--radius", help="Of the balls, in place of the rms length of the inputs."),
    ] = None,
    experts: Annotated[
        bool, typer.Option("--experts", help="Read the experts: their rank where tokens are.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Read more than 2 GB of experts.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """What makes the loads uneven: rows, mean input, covariance, or how tokens cluster?"""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.space.document import document
    from moegeom.studies.space.study import SpaceRequest, space

    request = request_of(
        SpaceRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        overwrite=overwrite,
        out=out,
        measure=measure,
        radius=radius,
        experts=experts,
        yes=yes,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = space(request, watch)
    screen.show(document, found, plots=plots)
