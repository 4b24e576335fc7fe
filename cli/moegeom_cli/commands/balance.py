"""``moegeom balance``: does a selection bias exist that would balance these tokens?"""

from __future__ import annotations

from pathlib import Path
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
from moegeom_cli.options import Checkpoint, Overwrite, Tokens

COMMAND = Command(Group.explore, 3, "moegeom balance CKPT --tokens REC")


@with_groups
def run(
    checkpoint: Checkpoint,
    token_options: TokenOptions,
    model: ModelOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Tokens = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the biases: FILE.npz or FILE.safetensors."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Does a selection bias exist that balances these tokens, and does it hold on others?"""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.balance.document import document
    from moegeom.studies.balance.study import BalanceRequest, balance

    request = request_of(
        BalanceRequest,
        checkpoint=checkpoint,
        tokens=tokens,
        overwrite=overwrite,
        out=out,
        **token_options.terms,
        **model.terms,
    )
    with screen.watching() as watch:
        found = balance(request, watch)
    screen.show(document, found, plots=plots)
