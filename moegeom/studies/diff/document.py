"""A difference as a document: both sides, the verdict, what happened to routers and figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from moegeom.core.text import all_of, figure_text, number_of, percent
from moegeom.document.chart import Axis, Bars, Chart, Heat, Panel, padded
from moegeom.document.excerpts import in_part
from moegeom.document.header import size
from moegeom.document.model import (
    Block,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Headline,
    Look,
    Note,
    Table,
    Title,
    View,
)
from moegeom.document.place import place
from moegeom.studies.changes.record import RouterChange, differing, phrase_of, where
from moegeom.studies.diff.record import Difference, FigureChange, Figures, Side

#: Routers, and figures, that a screen shows before the rest is counted.
_MOST_LINES = 12

#: Changes that the verdict names, those of most routers first.
_MOST_GROUPS = 6

#: Columns at most that all names of routers have in front of what happened to them.
_MOST_INDENT = 22

_HEADS = ("figure", "routers", "worst in", "A", "B", "change", "error", "p")

#: A and B go together: one of them without the other would only puzzle.
_DROPS = (0, 0, 0, 1, 1, 0, 0, 0)

#: Columns named when it is told what could have been found, the best known first.
_WELL_KNOWN = (
    "load_cv_ddof0",
    "max_vio_global",
    "margin_p50",
    "routing_entropy_normalised",
    "load_cv_squared_debiased",
    "bf16_flip_share_isotropic",
)
_MOST_NAMED = 4

#: Told beside nearly every router, so not worth a line where nothing changed.
_USUAL = "gain equal"


def document(report: Difference, view: View) -> Document:
    """What ``moegeom diff`` says."""
    meanings: dict[str, str] = {}
    for change in (change for router in report.routers for change in router.changes):
        meanings.setdefault(change.word, change.meaning)
    return pair_page(
        "diff",
        report,
        [
            Fact("VERDICT", verdict_sentence(report), _mood(report)),
            *(Fact("UNLIKE", text, "error") for text in _unlike(report)),
            _headline(report),
        ],
        [_routers(report, view)],
        [Fact("means", f"{word}: {text}", "dim") for word, text in meanings.items()],
        [] if report.figures is None else [*_figures(report, report.figures, view)],
        figures=lambda: [*row_figures(report), *difference_figures(report)],
        record=lambda: _record(report),
    )


# --------------------------------------------------------------------------------- what is compared


class _OfPair(Protocol):
    @property
    def sides(self) -> tuple[Side, Side]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def not_looked_at(self) -> Sequence[str]: ...


def pair_page(
    name: str,
    report: _OfPair,
    verdict: Sequence[Block],
    *sections: Sequence[Block],
    figures: Callable[[], Sequence[Chart]],
    record: Callable[[], Mapping[str, Any]],
) -> Document:
    """The page of two sides: the verdict, both of them, what was compared, and the notes last."""
    sides = [*zip("AB", report.sides, strict=True)]
    ending = [*report.notes]
    if report.not_looked_at:
        ending.append(f"Not checked: {'; '.join(report.not_looked_at)}.")
    return Document(
        name,
        " and ".join(side.name for side in report.sides),
        [
            verdict,
            [block for letter, side in sides for block in _side(letter, side)],
            *sections,
            [Gallery(figures)],
            [*map(Note, ending)],
        ],
        record,
    )


def _side(letter: str, side: Side) -> Sequence[Block]:
    title = Title(f"{letter}  {side.name}", f"{side.rule}." if side.rule else "")
    if not side.bytes_total and side.kind == "checkpoint":
        return title, Fact("", "its routers could not be read.")
    read = "results"
    if side.bytes_total:
        part = side.bytes_read < side.bytes_total
        read = f"read {size(side.bytes_read)}" + (f" of {size(side.bytes_total)}" if part else "")
    tokens = f" Tokens: {side.tokens}." if side.tokens else ""
    return title, Fact("", f"{number_of(side.num_routers, 'router')}, {read}.{tokens}")


def sides_record(report: _OfPair) -> dict[str, Any]:
    """Both sides, as ``a`` and ``b``."""
    return {name: dataclasses.asdict(side) for name, side in zip("ab", report.sides, strict=True)}


def _unlike(report: Difference) -> Iterator[str]:
    """Qualifications of the verdict: sides of different kinds, routers on one side only."""
    yield from report.unlike
    for names, here, there in ((report.only_first, "A", "B"), (report.only_second, "B", "A")):
        if names:
            more = " ..." if len(names) > 4 else ""
            what = f"{len(names)} router{'s' if len(names) > 1 else ''} of {here} not in {there}"
            yield f"{what}: {', '.join(names[:4])}{more}"


def _where(names: Sequence[str], report: Difference) -> str:
    """``layers 3-7,9``, or whole names where layers of several stacks could be meant."""
    return where(names, [router.router for router in report.routers])


# ------------------------------------------------------------------------------------------ verdict


def verdict_sentence(report: Difference) -> str:
    """How many routers are identical, what happened to the others, how many figures changed."""
    routers = report.routers
    same = sum(router.is_identical for router in routers)
    groups = _groups(report)
    named = [f"{_where(names, report)} {what}" for what, names in groups[:_MOST_GROUPS]]
    if rest := sum(len(names) for _, names in groups[_MOST_GROUPS:]):
        named.append(f"{number_of(rest, 'more router')} otherwise")
    changes = "; ".join(named)
    if not routers:
        text = "the two have no router in common"
    elif same == len(routers):
        text = f"{all_of(same, 'router is', 'routers are')} identical"
        if others := report.routers_of_other_experts:
            text = (
                f"{all_of(same, 'router holds', 'routers hold')} the same numbers, their experts "
                f"do not: {_experts(report, others)}"
            )
        elif report.unlike:
            text = f"the weights of {all_of(same, 'router')} are identical, and the routers are "
            text += "not: they choose or weigh otherwise (UNLIKE)"
        absent = [("A", len(report.only_first)), ("B", len(report.only_second))]
        text += "".join(f"; {number} more only in {side}" for side, number in absent if number)
    elif same:
        text = (
            f"{same} of {len(routers)} routers identical; {len(routers) - same} changed: {changes}"
        )
    else:
        text = f"no router is identical: {changes}"
    if report.skipped:
        text += f"; {number_of(len(report.skipped), 'more looks', 'more look')} like routers"
        text += ", which were not read as such"
    if same < len(routers) and (others := report.routers_of_other_experts):
        text += f"; other expert weights: {_experts(report, others)}"
    figures = report.figures
    if figures is None:
        return f"{text}."
    changed = f"{len(figures.significant)} of {len(figures.tests)}"
    return f"{text}. Figures: {changed} changed by more than chance."


def _experts(report: Difference, routers: Sequence[str]) -> str:
    """``layers 0-3, 12 of 16 sampled experts differ (gate)``."""
    return f"{_where(routers, report)}, {differing([report.experts[name] for name in routers])}"


def _headline(report: Difference) -> Headline:
    changed = len(_changed(report))
    alone = len(report.only_first) + len(report.only_second)
    return Headline(
        [
            (f"{len(report.routers) - changed:,}", "routers identical", "plain"),
            (f"{changed:,}", "routers changed", "warning" if changed else "plain"),
            (f"{alone:,}", "routers on one side alone", "warning" if alone else "plain"),
        ]
    )


def _mood(report: Difference) -> Look:
    """How the verdict looks: good when nothing differs."""
    is_same = all(router.is_identical for router in report.routers)
    is_whole = bool(report.routers) and not report.unlike and not report.routers_of_other_experts
    lonely = report.only_first or report.only_second
    moved = report.figures is not None and report.figures.significant
    return "good" if is_same and is_whole and not lonely and not moved else "warning"


def _groups(report: Difference) -> list[tuple[str, list[str]]]:
    """Routers grouped by their changes: the changes, and the routers; the largest group first."""
    alike: dict[tuple[str, ...], list[RouterChange]] = {}
    for router in _changed(report):
        alike.setdefault(router.phrases, []).append(router)
    listed = []
    for routers in sorted(alike.values(), key=len, reverse=True):
        columns = zip(*(router.changes for router in routers), strict=True)
        what = " and ".join(map(phrase_of, columns))
        listed.append((what, [router.router for router in routers]))
    return listed


# ------------------------------------------------------------------------------------------ routers


def _routers(report: Difference, view: View) -> Excerpt:
    """A paragraph for each change, on a screen for those that moved routers most."""
    alike: dict[tuple[str, ...], list[RouterChange]] = {}
    for router in _changed(report):
        alike.setdefault(_sentences(router), []).append(router)
    same = [
        Fact(f"{_where(routers, report)}  ", text, "dim", indent=0)
        for text, routers in _unchanged_beside(report).items()
    ]
    most = len(alike) if view.detail else min(len(alike), _MOST_LINES)
    screen, *shorter = (
        [*_paragraphs(alike, number, report), *same] for number in range(most, min(most, 1) - 1, -1)
    )
    page = [*_routers_whole(report)]
    return Excerpt(screen, page, shorter=[] if view.detail else shorter)


def _paragraphs(
    alike: Mapping[tuple[str, ...], Sequence[RouterChange]], number: int, report: Difference
) -> Iterator[Block]:
    """``number`` of them, and how many routers moved less."""
    order = [*alike]
    if number < len(order):
        # changes without a size (other experts, another order) come first
        sizes = {
            key: max(
                math.inf if c.size is None else c.size for one in alike[key] for c in one.changes
            )
            for key in order
        }
        order.sort(key=sizes.__getitem__, reverse=True)
    names = [f"{_where([one.router for one in alike[key]], report)}  " for key in order[:number]]
    indent = min(max(map(len, names), default=0), _MOST_INDENT)
    for name, key in zip(names, order, strict=False):
        for label, text in zip([name, *("" for _ in key[1:])], key, strict=True):
            yield Fact(label, text, "warning", indent=max(indent, len(name)))
    if rest := sum(len(alike[key]) for key in order[number:]):
        yield Note(f"and {rest} more that moved less: --detail")


def _sentences(router: RouterChange) -> tuple[str, ...]:
    """One sentence for each change, the notes behind the last."""
    *texts, last = (
        f"{phrase_of([change])}: {change.detail}." if change.detail else f"{phrase_of([change])}."
        for change in router.changes
    )
    return (*texts, f"{last} ({', '.join(router.beside)})" if router.beside else last)


def _routers_whole(report: Difference) -> Iterator[Block]:
    """A table of all that changed, for a page."""
    rows = []
    for router in _changed(report):
        happened = " and ".join(phrase_of([change]) for change in router.changes)
        evidence = [change.detail for change in router.changes if change.detail]
        rows.append((router.router, happened, "; ".join([*evidence, *router.beside])))
    if rows:
        yield Table([("router", "what happened", "evidence")], rows, left=(0, 1, 2))
    for text, routers in _unchanged_beside(report).items():
        yield Note(f"{_where(routers, report)}: {text}")


def _changed(report: Difference) -> list[RouterChange]:
    return [router for router in report.routers if not router.is_identical]


def _unchanged_beside(report: Difference) -> dict[str, list[str]]:
    """Notes on identical routers: sentence -> routers."""
    beside: dict[str, list[str]] = {}
    for router in report.routers:
        words = "; ".join(text for text in router.beside if text != _USUAL)
        if router.is_identical and words:
            beside.setdefault(words, []).append(router.router)
    return beside


# ------------------------------------------------------------------------------------------ figures


def _figures(report: Difference, figures: Figures, view: View) -> Iterator[Block]:
    yield Fact("figures", _figures_sentence(figures))
    lines = [(test, f"{count} of {of}") for test, count, of in _by_column(figures)]
    if lines:
        every = [(test, "") for test in figures.significant]
        screens = (
            [(every, len(every))]
            if view.detail
            else [(lines, n) for n in range(_MOST_LINES, 2, -1)]
        )
        screen, *shorter = ([_table(report, *one)] for one in screens)
        yield Excerpt(screen, [_table(report, lines, len(lines))], shorter=shorter)
    notes = [Note(text) for text in (_detectable(figures), *_left_out(figures)) if text]
    yield in_part(notes, "note", view.detail, is_aside=True)


def _figures_sentence(figures: Figures) -> str:
    """How many comparisons, on how many tokens, and how many are significant."""
    first, second = figures.num_tokens
    tokens = (
        f"{number_of(first, 'token')} each"
        if first == second
        else f"{first:,} and {number_of(second, 'token')}"
    )
    columns = {test.column for test in figures.tests}
    routers = {test.router for test in figures.tests}
    return (
        f"{len(figures.significant)} of {number_of(len(figures.tests), 'comparison')} changed "
        f"({number_of(len(columns), 'figure')}, {number_of(len(routers), 'router')}; {tokens}; "
        f"chance alone changes any in {percent(figures.level)} of runs, Holm over blocks of "
        "documents)."
    )


def _table(report: Difference, lines: Sequence[tuple[FigureChange, str]], most: int) -> Table:
    """A line for each test, with the number of routers beside it, and how many more there are."""
    rows = []
    for test, count in lines[:most]:
        place, p_value = _where((test.router,), report), f"{test.p_value:.1e}"
        numbers = (f"{test.before:.3g}", f"{test.after:.3g}", f"{test.change:+.3g}")
        p_value = "<1e-9" if test.p_value < 1e-9 else p_value
        rows.append((test.column, count, place, *numbers, f"{test.error:.2g}", p_value))
    rest = len(lines) - len(rows)
    more = f"and {number_of(rest, 'more figure')}: --detail" if rest else ""
    return Table([_HEADS], rows, drops=_DROPS, rest=more)


def _by_column(figures: Figures) -> list[tuple[FigureChange, int, int]]:
    """The worst significant change of each figure, in how many routers of how many."""
    changes = []
    for worst in figures.significant:
        if worst.column not in [test.column for test, _, _ in changes]:
            alike = [test for test in figures.tests if test.column == worst.column]
            changes.append((worst, sum(test.is_significant for test in alike), len(alike)))
    return changes


def _detectable(figures: Figures) -> str:
    """The change that would be detected with a power of 90 %, for the best known figures."""
    by_name: dict[str, list[float]] = {}
    for test in figures.tests:
        by_name.setdefault(test.column, []).append(test.detectable)
    named = [name for name in _WELL_KNOWN if name in by_name][:_MOST_NAMED]
    if not named:
        return ""
    middle = {name: sorted(by_name[name])[len(by_name[name]) // 2] for name in named}
    listed = ", ".join(f"{name} {value:.2g}" for name, value in middle.items())
    return f"Smallest change this run can catch (9 times in 10, median router): {listed}."


def _left_out(figures: Figures) -> Iterator[str]:
    """The reasons why figures were not compared, each with its first figures."""
    for reason, columns in figures.left_out.items():
        if columns:
            more = f" and {len(columns) - 3} more" if len(columns) > 3 else ""
            yield f"Not compared ({reason}): {', '.join(columns[:3])}{more}."


# ------------------------------------------------------------------------------------------- record


def _record(report: Difference) -> Mapping[str, Any]:
    figures = report.figures
    return {
        "verdict": verdict_sentence(report),
        **sides_record(report),
        "unlike": report.unlike,
        "only_in_a": report.only_first,
        "only_in_b": report.only_second,
        "routers": [
            {
                "router": router.router,
                "is_identical": router.is_identical,
                "changes": [
                    {**dataclasses.asdict(change), "phrase": phrase_of([change])}
                    for change in router.changes
                ],
                "beside": router.beside,
                "moved": router.moved,
            }
            for router in report.routers
        ],
        "figures": figures
        and {
            "level": figures.level,
            "num_tokens": figures.num_tokens,
            "num_significant": len(figures.significant),
            "left_out": figures.left_out,
            "tests": [{**dataclasses.asdict(one), "change": one.change} for one in figures.tests],
        },
        "experts": {
            name: {
                "different": [*one.other],
                "num_sampled": len(one.sampled),
                "tensors": one.tensors,
                "moved": {str(expert): source for expert, source in one.sources.items()},
            }
            for name, one in report.experts.items()
        },
        "notes": report.notes,
        "not_looked_at": report.not_looked_at,
    }


#: Routers up to which bars show the median row and the one that moved most; of more a map has
#: every row.
_FEW_ROUTERS = 12


def row_figures(report: Difference) -> Iterator[Chart]:
    """Nothing where no row moved, or none could be compared."""
    compared = [router for router in report.routers if router.moved]
    moved = [[100.0 * m if math.isfinite(m) else None for m in one.moved] for one in compared]
    most = [max((value for value in row if value is not None), default=0.0) for row in moved]
    if not any(most):
        return
    names = [place(one.router, [router.router for router in report.routers]) for one in compared]
    layers = Axis("layer", names=names)
    if len(compared) <= _FEW_ROUTERS:
        middle = [sorted(value or 0.0 for value in row)[len(row) // 2] for row in moved]
        bars = [Bars("median row", "tokens", middle), Bars("row that moved most", "other", most)]
        panel = Panel("", layers, Axis("change of a row, %"), bars)
    else:
        width = max(map(len, moved))
        experts = Axis("expert", names=[*map(str, range(width))])
        panel = Panel(
            "", experts, layers, [Heat(padded(moved, width), "change of a row, %", 0.0, max(most))]
        )
    worst = max(range(len(most)), key=most.__getitem__)
    expert = max(range(len(moved[worst])), key=lambda row: moved[worst][row] or 0.0)
    still = sum(not value for value in most)
    cells = [(one, expert) for one in compared for expert in range(len(one.moved))]
    yield Chart(
        "rows",
        "How far the rows of each router moved",
        "The length of each row's change from A to B, in percent of the row in A, both less the "
        "mean of all rows; rows in another order are held against those that they were.",
        "Which choices change: only tokens tell. A vector common to all rows, where it changes no "
        "choice. Of results, which keep 32 projections of a row, it is true to 12 %.",
        f"Most for expert {expert} of layer {names[worst]}: {figure_text(most[worst])} % of its "
        f"row; {len(most) - still} of {number_of(len(most), 'router')} moved.",
        [panel],
        [
            ("router", [one.router for one, _ in cells]),
            ("expert", [expert for _, expert in cells]),
            ("moved", [one.moved[expert] for one, expert in cells]),
        ],
    )


#: Figures that get a panel, the most surely changed first.
_MOST = 6


def difference_figures(report: Difference) -> Iterator[Chart]:
    """Nothing where no figure was compared."""
    if report.figures is None or not report.figures.tests:
        return
    tests: dict[str, list[FigureChange]] = {}
    for test in report.figures.tests:
        tests.setdefault(test.column, []).append(test)
    groups = sorted(tests.values(), key=lambda of: min(test.p_value for test in of))[:_MOST]
    routers = [router.router for router in report.routers]
    panels = [
        Panel(
            of[0].text,
            Axis("layer", names=[place(test.router, routers) for test in of]),
            Axis(of[0].text),
            [
                Bars("A", "tokens", [test.before for test in of]),
                Bars("B", "other", [test.after for test in of]),
            ],
            is_wide=False,
        )
        for of in groups
    ]
    sure = report.figures.significant
    caption = (
        f"{sure[0].text} in layer {place(sure[0].router, routers)} went from "
        f"{figure_text(sure[0].before)} to {figure_text(sure[0].after)} (standard error "
        f"{figure_text(sure[0].error)})"
        if sure
        else "no change is more than chance"
    )
    every = report.figures.tests
    yield Chart(
        "before_after",
        "Before and after",
        "Figures of A and of B in each layer, those that changed most surely first.",
        "Figures without a standard error, which cannot be compared, and what a change means for "
        "answers.",
        f"{len(sure)} of {len(every)} comparisons differ by more than chance; {caption}.",
        panels,
        [
            ("router", [test.router for test in every]),
            ("figure", [test.column for test in every]),
            ("before", [test.before for test in every]),
            ("after", [test.after for test in every]),
            ("standard_error", [test.error for test in every]),
            ("p_value", [test.p_value for test in every]),
        ],
    )
