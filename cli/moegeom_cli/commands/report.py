"""``moegeom report``: the first screen again, from results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, command

#: Results that can stand beside each other.
_MOST = 2


@command(Group.measure, 4, "moegeom report RESULTS --format md")
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Results directory of a scan; two stand beside each other.")
    ],
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
    from moegeom.core.errors import UsageError
    from moegeom.document.report import ScanReport
    from moegeom.document.results import results_document
    from moegeom.results.counts import expert_counts, refuse_ending, write_counts
    from moegeom.results.reader import open_results

    if counts is not None:
        refuse_ending(counts)
    if len(results) > _MOST or (counts is not None and len(results) > 1):
        most = "one" if counts is not None else "two"
        raise UsageError(
            f"{len(results)} results; expected {most} at most.",
            "Give one, or two and no --counts; a series of checkpoints is for moegeom track.",
        )
    measured, *others = map(open_results, results)
    table = None if counts is None else expert_counts(measured)
    if others:
        a, b = (ScanReport(one, results_document) for one in (measured, *others))
        pair = a.beside(b)
        screen.show(pair.tell, pair.value, plots=plots)
    else:
        screen.show(results_document, measured, plots=plots)
    if counts is not None and table is not None:
        screen.note(f"{write_counts(table, counts)}: {counts}")
