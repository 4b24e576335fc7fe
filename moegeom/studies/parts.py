"""A part of a scan as a document, and parts that are missing."""

from __future__ import annotations

from collections.abc import Mapping

from moegeom.core.finding import EXIT_INCONCLUSIVE
from moegeom.core.router import format_layers
from moegeom.core.text import all_of, number_of
from moegeom.document.model import Command, Document, Excerpt, Fact, Note, Title, View
from moegeom.engine.parts import MissingParts, StoredPart


def part_document(stored: StoredPart, view: View) -> Document:
    """What one part holds, and what comes next."""
    del view
    routers = {state.router for state in stored.states}
    plan_tokens = stored.plan.get("tokens")
    total = plan_tokens.get("num_tokens", 0) if isinstance(plan_tokens, Mapping) else 0
    name = str(stored.folder)
    count = stored.part.count
    then = f"moegeom merge PART... --out OUT  ({all_of(count, 'one there is', 'of them')})"
    return Document(
        "part",
        name,
        [
            [
                Title(name, f"part {stored.part} of {number_of(total, 'token')}."),
                Fact("holds", f"sums of {number_of(len(routers), 'router')}, no figures yet"),
                Excerpt([Fact("next", then)], [Command("next", then)]),
            ]
        ],
        lambda: {
            "folder": name,
            "part": stored.part.number,
            "num_parts": count,
            "num_tokens_of_all": total,
            "states": [
                {"router": state.router, "pass": state.pass_name, "digest": state.digest}
                for state in stored.states
            ],
        },
    )


def missing_document(missing: MissingParts, view: View) -> Document:
    """Results of some parts are not made: they would be those of fewer tokens."""
    del view
    which = format_layers(set(missing.numbers))
    count = number_of(len(missing.numbers), "part")
    text = f"INCONCLUSIVE: {count} of {missing.count} missing: {which}."
    return Document(
        "merge",
        "merge",
        [
            [
                Title("merge", text),
                Fact("given", ", ".join(missing.folders), "plain"),
                Note(
                    "Nothing was written: results of some parts would be those of fewer tokens. "
                    "Make them with moegeom scan ... --part i/n, and merge again."
                ),
            ]
        ],
        lambda: {
            "missing": list(missing.numbers),
            "given": list(missing.folders),
            "num_parts": missing.count,
            "exit_code": EXIT_INCONCLUSIVE,
        },
    )
