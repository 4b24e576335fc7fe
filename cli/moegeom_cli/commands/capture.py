"""``moegeom capture``: a model over text files, into a recording."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.options import FamilyFile, PrintFormat, Quiet, Restart, Verbose
from moegeom_cli.streams import Format, has_colours, watching, width

COMMAND = Command(Group.measure, 1, "moegeom capture CKPT --text FILE.txt --out REC")


def run(
    model: Annotated[Path, typer.Argument(help="Folder with a model that transformers can load.")],
    text: Annotated[
        list[str],
        typer.Option(
            "--text",
            metavar="[DOMAIN=]FILE",
            help="Text, one document; or .jsonl, one per line (text or token_ids, domain). "
            "May be given several times.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The recording; must not exist.")],
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            metavar="WHAT",
            help="hidden, logits, top-logits:M, ids, outputs, outputs:every-expert, or "
            "attention[:LAYERS] for moegeom research attention [default: top-logits, or logits "
            "where the largest do not decide].",
        ),
    ] = None,
    num_tokens: Annotated[
        int, typer.Option("--num-tokens", min=1, help="Stop after so many tokens.")
    ] = 16_384,
    tokens_per_document: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-document",
            min=1,
            help="At most so many of each document [default: evenly over them, at least 256 of "
            "each, the first documents first].",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option("--length", min=1, help="Tokens read at once [default: 2048 or fewer]."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16, ... [default: as stored].")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto spreads the model.")
    ] = "cpu",
    eager: Annotated[
        bool, typer.Option("--eager", help="Plain attention and experts, no fused kernels.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder of another tokenizer, or bytes.")
    ] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="Write results of a scan instead of a recording.")
    ] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Say how large it would be, and stop.")
    ] = False,
    restart: Restart = False,
    family: FamilyFile = None,
    format: PrintFormat = Format.table,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Record what routers read and choose on a text."""
    del verbose
    from moegeom.core.errors import UsageError
    from moegeom.core.extras import install_command

    try:
        from moegeom.recorder.document import captured_document, plan_document
        from moegeom.recorder.run import CaptureRequest, capture, parse_text_file, plan_capture
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "transformers"):
            raise
        raise UsageError(
            f"capture runs the model, for which {missing.name} is needed.",
            install_command("capture"),
        ) from None
    from moegeom.document.model import View
    from moegeom.document.render import render
    from moegeom.router.requested_family import RequestedFamily

    request = CaptureRequest(
        model=model,
        texts=tuple(parse_text_file(entry) for entry in text),
        out=out,
        keep=keep,
        num_tokens=num_tokens,
        tokens_per_document=tokens_per_document,
        length=length,
        dtype=dtype,
        device=device,
        eager=eager,
        tokenizer=tokenizer,
        fold=fold,
        restart=restart,
        asked=RequestedFamily(family),
    )
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
