"""Attention as a document: where gates are, what is free in a head, and which heads do nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from moegeom.core.router import format_layers
from moegeom.core.text import figure_text, number_of, percent
from moegeom.document.chart import Axis, Chart, Heat, Numbers, Panel, padded
from moegeom.document.excerpts import worst_excerpt
from moegeom.document.header import size
from moegeom.document.model import Block, Document, Fact, Gallery, Look, Table, Title, View
from moegeom.document.place import place
from moegeom.document.study import Column, page, table_of
from moegeom.document.summary import Summary
from moegeom.document.verdict_text import places
from moegeom.research.attention.record import Attention, AttentionLayer, HeadRange


def document(report: Attention, view: View) -> Document:
    """What ``moegeom research attention`` says."""
    tables = [
        worst_excerpt(report.layers, _badness, view, partial(part, report), *also)
        for part, also in ((_on_tokens, []), (_layers, [_heads(report)]))
        if report.layers and (part is _layers or _figures(report))
    ]
    return page(
        "research attention",
        report.checkpoint,
        view,
        [Title(report.checkpoint, _title(report)), *_facts(report)],
        [Gallery(lambda: [*attention_figures(report)])],
        *([table] for table in tables),
        notes=_notes(report),
        record=lambda: _record(report),
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
    summary = Summary({}, [{"router": one.layer} for one in report.layers], [], [], [])
    for text in dict.fromkeys(map(_sentence, report.layers)):
        where = summary.places([one.layer for one in report.layers if _sentence(one) == text])
        yield Fact("RESULT", f"{where[0].upper()}{where[1:]}: {text}")
    for what, heads_of in (("do next to nothing", lambda one: one.dead), ("are alike", _alike)):
        several = [(one, heads) for one in report.layers if (heads := heads_of(one))]
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


def _alike(one: AttentionLayer) -> set[int]:
    return {head for *pair, _ in one.alike for head in pair}


def _figures(report: Attention) -> dict[str, Mapping[str, HeadRange]]:
    """Figures of each recorded layer."""
    return {one.layer: one.on_tokens.figures for one in report.layers if one.on_tokens}


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
    recorded, tokens = [*_figures(report).values()], report.tokens
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
        if any(figure in figures for figures in recorded)
    ]
    yield Fact("tokens", f"{source}; by layer: {'; '.join(parts)}.", "plain")
    if without := sum("first_token_mass" not in figures for figures in recorded):
        yield Fact(
            "",
            f"{number_of(without, 'layer')} without attention weights by token: how much goes "
            "to first tokens was not looked at.",
            "warning",
        )
    if missing := len(report.layers) - len(recorded):
        text = f"{number_of(missing, 'layer')} not in the recording, by weights alone."
        yield Fact("", text, "warning")


def _over_layers(recorded: Sequence[Mapping[str, HeadRange]], name: str) -> str:
    ranges = [figures[name] for figures in recorded if name in figures]
    means = [one.mean for one in ranges if one.mean is not None]
    if not means:
        return "not known"
    spell = percent if name.endswith(("share", "mass", "share_random")) else "{:.2f}".format
    least, most = spell(min(means)), spell(max(means))
    return least if least == most else f"{least} to {most}"


def _sentence(one: AttentionLayer) -> str:
    if one.gating == "none":
        sinks = "learned sinks and no gate" if one.has_sinks else "no gate found"
        return f"{sinks}; {one.free}."
    return (
        f"{one.position}, behind the output of each head, {one.function}(W x) with "
        f"{one.gating.replace('one a', 'a number for each')}, x {one.reads}"
        f"{'; learned sinks' if one.has_sinks else ''}; {one.free}."
    )


def _place(report: Attention, one: AttentionLayer) -> str:
    return place(one.layer, [each.layer for each in report.layers])


def _badness(one: AttentionLayer) -> float:
    return len(one.dead) + len(one.alike) / 100.0


def _layers(report: Attention, layers: Sequence[AttentionLayer]) -> Table:
    looks: list[Look] = ["warning" if one.dead or one.alike else "plain" for one in layers]
    layer = ("", "layer", 0, partial(_place, report))
    return table_of([layer, *_LAYER_COLUMNS], layers, looks=looks)


def _of_heads(one: AttentionLayer, name: str, text: Callable[[list[Any]], str]) -> str:
    """A figure of the heads that have it."""
    values = [value for head in one.heads if (value := getattr(head, name)) is not None]
    return text(values) if values else "-"


def _random(one: AttentionLayer) -> str:
    if one.gram_random is None or one.gram_random_sd is None:
        return "-"
    return f"{one.gram_random:.3f} ± {one.gram_random_sd:.3f}"


def _text(value: float | None, spec: str = ".3g") -> str:
    return "-" if value is None else format(value, spec)


_LAYER_COLUMNS: tuple[Column, ...] = (
    ("heads", "all", 0, lambda one: f"{one.num_heads}"),
    ("", "with values", 1, lambda one: f"{one.num_value_heads or '-'}"),
    ("gate", "at", 0, lambda one: one.position or "-"),
    ("", "one a", 0, lambda one: one.gating.removeprefix("one a ").replace("none", "-")),
    ("rank of a product", "least", 0,
     lambda one: _of_heads(one, "rank", lambda ranks: f"{min(ranks)} of {one.width}")),
    ("", "effective", 2,
     lambda one: _of_heads(one, "effective_rank", lambda ranks: f"{np.median(ranks):.1f}")),
    ("Gram score of gate rows", "score", 0, lambda one: _text(one.gram, ".3f")),
    ("", "random", 0, _random),
    ("sinks", "least", 3, lambda one: _of_heads(one, "sink", lambda sinks: f"{min(sinks):.3g}")),
    ("", "most", 3, lambda one: _of_heads(one, "sink", lambda sinks: f"{max(sinks):.3g}")),
)  # fmt: skip


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
    figures = _figures(report)
    columns = [one for one in _TOKEN_COLUMNS if any(one[0] in names for names in figures.values())]
    above = [group for _, group, _, _ in columns]
    table: list[Column] = [("", "layer", 0, partial(_place, report))]
    for number, (name, group, head, drop) in enumerate(columns):
        label = "" if group in above[:number] else group
        table.append(
            (label, head, drop, lambda one, n=name: _spelled(n, figures[one.layer].get(n)))
        )
    return table_of(table, [one for one in layers if one.layer in figures])


def _spelled(name: str, figure: HeadRange | None) -> str:
    if figure is None or figure.mean is None:
        return "-"
    has_width = name in _WITH_WIDTH and figure.half_width is not None
    return f"{figure.mean:.3f}" + (f" ± {figure.half_width:.3f}" if has_width else "")


#: Heading, and figure of a head with its format.
_HEAD_COLUMNS = (
    ("head", "head", "d"),
    ("values", "value_head", "d"),
    ("rank", "rank", "d"),
    ("effective", "effective_rank", ".1f"),
    ("length of product", "product_norm", ".3g"),
    ("gate length", "gate_norm", ".3g"),
    ("Gram score", "gate_gram", ".3f"),
    ("sink", "sink", ".3g"),
)


def _heads(report: Attention) -> Table:
    rows = [
        (
            _place(report, one),
            *(_text(getattr(head, name), spec) for _, name, spec in _HEAD_COLUMNS),
        )
        for one in report.layers
        for head in one.heads
    ]
    return Table([("layer", *(heading for heading, *_ in _HEAD_COLUMNS))], rows)


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


# ------------------------------------------------------------------------------------------ figures
#: What is drawn of each head by its weights, and on tokens; lengths over the median of the layer,
#: shares in percent.
_BY_WEIGHTS = {
    "product_norm": "length of the product / median of layer",
    "effective_rank": "effective rank of the product",
    "gate_norm": "length of gate rows / median of layer",
    "sink": "sink",
}
_BY_TOKENS = {
    "gate_mean": "mean of the gate",
    "gate_closed_share": "gates below 0.1, %",
    "energy_removed_share": "energy that the gate removes, %",
    "first_token_mass": "attention on the first token, %",
    "sink_mass": "attention on sinks, %",
}

#: Heads up to which maps stand side by side.
_FEW_HEADS = 16

#: Lengths over the median that have the full colour.
_SHORT, _LONG = 0.125, 8.0


def attention_figures(report: Attention) -> Iterator[Chart]:
    """Heads by layer: what their weights are, and what they did on tokens if that was recorded."""
    weights = [[vars(head) for head in one.heads] for one in report.layers]
    tokens = [one.on_tokens.heads if one.on_tokens else () for one in report.layers]
    for name, title, heads, texts, shows, shows_not in (
        (
            "heads",
            "Heads by their weights",
            weights,
            _BY_WEIGHTS,
            (
                "How long the output matrix of each head times its value matrix is, on how many "
                "directions that acts, how long its gate rows are, its sink; what the layer has. A "
                "head far shorter than the others of its layer does next to nothing."
            ),
            "What heads do on text: weights alone do not say whom they attend to.",
        ),
        (
            "tokens",
            "Heads on the recorded tokens",
            tokens,
            _BY_TOKENS,
            (
                "How open the gate of each head is, how often it is below 0.1, what it takes away, "
                "and how much of the attention is on the first token, and on sinks."
            ),
            "Other texts, and what a model loses without a head.",
        ),
    ):
        maps = list(_maps(report, heads, texts))
        if not maps:
            continue
        rows = [
            (one.layer, number, head)
            for one, layer in zip(report.layers, heads, strict=True)
            for number, head in enumerate(layer)
        ]
        yield Chart(
            name,
            title,
            shows,
            shows_not,
            f"{'; '.join(range_of for _, range_of in maps)}.",
            [panel for panel, _ in maps],
            [
                ("layer", [layer for layer, _, _ in rows]),
                ("head", [number for _, number, _ in rows]),
                *((column, [head.get(column) for *_, head in rows]) for column in texts),
            ],
        )


def _maps(
    report: Attention, heads: Sequence[Sequence[Mapping[str, Any]]], texts: Mapping[str, str]
) -> Iterator[tuple[Panel, str]]:
    """A map for each figure that some head has, and its range in words."""
    widest = max(map(len, heads), default=0)
    x = Axis("head", names=[str(number) for number in range(widest)])
    y = Axis("layer", names=[_place(report, one) for one in report.layers])
    for column, text in texts.items():
        rows = [_scaled(column, [head.get(column) for head in layer]) for layer in heads]
        numbers = [value for row in rows for value in row if value is not None]
        if not numbers:
            continue
        least, most = min(numbers), max(numbers)
        rows = padded(rows, widest)
        heat = Heat(rows, text, min(0.0, least), most or 1.0, 0.0 if least < 0.0 else None)
        if column.endswith("_norm"):
            heat = Heat(rows, text, _SHORT, _LONG, 1.0, "log2")
        panel = Panel("", x, y, [heat], is_wide=widest > _FEW_HEADS)
        yield panel, f"{text} {figure_text(least)} to {figure_text(most)}"


def _scaled(column: str, values: Numbers) -> Numbers:
    factor = 100.0 if column.endswith(("_share", "_mass")) else 1.0
    if column.endswith("_norm"):
        factor = 1.0 / (float(np.median([v for v in values if v is not None] or [1.0])) or 1.0)
    return [None if value is None else factor * value for value in values]
