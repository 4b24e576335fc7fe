"""Markdown of GitHub: what the figures mean, and a table of all routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.document._reporter import Reporter, View
from moegeom.document.header import gate_rule_line, routers_line, rule_line, tokens_line
from moegeom.document.markdown import escaped
from moegeom.document.untrusted import printable
from moegeom.studies.balance.record import Balance, RouterBalance
from moegeom.studies.balance.screen._wording import (
    figure,
    limits,
    percent,
    pushed,
    remarks,
    sample_line,
    summary_of,
    verdicts,
)

_HEADINGS = (
    *("router", "MaxVio now", "chance", "these tokens", "other documents", "chance there"),
    *("CV now", "CV these", "CV others", "largest change", "unit", "in spreads"),
    *("sets changed", "weight moved", "pushed most"),
)


def render(balance: Balance, view: View) -> str:
    """A heading, the sentences, and a table with every router."""
    balance = printable(balance)
    run, summary = balance.run, summary_of(balance)
    lines = [f"## moegeom balance: {escaped(run['checkpoint']['name'])}", ""]
    lines += [f"**{escaped(places)}** {escaped(said)}\n" for _, places, said in verdicts(balance)]
    lines += [f"**{escaped(places)}** {escaped(said)}\n" for places, said in remarks(balance)]
    facts = (
        ("rule", f"{rule_line(summary)} Rule {gate_rule_line(run)}"),
        ("routers", routers_line(summary)),
        ("tokens", tokens_line(summary)),
        ("sample", sample_line(balance)),
    )
    lines += [f"- **{label}** {escaped(text)}" for label, text in facts]
    lines += ["", *_table(balance), ""]
    lines += [escaped(text) + "\n" for text in limits(balance)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(balance: Balance) -> Iterator[str]:
    yield _row(_HEADINGS)
    yield _row(["---"] * len(_HEADINGS))
    for router in balance.routers:
        yield _row([escaped(cell) for cell in _cells(router)])


def _cells(router: RouterBalance) -> tuple[str, ...]:
    worst = router.worst
    ratio = router.largest_change / router.spread if router.spread else float("nan")
    others = ("-", "-") if worst is None else (figure(worst.after.max_vio), figure(worst.limit))
    return (
        router.router,
        figure(router.before.max_vio),
        figure(router.limit),
        figure(router.after.max_vio),
        *others,
        figure(router.before.cv),
        figure(router.after.cv),
        "-" if worst is None else figure(worst.after.cv),
        f"{router.largest_change:.3g}",
        router.score_unit,
        figure(ratio),
        percent(router.changed_share),
        percent(router.displaced_weight),
        pushed(router),
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


REPORTER = Reporter("md", render)
