"""``moegeom check``: may this checkpoint ship?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import (
    ModelOptions,
    OutOptions,
    PlotOptions,
    RunOptions,
    ScreenOptions,
    TokenOptions,
    with_groups,
)
from moegeom_cli.options import CheckpointOrResults, FailOn, ReportFiles, Tokens

COMMAND = Command(Group.judge, 1, "moegeom check CKPT --baseline moegeom-baseline.json")


@with_groups
def run(
    token_options: TokenOptions,
    model: ModelOptions,
    work: RunOptions,
    existing: OutOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    target: CheckpointOrResults = None,
    tokens: Tokens = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="File to compare with.")
    ] = None,
    update_baseline: Annotated[
        bool,
        typer.Option("--update-baseline", help="Write the baseline instead of comparing with it."),
    ] = False,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="Read 64 kB of each expert: did experts grow apart?"),
    ] = False,
    attention: Annotated[
        bool,
        typer.Option("--attention", help="Read gates and sinks of attention: are they whole?"),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="default, release, training, or a TOML file [default: moegeom.toml, or "
            "[tool.moegeom], outside CKPT].",
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option("--select", help="Codes or their beginnings: MGI,MGN112.")
    ] = None,
    fail_on: FailOn = None,
    report: ReportFiles = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Keep the results in this directory.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="CODE", help="Print the page of a check.")
    ] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Write a commented moegeom.toml and stop.")
    ] = False,
) -> int:
    """Judge a checkpoint: exit code 0 passed, 1 failed, 4 inconclusive."""
    from moegeom_cli.check_reports import parse_reports, write_reports

    if explain is not None:
        from moegeom.checks.check import find_check, page_of
        from moegeom.studies.check.document import page_document
        from moegeom.studies.track.series_check import SERIES_CHECKS

        screen.show(page_document, page_of(find_check(explain, SERIES_CHECKS.all())))
        return 0
    if init:
        _init()
        return 0
    from moegeom.core.errors import UsageError

    if target is None:
        raise UsageError("check needs a checkpoint or results.", "moegeom check CKPT")
    reports = parse_reports(report or (), screen.format)
    from moegeom.engine.parameters import request_of
    from moegeom.studies.check.document import document
    from moegeom.studies.check.study import GateRequest, gate

    request = request_of(
        GateRequest,
        target=target,
        tokens=tokens,
        profile=profile,
        baseline=baseline,
        update_baseline=update_baseline,
        experts=experts,
        attention=attention,
        select=select,
        fail_on=fail_on,
        out=out,
        **token_options.terms,
        **model.terms,
        **work.terms,
        **existing.terms,
    )
    with screen.watching("tokens" if tokens else "routers") as watch:
        found = gate(request, watch, screen.note)
    screen.show(document, found, plots=plots)
    write_reports(reports, document, found)
    if found.written is not None:
        doubt = ", although the gate did not pass" if found.exit_code else ""
        screen.note(f"baseline written: {found.written}{doubt}")
    return found.exit_code


def _init() -> None:
    from moegeom.checks.profile_file import PROFILE_NAME, profile_template
    from moegeom.core.errors import UsageError
    from moegeom.core.files import write_whole

    path = Path(PROFILE_NAME)
    if path.exists():
        raise UsageError(f"{path} exists already.", "Remove it first, or edit it.")
    write_whole(path, profile_template())
    typer.echo(f"wrote {path}", err=True)
