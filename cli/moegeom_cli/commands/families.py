"""``moegeom list families``: the model families that are known."""

from __future__ import annotations

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.listing import Words, matching, render_briefly, render_listing
from moegeom_cli.options import PrintFormat
from moegeom_cli.streams import Format

COMMAND = Command(Group.list, 2, "moegeom list families qwen")


def run(words: Words = None, format: PrintFormat = Format.table) -> None:
    """Known families and their rules; of those with a word, model types and source too."""
    from moegeom.router.rule import describe_families

    # names of GGUF architectures last: nobody looks for those first
    rows = matching(
        sorted(describe_families(), key=lambda row: str(row["family"]).startswith("gguf_")),
        words,
        "family",
    )
    if format is not Format.table or words:
        typer.echo(render_listing(rows, format, "families"))
    else:
        typer.echo(render_briefly([{k: row[k] for k in ("family", "rule")} for row in rows]))
        typer.echo("\nmoegeom list families WORD also prints model types and sources.")
