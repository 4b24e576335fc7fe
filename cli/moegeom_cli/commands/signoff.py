"""``moegeom signoff``: may an exported checkpoint stand for the one it was made of?"""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import (
    ModelOptions,
    PlotOptions,
    ScreenOptions,
    TokenOptions,
    with_groups,
)
from moegeom_cli.options import CHECKPOINT, LogProbsFile

COMMAND = Command(Group.judge, 2, "moegeom signoff A B --tokens REC_A --tokens REC_B")


@with_groups
def run(
    a: Annotated[str, typer.Argument(help=f"The checkpoint as trained: {CHECKPOINT}.")],
    b: Annotated[str, typer.Argument(help="What was exported or quantised from it: the same.")],
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Annotated[
        list[str] | None,
        typer.Option("--tokens", help="Recording with choices; twice: of A, then of B."),
    ] = None,
    rerun: Annotated[
        str | None,
        typer.Option("--rerun", help="Recording of A run again: what A differs from itself."),
    ] = None,
    max_flipped: Annotated[
        float | None,
        typer.Option(
            "--max-flipped", help="Share of (token, layer) pairs above which routing fails."
        ),
    ] = None,
    log_probs: LogProbsFile = None,
) -> int:
    """Sign off an export B of A: exit code 0 passed, 1 failed, 4 inconclusive."""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.signoff.document import document
    from moegeom.studies.signoff.study import SignOffRequest, sign_off

    request = request_of(
        SignOffRequest,
        a=a,
        b=b,
        tokens=tokens,
        rerun=rerun,
        max_flipped=max_flipped,
        log_probs=log_probs,
        **token_options.terms,
        **model.terms,
    )
    found = sign_off(request)
    screen.show(document, found, plots=plots)
    return found.exit_code
