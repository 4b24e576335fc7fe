"""``moegeom continuity``: does the output of the experts jump at a boundary, and if smoothed?"""

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

COMMAND = Command(Group.explore, 10, "moegeom continuity CKPT --tokens REC --plot jump.pdf")


@with_groups
def run(
    checkpoint: Checkpoint,
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Tokens = None,
    smooth: Annotated[
        str,
        typer.Option(
            "--smooth", help="The smoothed gate: extra=N more experts a token, or eps=X of score."
        ),
    ] = "extra=0.5",
    at: Annotated[
        int | None, typer.Option("--at", min=0, help="The token [default: the highest jump].")
    ] = None,
    radius: Annotated[
        float, typer.Option("--radius", help="Half of the line, in rms lengths of the input.")
    ] = 0.01,
    yes: Annotated[bool, typer.Option("--yes", help="Read more than 2 GB of experts.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write lines and spreads: FILE.parquet.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Does the output of the experts jump at a boundary, and what does smoothing make of it?"""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.continuity.document import document
    from moegeom.studies.continuity.study import ContinuityRequest, continuity

    request = request_of(
        ContinuityRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        smooth=smooth,
        at=at,
        radius=radius,
        yes=yes,
        out=out,
        overwrite=overwrite,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = continuity(request, watch)
    screen.show(document, found, plots=plots)
