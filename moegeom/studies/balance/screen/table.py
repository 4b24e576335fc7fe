"""The screen: what was read, what the figures mean, a line for each router."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from moegeom.document._reporter import Reporter, View
from moegeom.document.header import gate_rule_line, routers_line, rule_line, skipped, tokens_line
from moegeom.document.screen import STYLES, hanging, labelled, titled, to_text, wrapped
from moegeom.document.untrusted import printable
from moegeom.studies.balance.record import Balance, RouterBalance
from moegeom.studies.balance.screen._wording import (
    figure,
    limits,
    mood,
    percent,
    pushed,
    remarks,
    sample_line,
    summary_of,
    verdicts,
)

#: Lines of routers before the rest is counted.
_MOST_LINES = 12

_HEADINGS = (
    ("", "MaxVio", "", "", "", "", "CV", "", "", "bias change", "", "sets", "weight"),
    (
        *("layer", "now", "chance", "these", "others", "chance", "now", "these", "others"),
        *("largest", "spreads", "changed", "moved"),
    ),
)

#: Columns that stay on a narrow screen: without CV.
_NARROW = (0, 1, 2, 3, 4, 5, 9, 10, 11, 12)


def render(balance: Balance, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    balance = printable(balance)
    parts = (
        _header(balance, view.width),
        _meanings(balance, view.width),
        _routers(balance, view),
        _pushes(balance, view),
        _ending(balance, view.width),
    )
    lines: list[Text] = []
    for part in parts:
        lines += [Text(), *part] if lines and part else part
    return to_text(lines, view)


def _header(balance: Balance, width: int) -> list[Text]:
    run, summary = balance.run, summary_of(balance)
    return [
        *titled(run["checkpoint"]["name"], rule_line(summary), width),
        *labelled("routers", routers_line(summary), width),
        *labelled("rule", gate_rule_line(run), width),
        *labelled("tokens", tokens_line(summary), width),
        *labelled("sample", sample_line(balance), width),
    ]


def _meanings(balance: Balance, width: int) -> list[Text]:
    style, lines = STYLES[mood(balance)], []
    for number, (_, places, sentence) in enumerate(verdicts(balance)):
        label = "MEANS" if number == 0 else ""
        lines += labelled(label, f"{places}: {sentence}", width, style)
    for places, text in remarks(balance):
        lines += labelled("", f"{places}: {text}", width, style)
    return lines


def _routers(balance: Balance, view: View) -> list[Text]:
    shown, rest = _shown(balance, view)
    rows = [*_HEADINGS, *(_cells(router, balance) for router in shown)]
    lines = _aligned(rows, range(len(_HEADINGS[0])))
    if max(map(len, lines)) > view.width:
        lines = _aligned(rows, _NARROW)
    styles = ["dim", "dim", *("" for _ in shown)]
    found = [Text(line, style=style) for line, style in zip(lines, styles, strict=True)]
    if rest:
        found.append(Text(f"and {rest} more that were more even: --all-layers", style="dim"))
    return found


def _pushes(balance: Balance, view: View) -> list[Text]:
    """Which experts the bias pushes most, where loads are uneven."""
    shown = [router for router in _shown(balance, view)[0] if router.meaning != "balanced"]
    lines = [Text("experts that the bias moves most", style="dim")] if shown else []
    for router in shown:
        head = f"{summary_of(balance).places([router.router]):<10}"
        lines += hanging(head, f"{pushed(router)}  ({router.score_unit})", view.width, "")
    return lines


def _shown(balance: Balance, view: View) -> tuple[list[RouterBalance], int]:
    """The routers that get a line, in the order of the checkpoint, and how many do not."""
    routers = list(balance.routers)
    if view.all_layers or len(routers) <= _MOST_LINES:
        return routers, 0
    worst = sorted(routers, key=lambda r: -r.before.max_vio)[:_MOST_LINES]
    return [r for r in routers if r in worst], len(routers) - len(worst)


def _cells(router: RouterBalance, balance: Balance) -> tuple[str, ...]:
    worst = router.worst
    ratio = router.largest_change / router.spread if router.spread else float("nan")
    others = ("-", "-") if worst is None else (figure(worst.after.max_vio), figure(worst.limit))
    return (
        summary_of(balance).place(router.router),
        figure(router.before.max_vio),
        figure(router.limit),
        figure(router.after.max_vio),
        *others,
        figure(router.before.cv),
        figure(router.after.cv),
        "-" if worst is None else figure(worst.after.cv),
        f"{router.largest_change:.2g}",
        figure(ratio),
        percent(router.changed_share),
        percent(router.displaced_weight),
    )


def _aligned(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> list[str]:
    """The cells of these columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows[1:]) for column in columns]
    lines = []
    for number, row in enumerate(rows):
        line = ""
        for place, (column, width) in enumerate(zip(columns, widths, strict=True)):
            if number == 0:  # a heading of several columns runs on over the empty ones
                line = line.ljust(sum(widths[:place]) + 2 * place) + row[column]
            else:
                cell = row[column].ljust(width) if place == 0 else row[column].rjust(width)
                line += cell if place == 0 else f"  {cell}"
        lines.append(line.rstrip())
    return lines


def _ending(balance: Balance, width: int) -> list[Text]:
    said = [*limits(balance), *skipped(summary_of(balance))]
    if balance.written:
        said.append(
            f"Biases written to {balance.written}: change and selection_bias of each router."
        )
    return [Text(part, style="dim") for text in said for part in wrapped(text, width)]


REPORTER = Reporter("table", render)
