"""Options that several commands have, each with one spelling and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from moegeom_cli.streams import Format

if TYPE_CHECKING:
    from moegeom.checkpoint.remote_options import RemoteOptions
    from moegeom.core.tokens import Stage

#: What is accepted wherever a checkpoint is asked for.
CHECKPOINT = (
    "folder (also DCP), index json, or .safetensors, .gguf, .bin, .pt, .pth or .ckpt file; or the "
    "URL of one: hf://OWNER/NAME@REVISION, https://, s3://"
)

Checkpoint = Annotated[str, typer.Argument(help=f"Checkpoint: {CHECKPOINT}.")]
CheckpointOrResults = Annotated[
    str | None, typer.Argument(help=f"Results of a scan, or a checkpoint: {CHECKPOINT}.")
]
Layers = Annotated[str | None, typer.Option("--layers", help="Layers, such as 0,3-7.")]
RouterMap = Annotated[
    list[str] | None,
    typer.Option("--map", help="KEY=ROUTER: key in a foreign file, router it belongs to."),
]
StaleInputs = Annotated[
    bool, typer.Option("--stale-inputs", help="Accept a recording of another checkpoint.")
]
Unverified = Annotated[
    bool, typer.Option("--unverified", help="Accept a recording that fails its tests.")
]
AllLayers = Annotated[bool, typer.Option("--all-layers", help="A line for every layer.")]
ExcludeFirst = Annotated[
    int,
    typer.Option(
        "--exclude-first", min=0, help="Leave out the first N tokens of each document (sinks)."
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard unfinished results instead of going on.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Worker threads [default: all].")
]


def _known_device(text: str | None) -> str | None:
    if text is not None:
        from moegeom.scan.engines.choice import refuse_unknown_device

        refuse_unknown_device(text)
    return text


Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="auto, cpu, cuda, cuda:1 or cuda:0,1 [default: auto].",
        callback=_known_device,
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Ask the server of a URL for everything; keep nothing.")
]
PrintFormat = Annotated[Format, typer.Option("--format", help="How to print.")]


def asked_stage(text: str | None) -> Stage | None:
    """What foreign numbers are; ``open_tokens`` refuses what is no stage."""
    return cast("Stage | None", text)


def remote_options(no_cache: bool) -> RemoteOptions | None:
    """How checkpoints behind URLs are fetched."""
    from moegeom.checkpoint.remote_options import RemoteOptions

    return RemoteOptions(cache_folder=None) if no_cache else None


def default_out(checkpoint: str, ending: str) -> Path:
    """runs/<checkpoint>.<ending>, named after the folder, or the file without its ending."""
    path = Path(checkpoint).resolve()
    return Path("runs") / f"{path.stem if path.is_file() else path.name}.{ending}"
