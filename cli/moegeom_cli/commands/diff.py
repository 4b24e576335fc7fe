"""``moegeom diff``: what happened to the routers between two checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.family_options import FamilyFile, asked_family
from moegeom_cli.options import (
    CHECKPOINT,
    Device,
    Layers,
    NoCache,
    PrintFormat,
    StaleInputs,
    Threads,
    Unverified,
    remote_options,
)
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, has_colours, watching, width

NAME = "diff"
NEEDS_ARGUMENTS = True


def run(
    a: Annotated[
        str,
        typer.Argument(help=f"Before: results of a scan, or a checkpoint: {CHECKPOINT}."),
    ],
    b: Annotated[str, typer.Argument(help="After: the same kinds.")],
    layers: Layers = None,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="Read a sample of expert weights: did experts move along?"),
    ] = False,
    tokens: Annotated[
        list[str] | None,
        typer.Option("--tokens", help="Recording; twice, for A and B, or once for both."),
    ] = None,
    stale_inputs: StaleInputs = False,
    unverified: Unverified = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Keep the results of the scans here: a.moegeom, b.moegeom."),
    ] = None,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="A line for every change.")
    ] = False,
    threads: Threads = None,
    device: Device = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the null.")] = 0,
    family: FamilyFile = None,
    no_cache: NoCache = False,
    format: PrintFormat = Format.table,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Say what happened to each router from A to B; on tokens, which figures changed."""
    from moegeom.report import View
    from moegeom.report.differences import DIFFERENCE_REPORTERS
    from moegeom.studies.difference import DifferenceRequest, difference

    request = DifferenceRequest(
        a=a,
        b=b,
        layers=layers,
        experts=experts,
        tokens=tuple(tokens or ()),
        stale_inputs=stale_inputs,
        unverified=unverified,
        out=out,
        asked=asked_family(family),
        rules=rules_folder(),
        remote=remote_options(no_cache),
        seed=seed,
        num_workers=threads,
        device=device,
    )
    watch = watching(quiet)
    try:
        found = difference(
            request, watch, lambda text: None if quiet else typer.echo(text, err=True)
        )
    finally:
        watch.close()
    view = View(width(), has_colours(), all_layers)
    typer.echo(DIFFERENCE_REPORTERS[format.value].render(found, view), nl=False)
