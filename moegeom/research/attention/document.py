"""Attention as a document: where gates are, what is free in a head, and which heads do nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from moegeom.core.router import format_layers
from moegeom.core.text import number_of, percent
from moegeom.document.excerpts import in_part, worst_excerpt
from moegeom.document.header import size
from moegeom.document.model import Block, Document, Fact, Look, Note, Table, Title, View
from moegeom.document.place import place
from moegeom.document.verdict_text import places
from moegeom.research.attention.record import Attention, AttentionLayer, HeadRange

_HEADS = (
    (
        "",
        "heads",
        "",
        "gate",
        "",
        "rank of a product",
        "",
        "Gram score of gate rows",
        "",
        "sinks",
        "",
    ),
    (
        *("layer", "all", "with values", "at", "one a", "least", "effective", "score", "random"),
        *("least", "most"),
    ),
)


def document(report: Attention, view: View) -> Document:
    """What ``moegeom research attention`` says."""
    notes = [Note(text) for text in _notes(report)]
    tables = [
        worst_excerpt(report.layers, _badness, view, partial(part, report), *also)
        for part, also in ((_on_tokens, []), (_layers, [_heads(report)]))
        if part is _layers or _recorded(report)
    ]
    return Document(
        "attention",
        report.checkpoint,
        [
            [Title(report.checkpoint, _title(report)), *_facts(report)],
            *([[table] for table in tables] if report.layers else [[]]),
            [in_part(notes, "note", view.detail, is_aside=True)] if notes else [],
        ],
        lambda: _record(report),
    )


def _title(report: Attention) -> str:
    if not report.family:
        return "no gate found."
    counts = Counter(one.gating for one in report.layers)
    gates = ", ".join(f"{count} with {_GATES[kind]}" for kind, count in counts.items())
    return f"{report.family}: {number_of(len(report.layers), 'attention layer')}, {gates}."


#: How layers are called by their gate.
_GATES = {
    "one a channel": "a gate of each channel",
    "one a head": "a gate of each head",
    "none": "no gate found",
}


def _facts(report: Attention) -> Iterator[Block]:
    if not report.family:
        yield Fact(
            "RESULT",
            f"No gate found: model_type '{report.model_type}' is none whose gates or learned sinks "
            "are known, and nothing was guessed from names.",
            "warning",
        )
        return
    for text in dict.fromkeys(map(_said, report.layers)):
        those = [one for one in report.layers if _said(one) == text]
        where = _places(report, those)
        yield Fact("RESULT", f"{where[0].upper()}{where[1:]}: {text}")
    for what, layers in (
        ("do next to nothing", [(one, one.dead) for one in report.layers]),
        (
            "are alike",
            [(one, sorted({h for a, b, _ in one.alike for h in (a, b)})) for one in report.layers],
        ),
    ):
        several = [(one, heads) for one, heads in layers if heads]
        if several:
            number = sum(len(heads) for _, heads in several)
            one, heads = several[0]
            yield Fact(
                "",
                f"{number_of(number, 'head')} {what} in {number_of(len(several), 'layer')}: "
                f"{format_layers(set(heads))} of layer {_place(report, one)}"
                f"{', ...' if len(several) > 1 else '.'}",
                "warning",
            )
    for reason in dict.fromkeys(why for _, why in report.left_out):
        names = [name for name, why in report.left_out if why == reason]
        every = (*(one.layer for one in report.layers), *(name for name, _ in report.left_out))
        where = places(names, {"routers": [{"name": name} for name in every]})
        yield Fact("", f"{where}: not looked at: {reason}.", "warning")
    yield from _tokens_facts(report)
    yield Fact("read", f"{size(report.bytes_read)} of {size(report.bytes_total)}.", "plain")


def _recorded(report: Attention) -> list[AttentionLayer]:
    return [one for one in report.layers if one.on_tokens is not None]


#: What is said of all layers: the name of a figure, that of its counterpart, and words for both.
_SENTENCES = (
    ("gate_mean", "gate_mean_random", "gates are {} on average (random rows {})"),
    ("gate_closed_share", "gate_closed_share_random", "{} are below 0.1 (random rows {})"),
    ("energy_removed_share", "", "they take away {} of the energy of what heads give"),
    ("first_token_mass", "uniform_mass", "{} of the attention is on the first token (alike: {})"),
    ("sink_mass", "", "{} goes to learned sinks"),
)


def _tokens_facts(report: Attention) -> Iterator[Fact]:
    """Figures of the recorded layers as ranges, and the layers that were not recorded."""
    if report.tokens is None:
        return
    recorded = _recorded(report)
    tokens = report.tokens
    source = (
        f"{number_of(tokens.num_tokens, 'token')} of "
        f"{number_of(tokens.num_documents, 'document')} in {tokens.name}"
    )
    if not recorded:
        yield Fact("tokens", f"none of these layers was recorded ({source}).", "warning")
        return
    parts = [
        text.format(*(_over_layers(recorded, name) for name in (figure, beside) if name))
        for figure, beside, text in _SENTENCES
        if any(figure in one.on_tokens.figures for one in recorded if one.on_tokens)
    ]
    yield Fact("tokens", f"{source}; by layer: {'; '.join(parts)}.", "plain")
    without = [
        one
        for one in recorded
        if one.on_tokens is not None and "first_token_mass" not in one.on_tokens.figures
    ]
    if without:
        yield Fact(
            "",
            f"{number_of(len(without), 'layer')} without attention weights by token: how much goes "
            "to first tokens was not looked at.",
            "warning",
        )
    if len(recorded) < len(report.layers):
        missing = number_of(len(report.layers) - len(recorded), "layer")
        yield Fact("", f"{missing} not in the recording, by weights alone.", "warning")


def _over_layers(layers: Sequence[AttentionLayer], name: str) -> str:
    means = [
        figure.mean
        for one in layers
        if one.on_tokens is not None
        and (figure := one.on_tokens.figures.get(name)) is not None
        and figure.mean is not None
    ]
    if not means:
        return "not known"
    spell = percent if name.endswith(("share", "mass", "share_random")) else "{:.2f}".format
    least, most = spell(min(means)), spell(max(means))
    return least if least == most else f"{least} to {most}"


def _said(one: AttentionLayer) -> str:
    if one.gating == "none":
        sinks = "learned sinks and no gate" if one.has_sinks else "no gate found"
        return f"{sinks}; {one.free}."
    return (
        f"{one.position}, behind the output of each head, {one.function}(W x) with "
        f"{one.gating.replace('one a', 'a number for each')}, x {one.reads}"
        f"{'; learned sinks' if one.has_sinks else ''}; {one.free}."
    )


def _places(report: Attention, layers: Sequence[AttentionLayer]) -> str:
    if len(layers) == len(report.layers) > 1:
        return "all layers"
    run = {"routers": [{"name": one.layer} for one in report.layers]}
    return places([one.layer for one in layers], run)


def _place(report: Attention, one: AttentionLayer) -> str:
    return place(one.layer, [each.layer for each in report.layers])


def _badness(one: AttentionLayer) -> float:
    return len(one.dead) + len(one.alike) / 100.0


def _layers(report: Attention, layers: Sequence[AttentionLayer]) -> Table:
    rows = [(_place(report, one), *_row(one)) for one in layers]
    looks: list[Look] = ["warning" if one.dead or one.alike else "plain" for one in layers]
    return Table(_HEADS, rows, looks, drops=(0, 0, 1, 0, 0, 0, 2, 0, 0, 3, 3))


def _row(one: AttentionLayer) -> tuple[str, ...]:
    ranks = [head.rank for head in one.heads if head.rank is not None]
    effective = [head.effective_rank for head in one.heads if head.effective_rank is not None]
    sinks = [head.sink for head in one.heads if head.sink is not None]
    random = "-"
    if one.gram_random is not None and one.gram_random_sd is not None:
        random = f"{one.gram_random:.3f} ± {one.gram_random_sd:.3f}"
    return (
        f"{one.num_heads}",
        f"{one.num_value_heads}" if one.num_value_heads else "-",
        one.position or "-",
        one.gating.removeprefix("one a ").replace("none", "-"),
        f"{min(ranks)} of {one.width}" if ranks else "-",
        f"{np.median(effective):.1f}" if effective else "-",
        "-" if one.gram is None else f"{one.gram:.3f}",
        random,
        f"{min(sinks):.3g}" if sinks else "-",
        f"{max(sinks):.3g}" if sinks else "-",
    )


#: Columns of the figures on tokens: name, what stands above it and those beside it, heading, and
#: when it goes where there is no room.
_TOKEN_COLUMNS = (
    ("gate_mean", "gate", "mean", 0),
    ("gate_mean_random", "gate", "random", 0),
    ("gate_closed_share", "below 0.1", "share", 0),
    ("gate_closed_share_random", "below 0.1", "random", 2),
    ("gate_entropy_nats", "entropy", "nats", 6),
    ("energy_removed_share", "energy", "removed", 0),
    ("first_token_mass", "attention on first", "token", 0),
    ("uniform_mass", "attention on first", "alike", 3),
    ("sink_mass", "on", "sinks", 4),
    ("gate_first_correlation", "first token", "and gate", 1),
    ("gate_pull", "pull of the mean", "gate", 5),
    ("gate_pull_random", "pull of the mean", "random", 5),
)

#: Figures whose interval is shown.
_WITH_WIDTH = ("gate_mean", "energy_removed_share", "first_token_mass", "gate_first_correlation")


def _on_tokens(report: Attention, layers: Sequence[AttentionLayer]) -> Table:
    """Means over heads with 95 % intervals over documents; without what no layer has."""
    figures = {one.layer: one.on_tokens.figures for one in _recorded(report) if one.on_tokens}
    columns = [one for one in _TOKEN_COLUMNS if any(one[0] in names for names in figures.values())]
    above = [group for _, group, _, _ in columns]
    groups = ["" if group in above[:place] else group for place, group in enumerate(above)]
    rows = [
        (
            _place(report, one),
            *(_spelled(name, figures[one.layer].get(name)) for name, *_ in columns),
        )
        for one in layers
        if one.layer in figures
    ]
    heads = (("", *groups), ("layer", *(head for _, _, head, _ in columns)))
    return Table(heads, rows, drops=(0, *(drop for *_, drop in columns)))


def _spelled(name: str, figure: HeadRange | None) -> str:
    if figure is None or figure.mean is None:
        return "-"
    has_width = name in _WITH_WIDTH and figure.half_width is not None
    return f"{figure.mean:.3f}" + (f" ± {figure.half_width:.3f}" if has_width else "")


_HEAD_HEADS = (
    *("layer", "head", "values", "rank", "effective", "length of product", "gate length"),
    *("Gram score", "sink"),
)


def _heads(report: Attention) -> Table:
    def said(value: float | None, spec: str = ".3g") -> str:
        return "-" if value is None else format(value, spec)

    rows = [
        (
            _place(report, one),
            f"{head.head}",
            said(head.value_head, "d"),
            said(head.rank, "d"),
            said(head.effective_rank, ".1f"),
            said(head.product_norm),
            said(head.gate_norm),
            said(head.gate_gram, ".3f"),
            said(head.sink),
        )
        for one in report.layers
        for head in one.heads
    ]
    return Table([_HEAD_HEADS], rows)


def _notes(report: Attention) -> Iterator[str]:
    if not report.layers:
        return
    if any(one.position for one in report.layers):
        yield (
            "The gate is a function of what attention reads at the token, such as sigma(W x). "
            "Gates that theory is about are phi of the head's own output: what it proves of them "
            "does not carry over (docs/attention.md)."
        )
    yield (
        "'product' is the output matrix of a head times its value matrix: hidden x hidden, of a "
        "rank of at most the channels. A head does next to nothing where its product is shorter "
        "than 1 % of the median of the layer; two are alike from a cosine of .99 on."
    )
    if any(one.sink_is_projection for one in report.layers):
        yield "Sinks are projections of the attention input: their lengths are shown, not logits."
    elif any(one.has_sinks for one in report.layers):
        yield "A sink is a logit of each head that belongs to no token: what it takes adds nothing."
    yield from (f"{note[:1].upper()}{note[1:]}." for note in report.notes)
    if report.tokens is None:
        yield (
            "Weights alone: how far gates close on text was not looked at (moegeom capture --keep "
            "attention, then --tokens)."
        )
    else:
        yield (
            "On tokens: means over heads, ± 95 % over documents; a random gate has rows of the "
            "same lengths in random directions. 'alike': what the first token would have if a "
            "query saw all of its keys alike. Attention is that of queries from the fifth token on."
        )
    if report.written:
        yield f"A row for each head of each layer written to {report.written}."


def _record(report: Attention) -> Mapping[str, Any]:
    record = dataclasses.asdict(report)
    for layer, entry in zip(report.layers, record["layers"], strict=True):
        entry["free"] = layer.free
    return record
