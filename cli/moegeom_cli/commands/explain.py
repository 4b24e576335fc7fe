"""``moegeom explain``: two runs choose different experts; which one thing explains it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.family_options import FamilyFile, asked_family
from moegeom_cli.options import (
    CHECKPOINT,
    AllLayers,
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

NAME = "explain"
NEEDS_ARGUMENTS = True


def run(
    checkpoint: Annotated[str, typer.Argument(help=f"What A ran: {CHECKPOINT}.")],
    tokens: Annotated[
        str, typer.Option("--tokens", help="A: recording of router inputs, or of logits.")
    ],
    other: Annotated[
        str, typer.Option("--other", help="B: recording, or trace of an engine, of the same text.")
    ],
    other_dialect: Annotated[
        str | None,
        typer.Option("--other-dialect", help="Dialect of that trace, where it does not show it."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Checkpoint that B may have loaded instead."),
    ] = None,
    log_probs: Annotated[
        Path | None,
        typer.Option(
            "--logprobs",
            help="document, position, logprob, other_logprob: parquet, csv or jsonl.",
        ),
    ] = None,
    layers: Layers = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="What foreign numbers of A are: router_input.")
    ] = None,
    router_map: RouterMap = None,
    stale_inputs: StaleInputs = False,
    unverified: Unverified = False,
    all_layers: AllLayers = False,
    family: FamilyFile = None,
    no_cache: NoCache = False,
    format: PrintFormat = Format.table,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Say why B chose other experts than A for the same tokens: one verdict, with its evidence."""
    from moegeom.core.verdict import EXIT_INCONCLUSIVE
    from moegeom.report import View
    from moegeom.report.explanations import EXPLANATION_REPORTERS
    from moegeom.studies.explain import ExplainRequest, explain

    request = ExplainRequest(
        checkpoint=checkpoint,
        tokens=tokens,
        other=other,
        other_dialect=other_dialect,
        against=against,
        log_probs=log_probs,
        layers=layers,
        stage=asked_stage(stage),
        router_map=parse_map(router_map or ()),
        stale_inputs=stale_inputs,
        unverified=unverified,
        asked=asked_family(family),
        rules=rules_folder(),
        remote=remote_options(no_cache),
    )
    watch = watching(quiet)
    try:
        found = explain(request, watch)
    finally:
        watch.close()
    view = View(width(), has_colours(), all_layers)
    typer.echo(EXPLANATION_REPORTERS[format.value].render(found, view), nl=False)
    if found.verdict.cause == "inconclusive":
        raise typer.Exit(EXIT_INCONCLUSIVE)
