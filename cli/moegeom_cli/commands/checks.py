"""``moegeom list checks``: what the gate looks for."""

from __future__ import annotations

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.options import PrintFormat
from moegeom_cli.streams import Format

COMMAND = Command(Group.list, 4, "moegeom list checks")


def run(format: PrintFormat = Format.table) -> None:
    """Every check with its severity in each built-in profile, what it needs, and its statement.

    Those of a series are judged by `moegeom track`, which no profile changes.
    """
    from moegeom.checks.check import all_pages
    from moegeom.checks.profile import BUILT_IN
    from moegeom.studies.track.findings import SERIES_CHECKS
    from moegeom_cli.listing import render_listing

    rows = [
        {
            "code": page.check.code,
            "severity": page.check.weighs("default") or "-",
            **{name: page.check.weighs(name) or "-" for name in BUILT_IN if name != "default"},
            "needs": page.check.inputs,
            "statement": page.statement,
        }
        for page in all_pages(SERIES_CHECKS.all())
    ]
    typer.echo(render_listing(rows, format, "checks"))
