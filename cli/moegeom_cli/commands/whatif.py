"""``moegeom whatif``: what would another router choose on the same tokens?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import (
    ModelOptions,
    OutOptions,
    PlotOptions,
    RunOptions,
    ScreenOptions,
    ShareOptions,
    TokenOptions,
    with_groups,
)
from moegeom_cli.listing import render_listing
from moegeom_cli.options import OutOfScan, Tokens
from moegeom_cli.parts import show_part

COMMAND = Command(Group.explore, 4, "moegeom whatif CKPT --tokens REC --router smooth:extra=0.5")


def _listed(value: bool) -> None:
    if value:
        from moegeom.variants.what_if import describe_what_ifs
        from moegeom_cli.streams import Format

        typer.echo(render_listing(describe_what_ifs(), Format.table, "what-ifs"))
        raise typer.Exit


@with_groups
def run(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint, or results of an earlier whatif.")],
    token_options: TokenOptions,
    model: ModelOptions,
    work: RunOptions,
    existing: OutOptions,
    share: ShareOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Tokens = None,
    what_ifs: Annotated[
        list[str] | None,
        typer.Option("--router", metavar="SPEC", help="NAME[:PARAMETER=VALUE,...] (repeatable)."),
    ] = None,
    grid: Annotated[
        Path | None,
        typer.Option("--grid", help="A sweep: a TOML file with lists of values for each NAME."),
    ] = None,
    what_if_batch: Annotated[
        int,
        typer.Option("--batch", help="Tokens tried together, where other tokens matter."),
    ] = 1024,
    arithmetics: Annotated[
        list[str] | None,
        typer.Option("--arith", help="An arithmetic: how much weight it moves with each what-if."),
    ] = None,
    out: OutOfScan = None,
    list_what_ifs: Annotated[
        bool,
        typer.Option(
            "--list", help="What-ifs and their parameters.", callback=_listed, is_eager=True
        ),
    ] = False,
) -> None:
    """What would another router choose on the same tokens: loads, sets, weight, compute?"""
    from moegeom.engine.parameters import request_of
    from moegeom.results.reader import is_results, open_results
    from moegeom.studies.whatif.document import document
    from moegeom.studies.whatif.record import WhatIfRequest, what_if_report_of
    from moegeom.studies.whatif.study import measure_what_ifs, refuse_beside_results

    if is_results(Path(checkpoint)):
        refuse_beside_results(checkpoint, tokens, what_ifs, grid)
        written = Path(checkpoint)
    else:
        request = request_of(
            WhatIfRequest,
            checkpoint=checkpoint,
            out=out,
            tokens=tokens,
            what_ifs=what_ifs,
            what_if_batch=what_if_batch,
            grid=grid,
            arithmetics=arithmetics,
            **token_options.terms,
            **model.terms,
            **work.terms,
            **existing.terms,
            **share.terms,
        )
        with screen.watching() as watch:
            written = measure_what_ifs(request, watch)
    if share.part is not None:
        show_part(screen, written)
        return
    screen.show(document, what_if_report_of(open_results(written)), plots=plots)
