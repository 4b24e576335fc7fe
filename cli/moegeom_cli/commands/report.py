"""``moegeom report``: the first screen again, from results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, command


@command(Group.measure, 4, "moegeom report RESULTS --format md")
def report(
    results: Annotated[Path, typer.Argument(help="Results directory of a scan.")],
    screen: ScreenOptions,
    plots: PlotOptions,
) -> None:
    """Print results that were measured before."""
    from moegeom.document.results import results_document
    from moegeom.results.reader import open_results

    screen.show(results_document, open_results(results), plots=plots)
