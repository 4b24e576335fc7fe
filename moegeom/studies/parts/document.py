"""A part of a scan as a document, and parts that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.finding import EXIT_INCONCLUSIVE
from moegeom.core.router import format_layers
from moegeom.core.text import all_of, number_of
from moegeom.document.model import Command, Document, Excerpt, Fact, Note, Title, View
from moegeom.engine.parts import MissingParts, StoredPart


def part_document(found: StoredPart, view: View) -> Document:
    """What one part holds, and what comes next."""
    del view
    routers = {state.router for state in found.states}
    plan_tokens = found.plan.get("tokens")
    total = plan_tokens.get("num_tokens", 0) if isinstance(plan_tokens, Mapping) else 0
    name = str(found.folder)
    count = found.part.count
    then = f"moegeom merge PART... --out OUT  ({all_of(count, 'one there is', 'of them')})"
    return Document(
        "part",
        name,
        [
            [
                Title(name, f"part {found.part} of {number_of(total, 'token')}."),
                Fact("holds", f"sums of {number_of(len(routers), 'router')}, no figures yet"),
                Excerpt([Fact("next", then)], [Command("next", then)]),
            ]
        ],
        lambda: _record(found, total),
    )


def _record(found: StoredPart, total: int) -> dict[str, Any]:
    return {
        "folder": str(found.folder),
        "part": found.part.number,
        "num_parts": found.part.count,
        "num_tokens_of_all": total,
        "states": [
            {"router": state.router, "pass": state.pass_name, "digest": state.digest}
            for state in found.states
        ],
    }


def missing_document(found: MissingParts, view: View) -> Document:
    """Results of some parts are not made: they would be those of fewer tokens."""
    del view
    which = format_layers(set(found.numbers))
    text = (
        f"INCONCLUSIVE: {number_of(len(found.numbers), 'part')} of {found.count} missing: {which}."
    )
    return Document(
        "merge",
        "merge",
        [
            [
                Title("merge", text),
                Fact("given", ", ".join(found.given), "plain"),
                Note(
                    "Nothing was written: results of some parts would be those of fewer tokens. "
                    "Make them with moegeom scan ... --part i/n, and merge again."
                ),
            ]
        ],
        lambda: {
            "missing": list(found.numbers),
            "given": list(found.given),
            "num_parts": found.count,
            "exit_code": EXIT_INCONCLUSIVE,
        },
    )
