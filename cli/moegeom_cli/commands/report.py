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
    counts: Annotated[
        Path | None,
        typer.Option(
            "--counts",
            help="Also write how often each expert was chosen, for a load balancer: FILE.npy, .pt, "
            ".json, or .jsonl for vLLM.",
        ),
    ] = None,
) -> None:
    """Print results that were measured before."""
    from moegeom.document.results import results_document
    from moegeom.results.counts import expert_counts, refuse_ending, write_counts
    from moegeom.results.reader import open_results

    if counts is not None:
        refuse_ending(counts)
    measured = open_results(results)
    table = None if counts is None else expert_counts(measured)
    screen.show(results_document, measured, plots=plots)
    if counts is not None and table is not None:
        screen.note(f"{write_counts(table, counts)}: {counts}")
