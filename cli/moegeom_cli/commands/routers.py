"""``moegeom routers``: which routers a checkpoint has; measures nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

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
from moegeom_cli.options import Checkpoint, Layers, NoCache, PrintFormat, remote_options
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, folded, width

if TYPE_CHECKING:
    from moegeom.core.router import Router

NAME = "routers"
NEEDS_ARGUMENTS = True


def run(
    checkpoint: Checkpoint,
    layers: Layers = None,
    family: FamilyFile = None,
    router_pattern: RouterPattern = None,
    top_k: TopK = None,
    score: Score = None,
    renormalise: Renormalise = False,
    selection_bias: SelectionBias = None,
    logit_bias: LogitBias = None,
    no_cache: NoCache = False,
    format: PrintFormat = Format.table,
) -> None:
    """One line per router: its rule, shape and storage; what was skipped and why."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.pipeline import recalled
    from moegeom.report.asked_layers import layers_without_router
    from moegeom.report.header import size
    from moegeom.report.rule_brief import rule_brief
    from moegeom.report.rule_trust import assumed
    from moegeom.router.describe import (
        describe_routers,
        name_patterns,
        rule_in_words,
        rule_origin,
    )
    from moegeom.router.load import load_routers
    from moegeom.scan.run_facts import router_facts
    from moegeom_cli.listing import render_listing

    asked = asked_family(
        family, router_pattern, top_k, score, renormalise, selection_bias, logit_bias
    )
    store = open_checkpoint(checkpoint, remote_options(no_cache))
    found = recalled(load_routers(store, layers, asked), rules_folder())
    absent = layers_without_router(layers, (router.name for router in found.routers))
    found = replace(found, notes=(*found.notes, *filter(None, [absent])))
    if format is Format.json:
        typer.echo(json.dumps(describe_routers(found)))
        return
    brief = rule_brief(found.family_text, [router_facts(router) for router in found.routers])
    _say(f"{found.checkpoint}  {found.family}: {brief}.")
    expected = "" if found.num_expected is None else f" ({found.num_expected} expected)"
    plural = "" if len(found.routers) == 1 else "s"
    num_rows = sum(router.num_experts for router in found.routers)
    _say(
        f"{len(found.routers)} router{plural}{expected} with {num_rows:,} experts. "
        f"Read {size(found.bytes_read)} of {size(found.bytes_total)}."
    )
    typer.echo(f"fingerprint {found.fingerprint}")
    if found.revision:
        _say(f"revision {found.revision}")
    how = "a recording with the model's own choices verifies it"
    _say(f"rule {found.verified_by or f'{assumed(rule_origin(found.family))}: {how}'}.")
    rules = Counter(rule_in_words(router) for router in found.routers)
    for head, parts in (("named  ", name_patterns(found)), ("routes ", rules)):
        for part, count in parts.items():
            said = f"{head}{part}" + (
                f" ({count} of {len(found.routers)})" if len(parts) > 1 else ""
            )
            _say(said)
    typer.echo()
    typer.echo(render_listing([_line(router) for router in found.routers], format))
    for note in found.notes:
        _say(f"note: {note}")
    for skipped in found.skipped:
        _say(f"skipped {skipped.tensor}: {skipped.reason}")


def _say(line: str) -> None:
    """A line of the screen, folded; it may hold names that nobody vouches for."""
    from moegeom.report.untrusted import printable

    typer.echo(folded(printable(line), width(), " " * 7))


def _line(router: Router) -> Mapping[str, object]:
    from moegeom.router.describe import describe_router

    facts = describe_router(router)
    shown = ("router", "experts", "top_k", "hidden", "stored", "walls", "selection")
    note = {} if facts["finite"] else {"selection": f"{facts['selection']}, NOT FINITE"}
    return {name: facts[name] for name in shown} | note
