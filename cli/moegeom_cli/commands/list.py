"""``moegeom list``: what there is to choose from, and which routers a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from moegeom.engine.request import RoutersRequest
from moegeom_cli.command import Group
from moegeom_cli.groups import PrintFormat, ScreenOptions, command
from moegeom_cli.listing import Words, matching, render_briefly, render_listing
from moegeom_cli.streams import Format, folded, width


@command(Group.list, 1, "moegeom list routers CKPT --layers 0-3")
def routers(request: RoutersRequest, screen: ScreenOptions) -> None:
    """Which routers a checkpoint has: rule, shape and storage; what was skipped and why."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.studies.routers import document, routers

    store = open_checkpoint(request.checkpoint, request.remote)
    screen.show(document, routers(store, request))


@command(Group.list, 2, "moegeom list families qwen")
def families(words: Words = None, format: PrintFormat = Format.table) -> None:
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


@command(Group.list, 3, "moegeom list metrics margin")
def metrics(words: Words = None, format: PrintFormat = Format.table) -> None:
    """What a scan measures: every column by topic, or in full those with a word."""
    from moegeom.metrics import METRICS, by_topic

    metrics = by_topic(METRICS.all())
    rows = matching(
        [
            {
                "column": column.name,
                "metric": metric.name,
                "table": table,
                "unit": column.unit,
                "meaning": column.text,
            }
            for metric in metrics
            for table in metric.columns
            for column in metric.columns[table]
        ],
        words,
        "column",
    )
    if format is not Format.table or words:
        typer.echo(render_listing(rows, format, "metrics"))
    else:
        typer.echo("\n\n".join(_topic(m.text, rows, m.name) for m in metrics))
        typer.echo("\nmoegeom list metrics WORD prints the columns with a word in full.")


def _topic(text: str, rows: Sequence[Mapping[str, object]], name: str) -> str:
    """Name and text of a metric, and a line for each of its columns, whichever tables have it."""
    columns = {row["column"]: row for row in reversed(rows) if row["metric"] == name}
    lines = [{key: row[key] for key in ("column", "unit", "meaning")} for row in columns.values()]
    head = folded(f"{name}: {text}", width(120), " " * 4)
    return f"{head}\n{render_briefly(lines[::-1], '  ')}"


@command(Group.list, 4, "moegeom list checks")
def checks(format: PrintFormat = Format.table) -> None:
    """Every check with its severity in each built-in profile, what it needs, and its statement.

    Those of a series are judged by `moegeom track`, which no profile changes.
    """
    from moegeom.checks.check import all_pages
    from moegeom.checks.profile import BUILT_IN
    from moegeom.studies.track.findings import SERIES_CHECKS

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


@command(Group.list, 5, "moegeom list arithmetics bf16")
def arithmetics(words: Words = None, format: PrintFormat = Format.table) -> None:
    """Presets for --arith: what each rounds, the engine and version it copies, its source."""
    from moegeom.variants.emulated import describe_arithmetics

    rows = matching(describe_arithmetics(), words, "arithmetic")
    typer.echo(render_listing(rows, format, "arithmetics"))
