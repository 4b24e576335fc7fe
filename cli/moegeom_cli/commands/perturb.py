"""``moegeom perturb``: how far may an input drift before its experts change, and to which?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ModelOptions, ScreenOptions, TokenOptions, with_groups
from moegeom_cli.options import Checkpoint, Overwrite, Tokens
from moegeom_cli.streams import parse_numbers

COMMAND = Command(Group.explore, 7, "moegeom perturb CKPT --tokens REC")


@with_groups
def run(
    checkpoint: Checkpoint,
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    tokens: Tokens = None,
    noise: Annotated[
        str | None,
        typer.Option(
            "--noise",
            help="Noise on the inputs: share of their rms, or a second recording [default: 0.1].",
        ),
    ] = None,
    cov: Annotated[
        Path | None,
        typer.Option("--cov", help="Noise by a factor of its covariance, (D,) or (D, r): npz."),
    ] = None,
    drift: Annotated[
        bool,
        typer.Option("--drift", help="Drift by what all tokens of the second recording share."),
    ] = False,
    time: Annotated[float, typer.Option("--time", help="The last time, in units of noise.")] = 4.0,
    at: Annotated[
        str | None,
        typer.Option("--at", help="Numbers of tokens, such as 3,17 [default: a sample of 64]."),
    ] = None,
    orders: Annotated[
        str, typer.Option("--orders", help="Time near ties of so many experts more than one.")
    ] = "1,2",
    eps: Annotated[
        float, typer.Option("--eps", help="How near a tie is near, as a share of the rms.")
    ] = 0.01,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write curves, exits and time near ties: FILE.parquet."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """How far may an input drift before its experts change, and which expert takes over?"""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.perturb.document import document
    from moegeom.studies.perturb.study import PerturbRequest, perturb

    request = request_of(
        PerturbRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        overwrite=overwrite,
        noise=noise,
        cov=cov,
        drift=drift,
        time=time,
        at=parse_numbers("--at", at),
        orders=parse_numbers("--orders", orders),
        eps=eps,
        out=out,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = perturb(request, watch)
    screen.show(document, found)
