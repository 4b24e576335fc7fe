"""``moegeom scan``: tokens through routers, into a results directory."""

from __future__ import annotations

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
from moegeom_cli.options import Checkpoint, OutOfScan, Tokens
from moegeom_cli.parts import show_part

COMMAND = Command(Group.measure, 3, "moegeom scan CKPT --tokens REC")


@with_groups
def run(
    checkpoint: Checkpoint,
    token_options: TokenOptions,
    model: ModelOptions,
    work: RunOptions,
    existing: OutOptions,
    share: ShareOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Tokens = None,
    out: OutOfScan = None,
    prior: Annotated[
        str | None,
        typer.Option("--prior", help="isotropic-rms: synthetic tokens; geometry only, labelled."),
    ] = None,
    per_token: Annotated[
        bool, typer.Option("--per-token", help="Also write tokens/, one row per token.")
    ] = False,
) -> None:
    """Measure every router on recorded tokens; without tokens, what weights alone tell."""
    from moegeom.document.results import results_document
    from moegeom.engine.parameters import request_of
    from moegeom.pipeline import ScanRequest, scan
    from moegeom.results.reader import open_results

    request = request_of(
        ScanRequest,
        checkpoint=checkpoint,
        out=out,
        tokens=tokens,
        prior=prior,
        per_token=per_token,
        **token_options.terms,
        **model.terms,
        **work.terms,
        **existing.terms,
        **share.terms,
    )
    with screen.watching("tokens" if tokens or prior else "routers") as watch:
        written = scan(request, watch)
    if share.part is not None:
        show_part(screen, written)
        return
    screen.show(results_document, open_results(written), plots=plots)
