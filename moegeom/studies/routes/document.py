"""Traces checked without a checkpoint, as a document: are they sound, what do they hold?"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping

from moegeom.core.router import format_layers
from moegeom.core.text import number_of
from moegeom.document.excerpts import in_part
from moegeom.document.model import Block, Command, Document, Excerpt, Fact, Look, Note, Table, View
from moegeom.studies.routes.record import FileOfRoutes, Routes, State

#: Columns of the label in front of a fact.
_LABEL = 12

_LOOKS: Mapping[int, Look] = {0: "good", 1: "error", 4: "warning"}

_STATES: Mapping[State, str] = {
    "defective": "DEFECTIVE",
    "incomplete": "INCOMPLETE",
    "not judged": "not judged",
    "sound": "sound in what needs no checkpoint",
}

_HEADS = (("layer", "largest id", "experts, at least", "different ids"),)


def document(report: Routes, view: View) -> Document:
    """What ``moegeom routes`` says."""
    name = report.files[0].name if len(report.files) == 1 else f"{len(report.files)} traces"
    return Document(
        "routes",
        name,
        [
            [*_verdict(report)],
            *(
                [*_facts(one), *_problems(one, view)]
                for state in _STATES  # the worst first
                for one in report.of_state(state)
            ),
            [_layers(one, view) for one in report.files if one.layers],
            [
                Command("next: ", f"moegeom scan CKPT --tokens {shlex.quote(one.given)}")
                for one in [one for one in report.files if one.state != "defective"][:1]
            ],
        ],
        lambda: {"exit_code": report.exit_code, "files": [*map(dataclasses.asdict, report.files)]},
    )


# ------------------------------------------------------------------------------------------ verdict


def _verdict(report: Routes) -> Iterator[Block]:
    yield Fact("VERDICT", f"{_summary(report)}.", _LOOKS[report.exit_code], indent=_LABEL)
    unseen = list(dict.fromkeys(text for one in report.files for text in one.not_looked_at))
    if unseen:
        yield Fact(
            "",
            f"{number_of(len(unseen), 'thing was', 'things were')} not looked at: "
            f"{'; '.join(unseen)}.",
            "warning",
            indent=_LABEL,
        )


def _summary(report: Routes) -> str:
    if len(report.files) == 1:
        (one,) = report.files
        named = sum(bool(defect.request) for defect in one.defects)
        of_all = f"{number_of(named, 'request')} of {one.num_requests:,}"
        where = of_all if named else "see below"
        words = {defect.word for defect in one.defects}
        kind = f": {words.pop()}" if len(words) == 1 and "" not in words else ""
        odd = "; ".join(dict.fromkeys(oddity.word for oddity in one.oddities))
        texts = {
            "defective": f"{one.name} cannot be read as written{kind} ({where})",
            "incomplete": f"{one.name}: {odd}. What is left: {_tokens(one)}",
            "not judged": f"{one.name} says too little by itself",
            "sound": _tokens(one),
        }
        return f"{_STATES[one.state]}: {texts[one.state]}"
    parts = [
        f"{len(files)} {words}"
        for state, words in _STATES.items()
        if (files := report.of_state(state))
    ]
    return f"of {len(report.files)} traces {', '.join(parts)}"


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
    for oddity in one.oddities:
        yield Fact("defect", f"{oddity.word}: {oddity.text}", "error", indent=_LABEL)
        yield Fact("", oddity.hint, "plain", indent=_LABEL)
    if one.defects:
        blocks: list[Block] = []
        # of one kind the first says what they all are
        alike = Counter(defect.word or f"{defect.request}: {defect.text}" for defect in one.defects)
        for defect in one.defects:
            more = alike.pop(defect.word or f"{defect.request}: {defect.text}", 0) - 1
            if more < 0 and not view.detail:
                continue
            others = f" So it is in {number_of(more, 'more request')}." if more > 0 else ""
            blocks.append(Fact("defect", defect.text + others, "error", indent=_LABEL))
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


def _fact(label: str, text: str) -> Fact:
    return Fact(label, text, "plain", indent=_LABEL)
