"""Traces before a checkpoint as a document: are they sound, and what do they hold?"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from moegeom.core.router import format_layers
from moegeom.core.text import number_of
from moegeom.document.excerpts import in_part
from moegeom.document.model import (
    Block,
    Command,
    Document,
    Excerpt,
    Fact,
    Look,
    Note,
    Table,
    View,
)
from moegeom.studies.routes.record import FileOfRoutes, Routes, State

#: Columns of the label in front of a fact.
_LABEL = 12

_LOOKS: Mapping[int, Look] = {0: "good", 1: "error", 4: "warning"}

_STATES: Mapping[State, str] = {
    "defective": "DEFECTIVE",
    "not judged": "not judged",
    "sound": "sound in what needs no checkpoint",
}

_HEADS = (("layer", "largest id", "experts, at least", "different ids"),)


def document(found: Routes, view: View) -> Document:
    """What ``moegeom routes`` says."""
    name = found.files[0].name if len(found.files) == 1 else f"{len(found.files)} traces"
    return Document(
        "routes",
        name,
        [
            [*_verdict(found)],
            *([*_facts(one), *_problems(one, view)] for one in _worst_first(found)),
            [_layers(one, view) for one in found.files if one.layers],
            [*_next(found)],
        ],
        lambda: {"exit_code": found.exit_code, "files": [_record(one) for one in found.files]},
    )


# ------------------------------------------------------------------------------------------ verdict


def _verdict(found: Routes) -> Iterator[Block]:
    yield Fact("VERDICT", f"{_summary(found)}.", _LOOKS[found.exit_code], indent=_LABEL)
    unseen = list(dict.fromkeys(text for one in found.files for text in one.not_looked_at))
    if unseen:
        yield Fact(
            "",
            f"{number_of(len(unseen), 'thing was', 'things were')} not looked at: "
            f"{'; '.join(unseen)}.",
            "warning",
            indent=_LABEL,
        )


def _summary(found: Routes) -> str:
    if len(found.files) == 1:
        (one,) = found.files
        said = {
            "defective": f"{one.name} cannot be read as written ({_first_defect(one)})",
            "not judged": f"{one.name} says too little by itself",
            "sound": _tokens(one),
        }
        return f"{_STATES[one.state]}: {said[one.state]}"
    parts = [
        f"{len(files)} {words}"
        for state, words in _STATES.items()
        if (files := found.of_state(state))
    ]
    return f"of {len(found.files)} traces {', '.join(parts)}"


def _first_defect(one: FileOfRoutes) -> str:
    named = [defect for defect in one.defects if defect.request]
    if not named:
        return "see below"
    return f"{number_of(len(named), 'request')} of {one.num_requests:,}"


def _tokens(one: FileOfRoutes) -> str:
    if not one.num_rows:
        return f"counts of {number_of(one.num_layers, 'layer')}"
    return f"{number_of(one.num_tokens, 'token')} of {number_of(one.num_requests, 'request')}"


# -------------------------------------------------------------------------------------- each file


def _facts(one: FileOfRoutes) -> Iterator[Block]:
    yield _fact("file", f"{one.name}: {one.writer or 'a trace'} (--dialect {one.dialect}).")
    if one.num_rows:
        yield _fact(
            "rows",
            f"{one.num_rows:,} of {number_of(one.num_requests, 'request')}, of which "
            f"{one.num_tokens:,} are tokens.",
        )
    if one.layers:
        least, most = (f(layer.largest for layer in one.layers) for f in (min, max))
        slots = "" if one.top_k is None else f" of {number_of(one.top_k, 'slot')}"
        kinds = f", stored as {', '.join(one.dtypes)}" if one.dtypes else ""
        yield _fact(
            "layers",
            f"{len(one.layers)} of {one.num_layers} hold choices{slots} "
            f"({format_layers({layer.name for layer in one.layers})}){kinds}.",
        )
        yield _fact(
            "experts",
            f"at least {most + 1}: the largest id of a layer is {least}"
            + (f" to {most}." if least < most else "."),
        )
    if one.ids_are == "logical":
        yield _fact("ids", "logical, by the way they are recorded.")


def _problems(one: FileOfRoutes, view: View) -> Iterator[Block]:
    if one.defects:
        blocks: list[Block] = []
        for defect in one.defects:
            blocks.append(Fact("defect", defect.text, "error", indent=_LABEL))
            if defect.hint:
                blocks.append(Fact("", defect.hint, "plain", indent=_LABEL))
        yield in_part(blocks, "line of defects", view.detail, least=2)
    if one.notes:
        notes = [Fact("note", note, "plain", indent=_LABEL) for note in one.notes]
        yield in_part(notes, "note", view.detail, is_aside=True)


def _layers(one: FileOfRoutes, view: View) -> Excerpt:
    """The layers, on a page and in detail: a screen has said their ends."""
    rows = [
        (str(layer.name), f"{layer.largest:,}", f"{layer.largest + 1:,}", f"{layer.num_seen:,}")
        for layer in one.layers
    ]
    table = [Note(f"{one.name}:"), Table(_HEADS, rows)]
    return Excerpt(table if view.detail else [], table)


def _worst_first(found: Routes) -> list[FileOfRoutes]:
    return [one for state in _STATES for one in found.of_state(state)]


def _next(found: Routes) -> Iterator[Command]:
    for one in [one for one in found.files if one.state != "defective"][:1]:
        yield Command("next: ", f"moegeom scan CKPT --tokens {shlex.quote(one.given)}")


def _fact(label: str, text: str) -> Fact:
    return Fact(label, text, "plain", indent=_LABEL)


def _record(one: FileOfRoutes) -> dict[str, Any]:
    return dataclasses.asdict(one)
