"""``moegeom cells``: which sets of experts are cells of a slice, and where their facets are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ModelOptions, ScreenOptions, TokenOptions, with_groups
from moegeom_cli.options import CHECKPOINT, Overwrite, Tokens
from moegeom_cli.streams import parse_numbers

COMMAND = Command(Group.explore, 5, "moegeom cells CKPT --layer 5 --tokens REC --plot figure.png")


@with_groups
def run(
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    checkpoint: Annotated[
        str, typer.Argument(help=f"Checkpoint: {CHECKPOINT}; or --weights with --top-k.")
    ] = "",
    subspace: Annotated[
        str | None,
        typer.Option(
            "--subspace",
            help="full, pca:D, random:D, plane:A,B,C or circle:A,B (tokens), or an npz file with "
            "centre and basis. [default: full; with --plot and tokens pca:2]",
        ),
    ] = None,
    tokens: Tokens = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="A bare matrix instead: npz with weight and bias."),
    ] = None,
    radius: Annotated[
        float | None, typer.Option("--radius", help="Only within so far of the centre.")
    ] = None,
    expert_set: Annotated[
        str | None,
        typer.Option("--expert-set", help="Is this set a cell? Experts, such as 3,17,40."),
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Check every witness or proof again in integers.")
    ] = False,
    tie_broken: Annotated[
        bool, typer.Option("--tie-broken", help="Of equal experts the lower number wins.")
    ] = False,
    vertices: Annotated[
        int, typer.Option("--vertices", min=1, help="Vertices to walk at most.")
    ] = 10_000_000,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for cells.parquet and facets.parquet.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Picture: .svg, .pdf or .png.")
    ] = None,
    view: Annotated[
        str, typer.Option("--view", help="cells, expert:E or tropical (the surface of e_k).")
    ] = "cells",
    caption: Annotated[
        bool, typer.Option("--caption", help="Write the caption below the picture.")
    ] = False,
    overwrite: Overwrite = False,
    num_workers: Annotated[
        int | None, typer.Option("--threads", min=1, help="Worker threads [default: all].")
    ] = None,
) -> None:
    """List the routing cells and facets of a slice, prove or refute one set, or draw them."""
    from moegeom.core.finding import EXIT_INCONCLUSIVE
    from moegeom.engine.parameters import request_of
    from moegeom.routing_cells.document import document
    from moegeom.routing_cells.study.request import CellsRequest, parse_view
    from moegeom.routing_cells.study.study import cells

    kind, expert = parse_view(view)
    request = request_of(
        CellsRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        overwrite=overwrite,
        weights=weights,
        subspace=subspace,
        radius=radius,
        expert_set=None if expert_set is None else parse_numbers("--expert-set", expert_set),
        certify=certify,
        tie_broken=tie_broken,
        vertices=vertices,
        num_workers=num_workers,
        out=out,
        plot=plot,
        view=kind,
        expert=expert,
        caption=caption,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching("vertices") as watch:
        enumerations = cells(request, watch)
    screen.show(document, enumerations)
    if any(router.outcome == "unfinished" for router in enumerations.routers):
        raise typer.Exit(EXIT_INCONCLUSIVE)
