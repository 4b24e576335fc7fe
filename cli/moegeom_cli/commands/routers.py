"""``moegeom routers``: which routers a checkpoint has; measures nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ModelOptions, with_groups
from moegeom_cli.options import Checkpoint, PrintFormat
from moegeom_cli.streams import Format, folded, width

if TYPE_CHECKING:
    from moegeom.core.router import Router

COMMAND = Command(Group.measure, 1, "moegeom routers CKPT --layers 0-3")


@with_groups
def run(
    checkpoint: Checkpoint,
    model: ModelOptions,
    format: PrintFormat = Format.table,
) -> None:
    """Which routers a checkpoint has: rule, shape and storage; what was skipped and why."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.document.asked_layers import layers_without_router
    from moegeom.document.header import size
    from moegeom.document.rule_brief import rule_brief
    from moegeom.document.rule_trust import assumed
    from moegeom.engine.request import Terms
    from moegeom.engine.run_facts import router_facts
    from moegeom.router.describe import (
        describe_routers,
        name_patterns,
        rule_in_words,
        rule_origin,
    )
    from moegeom.router.load import load_routers
    from moegeom_cli.listing import render_listing

    terms = Terms(**model.terms)
    store = open_checkpoint(checkpoint, terms.remote)
    found = load_routers(store, terms.layers, terms.asked)
    absent = layers_without_router(terms.layers, (router.name for router in found.routers))
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
    _say(f"rule {assumed(rule_origin(found.family))}: {how}.")
    rules = Counter(rule_in_words(router) for router in found.routers)
    for head, parts in (("named  ", name_patterns(found)), ("routes ", rules)):
        for part, count in parts.items():
            said = f"{head}{part}" + (
                f" ({count} of {len(found.routers)})" if len(parts) > 1 else ""
            )
            _say(said)
    typer.echo()
    typer.echo(render_listing(_lines(found.routers), format))
    for note in found.notes:
        _say(f"note: {note}")
    for skipped in found.skipped:
        _say(f"skipped {skipped.tensor}: {skipped.reason}")


def _say(line: str) -> None:
    """A line of the screen, folded; it may hold names that nobody vouches for."""
    from moegeom.document.untrusted import printable

    typer.echo(folded(printable(line), width(), " " * 7))


def _lines(routers: Sequence[Router]) -> list[Mapping[str, object]]:
    """A line for all routers of a stack of which the same is to be said: ``text/0-47``."""
    from moegeom.core.layer_ranges import format_layers

    alike: dict[tuple[str, ...], list[tuple[Mapping[str, object], set[int]]]] = {}
    for router in routers:
        stack, layer, *slot = router.name.split("/")
        line = _line(router)
        key = (stack, *slot, *(str(value) for head, value in line.items() if head != "router"))
        alike.setdefault(key, []).append((line, {int(layer)}))
    found = []
    for same in alike.values():
        line, _ = same[0]
        stack, _, *slot = str(line["router"]).split("/")
        layers = format_layers(set().union(*(layers for _, layers in same)))
        found.append({**line, "router": "/".join([stack, layers, *slot])})
    return found


def _line(router: Router) -> Mapping[str, object]:
    from moegeom.router.describe import describe_router

    facts = describe_router(router)
    shown = ("router", "experts", "top_k", "hidden", "stored", "walls", "selection")
    note = {} if facts["finite"] else {"selection": f"{facts['selection']}, NOT FINITE"}
    return {name: facts[name] for name in shown} | note
