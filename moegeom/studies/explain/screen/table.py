"""The screen: both sides, the verdict, the hypotheses, the layers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from moegeom.core.text import number_of
from moegeom.document._reporter import Reporter, View
from moegeom.document.header import gate_rule_line, routers_line, rule_line, tokens_line
from moegeom.document.screen import STYLES, aligned, hanging, labelled, titled, to_text, wrapped
from moegeom.document.untrusted import printable
from moegeom.studies.explain.screen._explanation import Explanation, LayerEvidence
from moegeom.studies.explain.screen._wording import (
    details,
    equal,
    first_seen,
    growth,
    is_held_back,
    layer_heads,
    limits,
    mean_share,
    mood,
    percent,
    ranked,
    shown_layers,
    sides,
    summary_of,
    ties_legend,
    verdict_text,
    whose_inputs,
)

_LAYER_HEADS = (
    ("", "equal", "agreed", "of these", "noise", "noise on", "beyond"),
    ("layer", "sets", "before", "switch", "makes", "input", "noise"),
)


def render(explanation: Explanation, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    explanation = printable(explanation)
    parts = (
        _header(explanation, view.width),
        _verdict(explanation, view.width),
        _hypotheses(explanation, view),
        _layers(explanation, view),
        _ending(explanation, view.width),
    )
    lines: list[Text] = []
    for part in parts:
        lines += [Text(), *part] if lines and part else part
    return to_text(lines, view)


def _header(explanation: Explanation, width: int) -> list[Text]:
    run, summary = explanation.run, summary_of(explanation)
    return [
        *titled(run["checkpoint"]["name"], rule_line(summary), width),
        *labelled("routers", routers_line(summary), width),
        *labelled("rule", gate_rule_line(run), width),
        *labelled("A", tokens_line(summary), width),
        *(line for label, text in sides(explanation) for line in labelled(label, text, width)),
    ]


def _verdict(explanation: Explanation, width: int) -> list[Text]:
    lines = labelled("VERDICT", verdict_text(explanation), width, STYLES[mood(explanation)])
    remedy = explanation.verdict.remedy
    return [*lines, *(labelled("next", remedy, width) if remedy else [])]


def _hypotheses(explanation: Explanation, view: View) -> list[Text]:
    names = ranked(explanation, view.all_layers)
    if not names or explanation.verdict.cause == "no disagreement":
        return []
    verdict, layers = explanation.verdict, explanation.layers
    own = next((layer for layer in layers if layer.router == verdict.router), layers[0])
    places = summary_of(explanation)
    heads = ["first layer", *([places.places([own.router])] if own is not layers[0] else [])]
    heads.append("all layers")
    rows = [("", *heads)]
    for name in names:
        tried = first_seen(explanation, name)
        cells = [layers[0].tried_as(name)]
        cells += [own.tried_as(name)] if own is not layers[0] else []
        shares = ["-" if found is None else equal(found.share) for found in cells]
        arrow = "->" if name == verdict.hypothesis else "  "
        star = " *" if is_held_back(explanation, name) else ""
        rows.append((f"{arrow} {tried.text}{star}", *shares, equal(mean_share(explanation, name))))
    lines = hanging("why?     ", whose_inputs(explanation), view.width, "bold")
    lines += _styled(_narrowed(rows, view.width - 6), "      ", 1)
    rest = explanation.num_tried + 1 - len(names)
    if rest:
        no_better = f"{rest} others reproduce no more in all layers: --all-layers"
        lines += hanging("         ", no_better, view.width, "dim")
    if legend := ties_legend(explanation, names):
        lines += hanging("         ", legend, view.width, "dim")
    return lines


def _layers(explanation: Explanation, view: View) -> list[Text]:
    if explanation.verdict.cause == "no disagreement":
        return []
    shown = shown_layers(explanation, view.all_layers)
    rows = [*_LAYER_HEADS, *(_cells(layer, explanation) for layer in shown)]
    told = layer_heads(explanation)
    lines = hanging("left     ", told, view.width, "bold") if told else []
    lines += _styled(rows, "  ", len(_LAYER_HEADS))
    if rest := len(explanation.layers) - len(shown):
        lines.append(Text(f"  and {number_of(rest, 'more layer')}: --all-layers", style="dim"))
    return lines


def _cells(layer: LayerEvidence, explanation: Explanation) -> tuple[str, ...]:
    noise = layer.noise
    noisy = ("-", "-", "-", "-")
    if noise is not None:
        noisy = (
            percent(noise.observed),
            percent(noise.expected),
            percent(noise.scale),
            f"{noise.num_beyond:,}",
        )
    return (
        summary_of(explanation).place(layer.router),
        equal(layer.agreement),
        f"{layer.num_clean:,}",
        *noisy,
    )


def _narrowed(rows: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """The rows with names folded so that a table of them has at most ``width`` columns."""
    figures = list(zip(*rows, strict=True))[1:]
    room = width - sum(2 + max(map(len, column)) for column in figures)
    found: list[tuple[str, ...]] = []
    for name, *cells in rows:
        parts = wrapped(name, room, "     ") or [""]
        found.append((parts[0], *cells))
        found += [(part, *("" for _ in cells)) for part in parts[1:]]
    return found


def _styled(rows: Sequence[Sequence[str]], indent: str, num_heads: int) -> list[Text]:
    """The rows as a table; headings dim, the hypothesis of the verdict bold."""
    lines = []
    for number, (row, line) in enumerate(zip(rows, aligned(rows), strict=True)):
        style = "dim" if number < num_heads else "bold" if row[0].startswith("->") else ""
        lines.append(Text((indent + line).rstrip(), style=style))
    return lines


def _ending(explanation: Explanation, width: int) -> list[Text]:
    told = [growth(explanation), *details(explanation)]
    lines = [Text(part) for text in told if text for part in wrapped(text, width)]
    lines += [
        Text(part, style=STYLES["summary"])
        for text in limits(explanation)
        for part in wrapped(text, width)
    ]
    return lines


REPORTER = Reporter("table", render)
