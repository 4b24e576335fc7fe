"""``moegeom balance``: does a selection bias exist that balances these tokens?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.family_options import FamilyFile, asked_family
from moegeom_cli.options import (
    AllLayers,
    Checkpoint,
    Layers,
    NoCache,
    PrintFormat,
    RouterMap,
    StaleInputs,
    Unverified,
    asked_stage,
    remote_options,
)
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, has_colours, parse_map, watching, width

NAME = "balance"
NEEDS_ARGUMENTS = True


def run(
    checkpoint: Checkpoint,
    tokens: Annotated[
        str,
        typer.Option("--tokens", help="Recording, or npy, npz, safetensors, Parquet (--stage)."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the biases: FILE.npz or FILE.safetensors."),
    ] = None,
    layers: Layers = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="What foreign numbers are: router_input, pre_norm or logits."),
    ] = None,
    router_map: RouterMap = None,
    stale_inputs: StaleInputs = False,
    unverified: Unverified = False,
    all_layers: AllLayers = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sample of tokens.")] = 0,
    family: FamilyFile = None,
    no_cache: NoCache = False,
    format: PrintFormat = Format.table,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Does a selection bias exist that balances these tokens, and does it hold on others?"""
    from moegeom.report import View
    from moegeom.report.balances import BALANCE_REPORTERS
    from moegeom.studies.balancing import BalanceRequest, balance

    request = BalanceRequest(
        checkpoint=checkpoint,
        tokens=tokens,
        stage=asked_stage(stage),
        router_map=parse_map(router_map or ()),
        layers=layers,
        stale_inputs=stale_inputs,
        unverified=unverified,
        asked=asked_family(family),
        rules=rules_folder(),
        remote=remote_options(no_cache),
        seed=seed,
        out=out,
    )
    watch = watching(quiet)
    try:
        found = balance(request, watch)
    finally:
        watch.close()
    view = View(width(), has_colours(), all_layers)
    typer.echo(BALANCE_REPORTERS[format.value].render(found, view), nl=False)
