"""``moegeom routers``: which routers a checkpoint has; measures nothing."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moegeom_cli.family_options import (
    FamilyFile,
    LogitBias,
    Renormalise,
    RouterPattern,
    Score,
    SelectionBias,
    TopK,
    asked_family,
)
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format

NAME = "routers"
NEEDS_ARGUMENTS = True


def run(
    checkpoint: Annotated[str, typer.Argument(help="Directory, index json or safetensors file.")],
    layers: Annotated[str | None, typer.Option("--layers", help="Layers, such as 0,3-7.")] = None,
    family: FamilyFile = None,
    router_pattern: RouterPattern = None,
    top_k: TopK = None,
    score: Score = None,
    renormalise: Renormalise = False,
    selection_bias: SelectionBias = None,
    logit_bias: LogitBias = None,
    format: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
) -> None:
    """One line per router: its rule, shape and storage; what was skipped and why."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.pipeline import recalled
    from moegeom.report.header import size
    from moegeom.router.describe import describe_router, describe_routers
    from moegeom.router.load import load_routers
    from moegeom_cli.listing import render_listing

    asked = asked_family(
        family, router_pattern, top_k, score, renormalise, selection_bias, logit_bias
    )
    found = recalled(load_routers(open_checkpoint(checkpoint), layers, asked), rules_folder())
    if format is Format.json:
        typer.echo(json.dumps(describe_routers(found)))
        return
    expected = "" if found.num_expected is None else f" ({found.num_expected} expected)"
    typer.echo(f"{found.checkpoint}  {found.family}: {found.family_text}.")
    typer.echo(
        f"{len(found.routers)} routers{expected}. Read {size(found.bytes_read)}; the weights have "
        f"{size(found.bytes_total)}."
    )
    typer.echo(f"fingerprint {found.fingerprint}")
    assumed = "assumed from config: a recording with the model's own choices verifies it"
    if router_pattern or family:
        assumed = "as described: a recording with the model's own choices verifies it"
    typer.echo(f"rule {found.verified_by or assumed}.")
    typer.echo()
    typer.echo(render_listing([describe_router(router) for router in found.routers], format))
    for note in found.notes:
        typer.echo(f"note: {note}")
    for skipped in found.skipped:
        typer.echo(f"skipped {skipped.tensor}: {skipped.reason}")
