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
from moegeom_cli.options import ExcludeFirst, FailOn, ReportFiles, Restart

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
    exclude_first: ExcludeFirst = 0,
    fail_on: FailOn = None,
    report: ReportFiles = None,
    export: Annotated[
        list[str] | None,
        typer.Option("--export", help="csv:FILE, openmetrics:FILE or tensorboard:FOLDER."),
    ] = None,
    restart: Restart = False,
    is_ascii: Annotated[bool, typer.Option("--ascii", help="No block characters.")] = False,
) -> int:
    """Follow a training run, step by step: exit code 0 passed, 1 failed, 4 inconclusive."""
    from moegeom.engine.parameters import request_of
    from moegeom.studies.track.document import document
    from moegeom.studies.track.export import SERIES_EXPORTS
    from moegeom.studies.track.study import TrackRequest, track
    from moegeom_cli.check_reports import parse_reports, write_reports

    reports = parse_reports(report or (), screen.format)
    exports = [_export(entry) for entry in export or ()]
    request = request_of(
        TrackRequest,
        patterns=checkpoints,
        out=out,
        tokens=tokens,
        expert=expert,
        exclude_first=exclude_first,
        fail_on=fail_on,
        **token_options.terms,
        **model.terms,
        **work.terms,
        restart=restart,
    )
    with screen.watching() as watch:
        series = track(request, watch)
    for name, path in exports:
        SERIES_EXPORTS[name].write(series, path)
        screen.note(f"written: {path}")
    screen.show(document, series, is_ascii, plots)
    write_reports(reports, document, series)
    return series.exit_code


def _export(entry: str) -> tuple[str, Path]:
    """``csv:FILE`` as a name and a path; UsageError for anything else."""
    from moegeom.core.errors import UsageError
    from moegeom.core.registry import unknown_name
    from moegeom.studies.track.export import SERIES_EXPORTS

    name, sign, path = entry.partition(":")
    if name not in SERIES_EXPORTS.names():
        raise unknown_name("export", name, SERIES_EXPORTS.names())
    if not sign or not path:
        raise UsageError(f"--export {entry}: expected {name}:PATH.")
    SERIES_EXPORTS[name].refuse_absent()
    return name, _writable(Path(path), f"--export {entry}")


def _writable(path: Path, option: str) -> Path:
    """The path, when it can be written to: better said before the measuring than after it."""
    from moegeom.core.errors import UsageError
    from moegeom.core.files import refuse_unwritable

    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option}: the folder {path.parent} does not exist.")
    if not path.is_dir():  # a folder of TensorBoard
        refuse_unwritable(path)
    return path
