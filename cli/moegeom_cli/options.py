"""Arguments and options that several commands have, each with one spelling and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.streams import Format

#: What is accepted wherever a checkpoint is asked for.
CHECKPOINT = (
    "folder (also DCP), index json, or .safetensors, .gguf, .bin, .pt, .pth or .ckpt file; or the "
    "URL of one: hf://OWNER/NAME@REVISION, https://, s3://"
)

Checkpoint = Annotated[str, typer.Argument(help=f"Checkpoint: {CHECKPOINT}.")]
CheckpointOrResults = Annotated[
    str | None, typer.Argument(help=f"Results of a scan, or a checkpoint: {CHECKPOINT}.")
]
Tokens = Annotated[
    list[str] | None,
    typer.Option(
        "--tokens",
        help="Recording; traces of an engine, also 'dump/*.pt', a folder, or repeated; or npy, "
        "npz, safetensors, Parquet with --stage.",
    ),
]
LogProbsFile = Annotated[
    Path | None,
    typer.Option(
        "--logprobs",
        help="Log-probs of both: document, position, logprob, other_logprob; parquet, csv, jsonl.",
    ),
]
FailOn = Annotated[
    str | None, typer.Option("--fail-on", help="Least severity that fails: error, warning.")
]
ReportFiles = Annotated[
    list[str] | None,
    typer.Option("--report", help="NAME=FILE, repeatable: junit, github, md, html, json, table."),
]
OutOfScan = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Results directory [default: runs/NAME, after checkpoint, tokens, options]."
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of random routers, slices and samples.")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard unfinished results instead of going on.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace results that are there already.")
]
FamilyFile = Annotated[
    Path | None,
    typer.Option(
        "--family",
        help="TOML file, or name of a family.",
        rich_help_panel="Unknown architectures",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no notes on stderr.")]
PrintFormat = Annotated[Format, typer.Option("--format", help="How to print.")]
