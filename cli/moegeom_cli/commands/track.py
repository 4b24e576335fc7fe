"""``moegeom track``: a training run, checkpoint by checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom.studies.track.record import TrackRequest
from moegeom_cli.check_reports import ReportFiles, parse_reports, write_reports
from moegeom_cli.command import Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, command


@command(Group.measure, 5, "moegeom track CKPT_100 CKPT_200 --plot curves.svg")
def track(
    request: TrackRequest,
    screen: ScreenOptions,
    plots: PlotOptions,
    report: ReportFiles = None,
    is_ascii: Annotated[bool, typer.Option("--ascii", help="No block characters.")] = False,
) -> int:
    """Follow a training run, step by step.

    Exit code 0 passed, 1 failed, 4 inconclusive.
    """
    from moegeom.studies.track.document import document
    from moegeom.studies.track.study import track

    reports = parse_reports(report or (), screen.format)
    with screen.watching() as watch:
        series = track(request, watch)
    screen.show(document, series, is_ascii, plots)
    write_reports(reports, document, series)
    return series.exit_code
