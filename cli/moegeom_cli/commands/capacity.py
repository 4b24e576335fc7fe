"""``moegeom capacity``: what a router of this size could do at most."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ModelOptions, PlotOptions, ScreenOptions, TokenOptions, with_groups
from moegeom_cli.options import CHECKPOINT, Overwrite, Tokens
from moegeom_cli.streams import parse_numbers

COMMAND = Command(Group.explore, 6, "moegeom capacity --from CKPT --data-dim 2,5,10")


@with_groups
def run(
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    checkpoint: Annotated[
        str, typer.Option("--from", help=f"Sizes of a checkpoint: {CHECKPOINT}.")
    ] = "",
    experts: Annotated[int | None, typer.Option("--experts", min=1, help="Routed experts.")] = None,
    width: Annotated[
        int | None, typer.Option("--width", min=1, help="Neurons of one expert.")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option("--hidden", min=1, help="Numbers of a router input.")
    ] = None,
    shared: Annotated[
        int, typer.Option("--shared", min=0, help="Experts that run for every token.")
    ] = 0,
    gated: Annotated[
        bool, typer.Option("--gated", help="Experts have a gate (SwiGLU): three matrices.")
    ] = False,
    tokens: Tokens = None,
    data_dims: Annotated[
        str | None,
        typer.Option(
            "--data-dim",
            help="Dimensions of the data, such as 1,2,5 [default: 1,2,5,10,20,50; of --tokens "
            "theirs].",
        ),
    ] = None,
    splits: Annotated[
        str | None,
        typer.Option("--split", help="Cut each expert into so many [default: 1,2,4,8]."),
    ] = None,
    router_dim: Annotated[
        int,
        typer.Option("--router-dim", min=1, help="Length of vectors that a projection gives."),
    ] = 128,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every count: FILE.parquet.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """What could a router of this size tell apart at most, and which published counts cannot be?"""
    from moegeom.engine.parameters import request_of
    from moegeom.research.capacity.document import document
    from moegeom.research.capacity.request import CapacityRequest
    from moegeom.research.capacity.study import capacity

    request = request_of(
        CapacityRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        overwrite=overwrite,
        experts=experts,
        width=width,
        hidden=hidden,
        shared=shared,
        gated=gated,
        data_dims=parse_numbers("--data-dim", data_dims),
        splits=parse_numbers("--split", splits),
        router_dim=router_dim,
        out=out,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = capacity(request, watch)
    screen.show(document, found, plots=plots)
