"""Figures of an explanation: what each fault explains, and where the two runs part."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.text import figure_text, number_of, percent
from moegeom.document.chart import Axis, Bars, Chart, Panel, Polyline
from moegeom.document.place import place
from moegeom.studies.explain.record import Explanation

#: Faults that are drawn.
_MOST = 12


def explanation_figures(report: Explanation) -> list[Chart]:
    """Nothing where A and B agree everywhere."""
    return [*_faults(report), *_layers(report)]


def _faults(report: Explanation) -> Iterator[Chart]:
    worth = [fault for fault in report.faults if fault.bits > 0.0]
    if not worth:
        return
    faults = worth[:_MOST]
    named = [f for f in faults if f.name in report.verdict.faults]
    names = [f"{f.text}{f', {f.scope}' if f.scope else ''}" for f in faults]
    marks = [
        Bars(text, role, [f.bits if (f in named) == is_named else None for f in faults])
        for text, role, is_named in (("named", "other", True), ("not named", "tokens", False))
        if any((f in named) == is_named for f in faults)
    ]
    caption = f"{names[0]} saves {figure_text(faults[0].bits)} bits"
    if len(faults) > 1:
        caption += f", the next, {names[1]}, {figure_text(faults[1].bits)}"
    yield Chart(
        "faults",
        "What explains the differences",
        "How many bits each fault saves when B's choices are told by A's router with that fault, "
        "less the bits that tell the fault. One bit more makes it twice as likely.",
        "Faults that were not tried, and causes outside the router.",
        f"{number_of(report.num_tried, 'fault')} tried; {caption}.",
        [Panel("", Axis("bits saved", low=0.0), Axis("", names=names), marks)],
        [
            ("fault", [f.text for f in report.faults]),
            ("scope", [f.scope or "all" for f in report.faults]),
            ("bits", [f.bits for f in report.faults]),
            ("explained", [f.explained for f in report.faults]),
        ],
    )


def _layers(report: Explanation) -> Iterator[Chart]:
    layers = report.layers
    if all(layer.agreement == 1.0 for layer in layers):
        return
    names = [place(layer.router, (each.router for each in layers)) for layer in layers]
    at = list(range(len(layers)))
    share = [layer.num_clean / layer.num_tokens if layer.num_tokens else None for layer in layers]
    first = next(i for i, layer in enumerate(layers) if layer.agreement < 1.0)
    least = min(at, key=lambda i: layers[i].agreement)
    equal = [percent(layers[i].agreement, ".3g") for i in (first, least)]
    yield Chart(
        "agreement",
        "Where the two runs part",
        "The share of tokens with equal sets of experts in each layer, and of those that agreed in "
        "every layer before it: from the first layer that differs on, the rest may only follow.",
        "Why: see the faults.",
        f"The first layer that differs is {names[first]}, {equal[0]} equal; the least equal is "
        f"{names[least]}, {equal[1]}.",
        [
            Panel(
                "",
                Axis("layer", names=names),
                Axis("share of tokens", high=1.0),
                [
                    Bars("equal sets", "tokens", [layer.agreement for layer in layers]),
                    Polyline("agreed in every layer before", "random", at, share),
                ],
            )
        ],
        [
            ("router", [layer.router for layer in layers]),
            ("agreement", [layer.agreement for layer in layers]),
            ("num_clean", [layer.num_clean for layer in layers]),
            ("num_tokens", [layer.num_tokens for layer in layers]),
        ],
    )
