"""``moegeom space``: what makes the loads uneven, and what do the data let the router use?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import (
    ModelOptions,
    ScreenOptions,
    TokenOptions,
    with_groups,
)
from moegeom_cli.options import Checkpoint, Overwrite, Seed, Tokens

COMMAND = Command(Group.explore, 2, "moegeom space CKPT --tokens REC")


@with_groups
def run(
    checkpoint: Checkpoint,
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    tokens: Tokens = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write the laws, FILE.parquet, or the biases of centring, FILE.npz or "
            "FILE.safetensors.",
        ),
    ] = None,
    seed: Seed = 0,
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
        seed=seed,
        overwrite=overwrite,
        out=out,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = space(request, watch)
    screen.show(document, found)
