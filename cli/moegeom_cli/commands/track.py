"""``moegeom track``: a training run, checkpoint by checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import (
    ModelOptions,
    PlotOptions,
    RunOptions,
    ScreenOptions,
    TokenOptions,
    with_groups,
)
from moegeom_cli.options import FailOn, ReportFiles, Restart

COMMAND = Command(Group.compare, 3, "moegeom track CKPT_100 CKPT_200 --plot curves.svg")


@with_groups
def run(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Pattern in quotes, such as 'step_*', or several paths, of checkpoints (folders "
            "and files, no URLs) or results of scans."
        ),
    ],
    token_options: TokenOptions,
    model: ModelOptions,
    work: RunOptions,
    screen: ScreenOptions,
    plots: PlotOptions,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Recording of each step: 'rec/step_{step}' or 'rec/{name}'."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where results stay [default: runs/<folder of them>.track]."),
    ] = None,
    expert: Annotated[
        int | None, typer.Option("--expert", min=0, help="Also show the load of this expert.")
    ] = None,
    fail_on: FailOn = None,
    report: ReportFiles = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            "--export",
            help="csv:FILE, openmetrics:FILE, tensorboard:FOLDER or wandb:PROJECT.",
        ),
    ] = None,
    restart: Restart = False,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="ray, or ray:ADDRESS: workers of a cluster fold each step."),
    ] = None,
    is_ascii: Annotated[bool, typer.Option("--ascii", help="No block characters.")] = False,
) -> int:
    """Follow a training run, step by step: exit code 0 passed, 1 failed, 4 inconclusive."""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.track.document import document
    from moegeom.studies.track.study import TrackRequest, track
    from moegeom_cli.check_reports import parse_reports, write_reports

    reports = parse_reports(report or (), screen.format)
    request = request_of(
        TrackRequest,
        patterns=checkpoints,
        out=out,
        tokens=tokens,
        expert=expert,
        fail_on=fail_on,
        export=export,
        **token_options.terms,
        **model.terms,
        **work.terms,
        restart=restart,
        engine=engine,
    )
    with screen.watching() as watch:
        series = track(request, watch)
    screen.show(document, series, is_ascii, plots)
    write_reports(reports, document, series)
    return series.exit_code
