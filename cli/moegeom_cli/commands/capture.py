"""``moegeom capture``: a model over text files, into a recording."""

from __future__ import annotations

from typing import Annotated

import typer

from moegeom.recorder.request import CaptureRequest
from moegeom_cli.command import Group
from moegeom_cli.groups import PrintFormat, Quiet, Verbose, command
from moegeom_cli.streams import Format, has_colours, watching, width


@command(Group.measure, 1, "moegeom capture CKPT --text FILE.txt --out REC")
def capture(
    request: CaptureRequest,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Say how large it would be, and stop.")
    ] = False,
    format: PrintFormat = Format.table,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Record what routers read and choose on a text."""
    del verbose
    from contextlib import closing

    from moegeom.core.errors import UsageError
    from moegeom.core.extras import install_command

    try:
        from moegeom.recorder.document import captured_document, plan_document
        from moegeom.recorder.run import capture, plan_capture
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "transformers"):
            raise
        raise UsageError(
            f"capture runs the model, for which {missing.name} is needed.",
            install_command("capture"),
        ) from None
    from moegeom.document.model import View
    from moegeom.document.render import render

    view = View(width(), has_colours(), detail=False)
    plan = plan_capture(request)
    planned = plan_document(plan, request, view)
    if plan_only:
        typer.echo(render(planned, format.value, view), nl=False)
        return
    if not quiet:
        typer.echo(render(planned, "table", view), nl=False, err=True)
    with closing(watching(quiet)) as watch:
        record = capture(request, plan, watch)
    typer.echo(render(captured_document(record, request, view), format.value, view), nl=False)
