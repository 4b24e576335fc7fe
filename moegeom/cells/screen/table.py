"""The screen: what was read, then a block for every router and for every answer."""

from __future__ import annotations

from rich.text import Text

from moegeom.cells.screen._enumeration import Enumerations, RouterCells
from moegeom.cells.screen._wording import answer_sentences, sentences, summary_of
from moegeom.core.text import number_of
from moegeom.document._reporter import Reporter, View
from moegeom.document.header import gate_rule_line, routers_line, rule_line, tokens_line
from moegeom.document.screen import STYLES, labelled, titled, to_text
from moegeom.document.untrusted import printable

#: Blocks before the rest is counted.
_MOST_BLOCKS = 6


def render(found: Enumerations, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    found = printable(found)
    shown = found.routers if view.all_layers else found.routers[:_MOST_BLOCKS]
    parts = [
        _header(found, view.width),
        *(_router(router, view.width) for router in shown),
        _answers(found, view.width),
        _ending(found, len(found.routers) - len(shown), view.width),
    ]
    lines: list[Text] = []
    for part in parts:
        lines += [Text(), *part] if lines and part else part
    return to_text(lines, view)


def _header(found: Enumerations, width: int) -> list[Text]:
    summary = summary_of(found)
    if summary is None or found.run is None:
        return titled(found.name, "a bare matrix: logits W x + b, the k largest are chosen.", width)
    lines = titled(found.name, rule_line(summary), width)
    lines += labelled("routers", routers_line(summary), width)
    lines += labelled("rule", gate_rule_line(found.run), width)
    return lines + labelled("tokens", tokens_line(summary), width)


def _router(router: RouterCells, width: int) -> list[Text]:
    experts = "1 expert" if router.num_experts == 1 else f"{router.num_experts} experts"
    head = f"{router.router}  {experts}, top-{router.top_k}"
    lines = [Text(head, style="bold")]
    for label, text in sentences(router):
        style = STYLES["warning"] if router.outcome == "unfinished" and label == "cells" else "bold"
        lines += labelled(label, text, width, style)
    return lines


def _answers(found: Enumerations, width: int) -> list[Text]:
    lines: list[Text] = []
    for answer in found.answers:
        head, *rest = answer_sentences(answer)
        style = STYLES["good"] if answer.is_cell else STYLES["warning"]
        lines += labelled("CELL" if answer.is_cell else "NO CELL", head, width, style)
        for text in rest:
            lines += labelled("", text, width)
    return lines


def _ending(found: Enumerations, rest: int, width: int) -> list[Text]:
    lines: list[Text] = []
    if rest:
        lines.append(Text(f"and {number_of(rest, 'more router')}: --all-layers", style="dim"))
    for router, why in found.left_out:
        lines += labelled("left out", f"{router}: {why}.", width, "dim")
    if found.written is not None:
        lines += labelled("written", f"{found.written}: {', '.join(found.files)}", width)
    elif found.files:
        lines += labelled("written", ", ".join(found.files), width)
    return lines


REPORTER = Reporter("table", render)
