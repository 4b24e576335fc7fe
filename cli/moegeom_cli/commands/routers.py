"""``moegeom routers``: which routers a checkpoint has; measures nothing."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from moegeom_cli.family_options import (
    FamilyFile,
    LogitBias,
    Renormalise,
    RouterPattern,
    Score,
    SelectionBias,
    TopK,
    asked_family,
)
from moegeom_cli.options import Layers, PrintFormat
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, width

if TYPE_CHECKING:
    from moegeom.core.router import Router

NAME = "routers"
NEEDS_ARGUMENTS = True


def run(
    checkpoint: Annotated[str, typer.Argument(help="Directory, file or URL (hf://owner/name).")],
    layers: Layers = None,
    family: FamilyFile = None,
    router_pattern: RouterPattern = None,
    top_k: TopK = None,
    score: Score = None,
    renormalise: Renormalise = False,
    selection_bias: SelectionBias = None,
    logit_bias: LogitBias = None,
    format: PrintFormat = Format.table,
) -> None:
    """One line per router: its rule, shape and storage; what was skipped and why."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.pipeline import recalled
    from moegeom.report.header import size
    from moegeom.router.describe import describe_routers, name_patterns, rule_in_words
    from moegeom.router.load import load_routers
    from moegeom_cli.listing import render_listing

    asked = asked_family(
        family, router_pattern, top_k, score, renormalise, selection_bias, logit_bias
    )
    found = recalled(load_routers(open_checkpoint(checkpoint), layers, asked), rules_folder())
    if format is Format.json:
        typer.echo(json.dumps(describe_routers(found)))
        return
    expected = "" if found.num_expected is None else f" ({found.num_expected} expected)"
    typer.echo(f"{found.checkpoint}  {found.family}: {found.family_text}.")
    num_rows = sum(router.num_experts for router in found.routers)
    typer.echo(
        f"{len(found.routers)} routers{expected} with {num_rows:,} experts. "
        f"Read {size(found.bytes_read)} of {size(found.bytes_total)}."
    )
    typer.echo(f"fingerprint {found.fingerprint}")
    if found.revision:
        typer.echo(f"revision {found.revision}")
    assumed = "assumed from config: a recording with the model's own choices verifies it"
    if router_pattern or family:
        assumed = "as described: a recording with the model's own choices verifies it"
    typer.echo(f"rule {found.verified_by or assumed}.")
    rules = Counter(rule_in_words(router) for router in found.routers)
    for head, parts in (("named  ", name_patterns(found)), ("routes ", rules)):
        for part, count in parts.items():
            said = f"{head}{part}" + (
                f" ({count} of {len(found.routers)})" if len(parts) > 1 else ""
            )
            typer.echo("\n".join(textwrap.wrap(said, width(), subsequent_indent="       ")))
    typer.echo()
    typer.echo(render_listing([_line(router) for router in found.routers], format))
    for note in found.notes:
        typer.echo(f"note: {note}")
    for skipped in found.skipped:
        typer.echo(f"skipped {skipped.tensor}: {skipped.reason}")


def _line(router: Router) -> Mapping[str, object]:
    from moegeom.router.describe import describe_router

    facts = describe_router(router)
    shown = ("router", "experts", "top_k", "hidden", "stored", "walls", "selection")
    note = {} if facts["finite"] else {"selection": f"{facts['selection']}, NOT FINITE"}
    return {name: facts[name] for name in shown} | note
