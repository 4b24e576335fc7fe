"""``moegeom signoff``: may an exported checkpoint stand for the one it was made of?"""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom_cli.family_options import FamilyFile, asked_family
from moegeom_cli.options import (
    CHECKPOINT,
    Layers,
    NoCache,
    PrintFormat,
    StaleInputs,
    Unverified,
    remote_options,
)
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, has_colours, width

NAME = "signoff"
NEEDS_ARGUMENTS = True


def run(
    a: Annotated[str, typer.Argument(help=f"The checkpoint as trained: {CHECKPOINT}.")],
    b: Annotated[str, typer.Argument(help="What was exported or quantised from it: the same.")],
    tokens: Annotated[
        list[str] | None,
        typer.Option("--tokens", help="Recording with choices; twice: of A, then of B."),
    ] = None,
    null: Annotated[
        str | None,
        typer.Option("--null", help="Recording of A run again: what A differs from itself."),
    ] = None,
    max_switched: Annotated[
        float | None,
        typer.Option("--max-switched", help="Share of layer-tokens above which routing fails."),
    ] = None,
    layers: Layers = None,
    stale_inputs: StaleInputs = False,
    unverified: Unverified = False,
    family: FamilyFile = None,
    no_cache: NoCache = False,
    format: PrintFormat = Format.table,
) -> int:
    """Sign off an export B of A: exit code 0 passed, 1 failed, 4 inconclusive."""
    from moegeom.report import View
    from moegeom.report.signoffs import SIGNOFF_REPORTERS
    from moegeom.studies.signoff import SignOffRequest, sign_off

    request = SignOffRequest(
        a=a,
        b=b,
        tokens=tuple(tokens or ()),
        null=null,
        max_switched=max_switched,
        layers=layers,
        stale_inputs=stale_inputs,
        unverified=unverified,
        asked=asked_family(family),
        rules=rules_folder(),
        remote=remote_options(no_cache),
    )
    found = sign_off(request)
    view = View(width(), has_colours())
    typer.echo(SIGNOFF_REPORTERS[format.value].render(found, view), nl=False)
    return found.exit_code
