"""``moegeom explain``: two runs choose different experts; which one thing explains it?"""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import (
    ModelOptions,
    PlotOptions,
    RunBOptions,
    ScreenOptions,
    TokenOptions,
    with_groups,
)
from moegeom_cli.options import CHECKPOINT, LogProbsFile, Tokens

COMMAND = Command(Group.compare, 2, "moegeom explain CKPT --tokens REC_A --run-b REC_B")


@with_groups
def run(
    checkpoint: Annotated[str, typer.Argument(help=f"What A ran: {CHECKPOINT}.")],
    other: RunBOptions,
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Tokens = None,
    checkpoint_b: Annotated[
        str | None,
        typer.Option("--checkpoint-b", help="Checkpoint that B may have loaded instead."),
    ] = None,
    log_probs: LogProbsFile = None,
    experts: Annotated[
        bool, typer.Option("--experts", help="Read the experts: how far flips move their output.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Read more than 2 GB of experts.")] = False,
) -> None:
    """Say why B chose other experts than A for the same tokens: one verdict, with its evidence."""
    from moegeom.core.finding import EXIT_INCONCLUSIVE
    from moegeom.engine.parameters import request_of
    from moegeom.studies.explain.document import document
    from moegeom.studies.explain.study import ExplainRequest, explain

    request = request_of(
        ExplainRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        checkpoint_b=checkpoint_b,
        log_probs=log_probs,
        experts=experts,
        yes=yes,
        **other.terms,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = explain(request, watch)
    screen.show(document, found, plots=plots)
    if found.verdict.cause == "inconclusive":
        raise typer.Exit(EXIT_INCONCLUSIVE)
