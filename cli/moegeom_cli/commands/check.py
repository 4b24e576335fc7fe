"""``moegeom check``: may this checkpoint ship?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom.studies.check.record import GateRequest
from moegeom_cli.check_reports import ReportFiles, parse_reports, write_reports
from moegeom_cli.command import Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, command


@command(Group.ship, 1, "moegeom check CKPT --baseline moegeom-baseline.json")
def check(
    request: GateRequest,
    screen: ScreenOptions,
    plots: PlotOptions,
    report: ReportFiles = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="CODE", help="Print the page of a check.")
    ] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Write a commented moegeom.toml and stop.")
    ] = False,
) -> int:
    """Judge a checkpoint: limits, baseline, or both.

    Exit code 0 passed, 1 failed, 4 inconclusive.
    """
    if explain is not None:
        from moegeom.checks.check import find_check, page_of
        from moegeom.studies.check.document import page_document
        from moegeom.studies.track.findings import SERIES_CHECKS

        screen.show(page_document, page_of(find_check(explain, SERIES_CHECKS.all())))
        return 0
    if init:
        _init()
        return 0
    reports = parse_reports(report or (), screen.format)
    from moegeom.studies.check.document import document
    from moegeom.studies.check.study import gate

    with screen.watching("tokens" if request.tokens else "routers") as watch:
        answer = gate(request, watch)
    screen.show(document, answer, plots=plots)
    write_reports(reports, document, answer)
    if answer.written is not None:
        doubt = ", although the gate did not pass" if answer.exit_code else ""
        screen.note(f"baseline written: {answer.written}{doubt}")
    return answer.exit_code


def _init() -> None:
    from moegeom.checks.profile_file import PROFILE_NAME, profile_template
    from moegeom.core.errors import UsageError
    from moegeom.core.files import write_whole

    path = Path(PROFILE_NAME)
    if path.exists():
        raise UsageError(f"{path} exists already.", "Remove it first, or edit it.")
    write_whole(path, profile_template())
    typer.echo(f"wrote {path}", err=True)
