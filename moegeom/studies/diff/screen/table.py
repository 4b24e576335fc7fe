"""The screen: both sides, the verdict, a line for each changed router, changed figures."""

from __future__ import annotations

from rich.text import Text

from moegeom.core.text import number_of
from moegeom.document._reporter import Reporter, View
from moegeom.document.header import size
from moegeom.document.screen import STYLES, aligned, hanging, labelled, titled, to_text, wrapped
from moegeom.document.untrusted import printable
from moegeom.studies.diff.screen._difference import (
    Difference,
    FigureChange,
    Figures,
    RouterChange,
    Side,
)
from moegeom.studies.diff.screen._wording import (
    by_column,
    described,
    detectable,
    figures_sentence,
    left_out,
    meanings,
    mood,
    unchanged_beside,
    verdict_sentence,
    warnings,
    where,
)

#: Lines of routers, and of figures, before the rest is counted.
_MOST_LINES = 12

_HEADINGS = ("figure", "routers", "worst in", "A", "B", "change +- error", "p")

#: Columns that stay on a narrow screen: without the values of A and B.
_NARROW = (0, 1, 2, 5, 6)


def render(difference: Difference, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    difference = printable(difference)
    first, second = difference.sides
    parts = (
        [*_side("A", first, view.width), *_side("B", second, view.width)],
        _verdict(difference, view.width),
        _routers(difference, view),
        _meanings(difference, view.width),
        [] if difference.figures is None else _figures(difference, difference.figures, view),
        _ending(difference, view.width),
    )
    lines: list[Text] = []
    for part in parts:
        lines += [Text(""), *part] if part and lines else part
    return to_text(lines, view)


def _side(name: str, side: Side, width: int) -> list[Text]:
    lines = titled(f"{name}  {side.name}", f"{side.rule}.", width)
    read = "results"
    if side.bytes_total:
        part = side.bytes_read < side.bytes_total
        read = f"read {size(side.bytes_read)}" + (f" of {size(side.bytes_total)}" if part else "")
    tokens = f" Tokens: {side.tokens}." if side.tokens else ""
    plural = "" if side.num_routers == 1 else "s"
    return [*lines, *labelled("", f"{side.num_routers} router{plural}, {read}.{tokens}", width)]


def _verdict(difference: Difference, width: int) -> list[Text]:
    lines = []
    for text in warnings(difference):
        lines += labelled("UNLIKE", text, width, STYLES["error"])
    return [
        *lines,
        *labelled("VERDICT", verdict_sentence(difference), width, STYLES[mood(difference)]),
    ]


def _routers(difference: Difference, view: View) -> list[Text]:
    changed = [router for router in difference.routers if not router.is_identical]
    shown = changed
    if len(changed) > _MOST_LINES and not view.all_layers:
        shown = sorted(changed, key=_largest, reverse=True)[:_MOST_LINES]
    lines = []
    for router in shown:
        lines += _router(router, difference, view.width)
    for said, routers in unchanged_beside(difference).items():
        lines += hanging(f"{where(routers, difference)}  ", said, view.width, "dim")
    if rest := len(changed) - len(shown):
        lines.append(Text(f"and {rest} more that moved less: --all-layers", style="dim"))
    return lines


def _router(router: RouterChange, difference: Difference, width: int) -> list[Text]:
    """A line for each thing that happened, and what is told beside them."""
    head = f"{where((router.router,), difference):<{len('layer 10')}}  "
    said = [
        f"{described(change)}: {change.detail}." if change.detail else f"{described(change)}."
        for change in router.changes
    ]
    if router.beside:
        said[-1] += f" ({', '.join(router.beside)})"
    heads = [head, *(" " * len(head) for _ in said[1:])]
    found = [
        hanging(h, text, width, STYLES["warning"]) for h, text in zip(heads, said, strict=True)
    ]
    return [line for lines in found for line in lines]


def _largest(router: RouterChange) -> float:
    """Changes without a size (other experts, another order) come first."""
    return max(float("inf") if change.size is None else change.size for change in router.changes)


def _meanings(difference: Difference, width: int) -> list[Text]:
    lines = []
    for word, meaning in meanings(difference).items():
        lines += labelled("means", f"{word}: {meaning}", width, "dim")
    return lines


def _figures(difference: Difference, figures: Figures, view: View) -> list[Text]:
    lines = labelled("figures", figures_sentence(figures), view.width)
    if figures.significant:
        lines += _table(difference, figures, view)
    for text in (detectable(figures), *left_out(figures)):
        lines += [Text(part, style="dim") for part in wrapped(text, view.width)]
    return lines


def _table(difference: Difference, figures: Figures, view: View) -> list[Text]:
    """One line for each figure, at its worst router; all of them with ``all_layers``."""
    if view.all_layers:
        chosen = [(test, "") for test in figures.significant]
        shown = chosen
    else:
        chosen = [(test, f"{count} of {total}") for test, count, total in by_column(figures)]
        shown = chosen[:_MOST_LINES]
    rows = [_HEADINGS, *(_cells(test, count, difference) for test, count in shown)]
    lines = aligned(rows)
    if max(map(len, lines)) > view.width:
        lines = aligned([[row[column] for column in _NARROW] for row in rows])
    styles = ["dim", *("" for _ in shown)]
    found = [Text(line, style=style) for line, style in zip(lines, styles, strict=True)]
    if rest := len(chosen) - len(shown):
        found.append(Text(f"and {number_of(rest, 'more figure')}: --all-layers", style="dim"))
    return found


def _cells(test: FigureChange, count: str, difference: Difference) -> tuple[str, ...]:
    p_value = "<1e-9" if test.p_value < 1e-9 else f"{test.p_value:.0e}"
    return (
        test.column,
        count,
        where((test.router,), difference),
        f"{test.before:.3g}",
        f"{test.after:.3g}",
        f"{test.change:+.2g} +- {test.error:.1g}",
        p_value,
    )


def _ending(difference: Difference, width: int) -> list[Text]:
    said = [*difference.notes]
    if difference.not_looked_at:
        said.append(f"Not looked at: {'; '.join(difference.not_looked_at)}.")
    return [Text(part, style="dim") for text in said for part in wrapped(text, width)]


REPORTER = Reporter("table", render)
