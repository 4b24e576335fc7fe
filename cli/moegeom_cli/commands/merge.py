"""``moegeom merge``: parts of a scan, folded on many machines, as one results directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, with_groups
from moegeom_cli.options import OutOfScan, Overwrite

COMMAND = Command(Group.measure, 4, "moegeom merge parts/* --out RESULTS")


@with_groups
def run(
    parts: Annotated[
        list[Path], typer.Argument(help="All folders that scan ... --part i/n wrote, in any order.")
    ],
    screen: ScreenOptions,
    plots: PlotOptions,
    out: OutOfScan = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--from", help="Where the checkpoint is here, if it is elsewhere."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Where the tokens are here, if they are elsewhere."),
    ] = None,
    overwrite: Overwrite = False,
) -> int:
    """Add parts up to the results of one scan: exit code 4 when some are missing."""
    from moegeom.core.finding import EXIT_INCONCLUSIVE
    from moegeom.document.results import results_document
    from moegeom.engine.parts import MissingParts
    from moegeom.pipeline import merge
    from moegeom.results.reader import open_results
    from moegeom.studies.parts.document import missing_document

    with screen.watching("tokens") as watch:
        merged = merge(parts, out, watch, checkpoint=checkpoint, tokens=tokens, overwrite=overwrite)
    if isinstance(merged, MissingParts):
        screen.show(missing_document, merged)
        return EXIT_INCONCLUSIVE
    screen.show(results_document, open_results(merged), plots=plots)
    return 0
