"""``moegeom boundary-report``: which tokens are about to change experts, and under what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.family_options import FamilyFile, asked_family
from moegeom_cli.options import (
    AllLayers,
    Device,
    ExcludeFirst,
    Layers,
    NoCache,
    PrintFormat,
    Restart,
    RouterMap,
    StaleInputs,
    Threads,
    Unverified,
    asked_stage,
    default_out,
    remote_options,
)
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, has_colours, parse_map, watching, width

NAME = "boundary-report"
NEEDS_ARGUMENTS = True


def run(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint, or results of an earlier boundary-report.")
    ],
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Recording of router inputs, npy, npz, safetensors."),
    ] = None,
    arith: Annotated[
        list[str] | None,
        typer.Option("--arith", help="An arithmetic (repeatable; `moegeom arithmetics`)."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", help="The arithmetic to compare with [default: as stored]."),
    ] = None,
    other: Annotated[
        str | None,
        typer.Option("--other", help="Choices of another run: recording, or trace of an engine."),
    ] = None,
    other_dialect: Annotated[
        str | None,
        typer.Option("--other-dialect", help="Dialect of that trace, where it does not show it."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="A second checkpoint: its routers on the same inputs."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            "--noise", help="Noise on the inputs: share of their rms, or a second recording."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Results directory [default: runs/<checkpoint>.boundary]."),
    ] = None,
    layers: Layers = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="What foreign numbers are: router_input.")
    ] = None,
    router_map: RouterMap = None,
    exclude_first: ExcludeFirst = 0,
    stale_inputs: StaleInputs = False,
    unverified: Unverified = False,
    all_layers: AllLayers = False,
    restart: Restart = False,
    threads: Threads = None,
    device: Device = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the null.")] = 0,
    family: FamilyFile = None,
    no_cache: NoCache = False,
    format: PrintFormat = Format.table,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no screen.")] = False,
) -> None:
    """Which tokens are about to change experts, under which arithmetic, and how much moves."""
    from moegeom.report import View
    from moegeom.report.exposures import EXPOSURE_REPORTERS, exposure_of
    from moegeom.results.reader import is_results, open_results
    from moegeom.studies.exposure import ExposureRequest, measure_exposure

    if is_results(Path(checkpoint)):
        written = Path(checkpoint)
    else:
        request = ExposureRequest(
            checkpoint=checkpoint,
            out=out or default_out(checkpoint, "boundary"),
            tokens=tokens,
            stage=asked_stage(stage),
            router_map=parse_map(router_map or ()),
            layers=layers,
            exclude_first=exclude_first,
            stale_inputs=stale_inputs,
            unverified=unverified,
            restart=restart,
            asked=asked_family(family),
            rules=rules_folder(),
            remote=remote_options(no_cache),
            seed=seed,
            num_workers=threads,
            device=device,
            arithmetics=tuple(arith or ()),
            reference=reference,
            noisy=noise,
            other=other,
            other_dialect=other_dialect,
            against=against,
        )
        watch = watching(quiet)
        try:
            written = measure_exposure(request, watch)
        finally:
            watch.close()
    if not quiet:
        view = View(width(), has_colours(), all_layers)
        found = exposure_of(open_results(written))
        typer.echo(EXPOSURE_REPORTERS[format.value].render(found, view), nl=False)
