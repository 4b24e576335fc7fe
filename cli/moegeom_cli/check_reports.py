"""``--report NAME=FILE``: several reports of one verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from moegeom_cli.streams import Format, put_out

if TYPE_CHECKING:
    from moegeom.document.model import Document, View

T = TypeVar("T")

ReportFiles = Annotated[
    list[str] | None,
    typer.Option("--report", help="NAME=FILE, repeatable: junit, github, md, html, json, table."),
]

#: Columns of a table that goes to a file.
_FILE_WIDTH = 100


def parse_reports(entries: Sequence[str], format: Format) -> list[tuple[str, Path | None]]:
    """Names of reports and the files they go to; None is stdout.

    Raises
    ------
    UsageError
        For a report that does not exist, and for a second one on stdout beside a JSON document.
    """
    from moegeom.core.errors import UsageError
    from moegeom.core.files import refuse_unwritable
    from moegeom.core.registry import unknown_name
    from moegeom.document.render import RENDERERS

    reports = []
    for entry in entries:
        name, _, file = entry.partition("=")
        if name not in RENDERERS.names():
            raise unknown_name("report", name, RENDERERS.names())
        if not file and format is not Format.table:
            raise UsageError(
                f"--report {name} would be printed into the {format.value} document.",
                f"Name a file: --report {name}=FILE.",
            )
        if file:
            refuse_unwritable(Path(file))  # before the measuring, not after it
        reports.append((name, Path(file) if file else None))
    return reports


def write_reports(
    reports: Sequence[tuple[str, Path | None]], document: Callable[[T, View], Document], record: T
) -> None:
    """Writes each report in full detail to its file or to stdout."""
    from moegeom.core.files import write_whole, writing
    from moegeom.document.model import View
    from moegeom.document.report import Report

    view = View(_FILE_WIDTH, detail=True)
    for name, file in reports:
        text = Report(record, document).render(name, view)
        if file is None:
            put_out(text)
            continue
        if os.environ.get("GITHUB_STEP_SUMMARY") == str(file):
            # the job summary of GitHub collects what its steps append
            with writing(file), file.open("a", encoding="utf-8") as stream:
                stream.write(text)
        else:
            write_whole(file, text)
