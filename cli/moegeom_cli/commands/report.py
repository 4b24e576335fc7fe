"""``moegeom report``: the first screen again, from results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.options import AllLayers, PrintFormat
from moegeom_cli.streams import Format, has_colours, width

NAME = "report"
NEEDS_ARGUMENTS = True


def run(
    results: Annotated[Path, typer.Argument(help="Results directory of a scan.")],
    all_layers: AllLayers = False,
    format: PrintFormat = Format.table,
) -> None:
    """Print results that were measured before, on this machine or another."""
    from moegeom.report import REPORTERS, View
    from moegeom.results.reader import open_results

    view = View(width(), has_colours(), all_layers)
    typer.echo(REPORTERS[format.value].render(open_results(results), view), nl=False)
