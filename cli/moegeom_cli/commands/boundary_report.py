"""``moegeom boundary-report``: which tokens are about to change experts, and under what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import (
    ModelOptions,
    OutOptions,
    PlotOptions,
    RunBOptions,
    RunOptions,
    ScreenOptions,
    ShareOptions,
    TokenOptions,
    with_groups,
)
from moegeom_cli.options import OutOfScan, Tokens
from moegeom_cli.parts import show_part

COMMAND = Command(Group.explore, 1, "moegeom boundary-report CKPT --tokens REC --arith bf16")


@with_groups
def run(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint, or results of an earlier boundary-report.")
    ],
    other: RunBOptions,
    token_options: TokenOptions,
    model: ModelOptions,
    work: RunOptions,
    existing: OutOptions,
    share: ShareOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Tokens = None,
    arithmetics: Annotated[
        list[str] | None,
        typer.Option("--arith", help="An arithmetic (repeatable; `moegeom arithmetics`)."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", help="The arithmetic to compare with [default: as stored]."),
    ] = None,
    checkpoint_b: Annotated[
        str | None,
        typer.Option("--checkpoint-b", help="A second checkpoint: its routers on the same inputs."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            "--noise", help="Noise on the inputs: share of their rms, or a second recording."
        ),
    ] = None,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="Read the experts: how far a flip moves their output."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Read more than 2 GB of experts.")] = False,
    out: OutOfScan = None,
) -> None:
    """Which tokens are about to change experts, under which arithmetic, and how much moves."""
    from moegeom.engine.parameters import request_of
    from moegeom.results.reader import is_results, open_results
    from moegeom.studies.boundary.document import document
    from moegeom.studies.boundary.record import boundary_report_of
    from moegeom.studies.boundary.study import BoundaryRequest, measure_boundary

    if is_results(Path(checkpoint)):
        written = Path(checkpoint)
    else:
        request = request_of(
            BoundaryRequest,
            checkpoint=checkpoint,
            out=out,
            tokens=tokens,
            arithmetics=arithmetics,
            reference=reference,
            noise=noise,
            experts=experts,
            yes=yes,
            checkpoint_b=checkpoint_b,
            **other.terms,
            **token_options.terms,
            **model.terms,
            **work.terms,
            **existing.terms,
            **share.terms,
        )
        with screen.watching() as watch:
            written = measure_boundary(request, watch)
    if share.part is not None:
        show_part(screen, written)
        return
    screen.show(document, boundary_report_of(open_results(written)), plots=plots)
