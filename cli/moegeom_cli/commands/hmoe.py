"""``moegeom hmoe``: what data can tell of the parameters of gated attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, with_groups
from moegeom_cli.options import Overwrite, Seed
from moegeom_cli.streams import parse_numbers

COMMAND = Command(Group.explore, 11, "moegeom hmoe rates --quick")


@with_groups
def run(
    what: Annotated[
        str, typer.Argument(help="rates: ranks, and slopes of descents; ranks: those alone.")
    ],
    screen: ScreenOptions,
    plots: PlotOptions,
    models: Annotated[
        str, typer.Option("--models", help="mha (no activation), 1 and 2 (settings of S2).")
    ] = "mha,1,2",
    channels: Annotated[
        str | None, typer.Option("--channels", help="Channels that are fitted [default: 3,4].")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", help="Numbers of samples [default: 1e4,3e4,1e5]."),
    ] = None,
    starts: Annotated[
        str | None,
        typer.Option(
            "--start",
            help="Exponents p: starts n^-p from the truth; 0, the control, is always run "
            "[default: 0,0.083,0.3,0.5].",
        ),
    ] = None,
    start_size: Annotated[
        float, typer.Option("--start-size", help="How far from the truth starts are at n = 1e5.")
    ] = 0.385,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Seeds of each [default: 10].")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="Steps of a descent [default: 1000].")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two sizes, two repeats, 100 epochs: seconds.")
    ] = False,
    num_workers: Annotated[
        int | None, typer.Option("--threads", min=1, help="Worker threads [default: all].")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every descent: FILE.parquet.")
    ] = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """What can data tell of the parameters of gated attention, and what do descents show?"""
    from moegeom.engine.parameters import request_of
    from moegeom.research.hmoe.document import document
    from moegeom.research.hmoe.record import HmoeRequest
    from moegeom.research.hmoe.study import hmoe

    request = request_of(
        HmoeRequest,
        what=what,
        models=models,
        channels=parse_numbers("--channels", channels),
        sizes=sizes,
        starts=starts,
        start_size=start_size,
        repeats=repeats,
        epochs=epochs,
        quick=quick,
        num_workers=num_workers,
        out=out,
        seed=seed,
        overwrite=overwrite,
    )
    with screen.watching("descents") as watch:
        found = hmoe(request, watch)
    screen.show(document, found, plots=plots)
