"""Arguments and options that several commands have, each with one spelling and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.streams import Format, log_to_stderr

ReportFiles = Annotated[
    list[str] | None,
    typer.Option("--report", help="NAME=FILE, repeatable: junit, github, md, html, json, table."),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard unfinished results instead of going on.")
]
FamilyFile = Annotated[
    Path | None,
    typer.Option(
        "--family", help="TOML file, or name of a family.", rich_help_panel="Unknown architectures"
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", callback=log_to_stderr, help="Say what is read and measured, on stderr."
    ),
]
PrintFormat = Annotated[Format, typer.Option("--format", help="How to print.")]
