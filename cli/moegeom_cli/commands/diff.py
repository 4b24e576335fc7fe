"""``moegeom diff``: what happened to the routers between two checkpoints."""

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
    TokenOptions,
    with_groups,
)
from moegeom_cli.options import CHECKPOINT

COMMAND = Command(Group.compare, 1, "moegeom diff A B")


@with_groups
def run(
    a: Annotated[
        str,
        typer.Argument(help=f"Before: results of a scan, or a checkpoint: {CHECKPOINT}."),
    ],
    b: Annotated[str, typer.Argument(help="After: the same kinds.")],
    token_options: TokenOptions,
    model: ModelOptions,
    work: RunOptions,
    existing: OutOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="Read a sample of expert weights: did experts move along?"),
    ] = False,
    tokens: Annotated[
        list[str] | None,
        typer.Option("--tokens", help="Recording; twice, for A and B, or once for both."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Keep the results of the scans here: a.moegeom, b.moegeom."),
    ] = None,
) -> None:
    """Say what happened to each router from A to B; on tokens, which figures changed."""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.diff.document import document
    from moegeom.studies.diff.study import DifferenceRequest, difference

    request = request_of(
        DifferenceRequest,
        a=a,
        b=b,
        experts=experts,
        tokens=tokens,
        out=out,
        **token_options.terms,
        **model.terms,
        **work.terms,
        **existing.terms,
    )
    with screen.watching() as watch:
        found = difference(request, watch, screen.note)
    screen.show(document, found, plots=plots)
