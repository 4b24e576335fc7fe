"""``moegeom track``: a training run, checkpoint by checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.family_options import FamilyFile, asked_family
from moegeom_cli.options import (
    AllLayers,
    Device,
    ExcludeFirst,
    Layers,
    PrintFormat,
    Restart,
    Threads,
)
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, has_colours, watching, width

NAME = "track"
NEEDS_ARGUMENTS = True


def run(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Pattern in quotes, such as 'step_*', or several paths, of checkpoints (folders "
            "and files, no URLs) or results of scans."
        ),
    ],
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Recording of each step: 'rec/step_{step}' or 'rec/{name}'."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where results stay [default: runs/<folder of them>.track]."),
    ] = None,
    layers: Layers = None,
    expert: Annotated[
        int | None, typer.Option("--expert", min=0, help="Also show the load of this expert.")
    ] = None,
    exclude_first: ExcludeFirst = 0,
    stale_inputs: Annotated[
        bool,
        typer.Option("--stale-inputs", help="Accept recordings of another checkpoint, labelled."),
    ] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Accept recordings that fail their tests.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Picture: FILE.svg, FILE.png or FILE.pdf.")
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option("--export", help="csv:FILE, openmetrics:FILE or tensorboard:FOLDER."),
    ] = None,
    all_layers: AllLayers = False,
    is_ascii: Annotated[bool, typer.Option("--ascii", help="No block characters.")] = False,
    restart: Restart = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the null and of samples.")] = 0,
    threads: Threads = None,
    device: Device = None,
    family: FamilyFile = None,
    format: PrintFormat = Format.table,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no screen.")] = False,
) -> None:
    """Follow a training run: load, entropy, margins, drift and overlap, step by step."""
    from moegeom.report import SERIES_EXPORTS, SERIES_REPORTERS, View
    from moegeom.studies.series import TrackRequest, track

    exports = [_export(entry) for entry in export or ()]
    if plot is not None:
        exports.append(_picture(plot))
    watch = watching(quiet)
    request = TrackRequest(
        patterns=tuple(checkpoints),
        out=out,
        tokens=tokens,
        layers=layers,
        expert=expert,
        stale_inputs=stale_inputs,
        unverified=unverified,
        exclude_first=exclude_first,
        restart=restart,
        asked=asked_family(family),
        rules=rules_folder(),
        seed=seed,
        num_workers=threads,
        device=device,
    )
    try:
        series = track(request, watch)
    finally:
        watch.close()
    for name, path in exports:
        SERIES_EXPORTS[name].write(series, path)
    if not quiet:
        plain = is_ascii or not (sys.stdout.encoding or "").lower().startswith("utf")
        view = View(width(), has_colours(), all_layers, plain)
        typer.echo(SERIES_REPORTERS[format.value].render(series, view), nl=False)


def _export(entry: str) -> tuple[str, Path]:
    """``csv:FILE`` as a name and a path; UsageError for anything else."""
    from moegeom.core.errors import UsageError
    from moegeom.core.registry import unknown_name
    from moegeom.report import SERIES_EXPORTS

    name, sign, path = entry.partition(":")
    known = [known for known in SERIES_EXPORTS.names() if known != "picture"]
    if name not in known:
        raise unknown_name("export", name, known)
    if not sign or not path:
        raise UsageError(f"--export {entry}: expected {name}:PATH.")
    return name, _writable(Path(path), f"--export {entry}")


def _picture(plot: Path) -> tuple[str, Path]:
    from moegeom.core.errors import UsageError

    if plot.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {plot}: expected a name that ends in .svg, .png or .pdf.")
    return "picture", _writable(plot, f"--plot {plot}")


def _writable(path: Path, option: str) -> Path:
    """The path, when its folder exists: better said before the measuring than after it."""
    from moegeom.core.errors import UsageError

    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option}: the folder {path.parent} does not exist.")
    return path
