"""A series as a document: a line per router, worst first, then the other figures; its charts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moegeom.core.finding import Verdict
from moegeom.core.series import SERIES_COLUMNS, Curve, Series
from moegeom.core.text import figure_text, number_of, percent
from moegeom.document.chart import Areas, Axis, Chart, Guide, Mark, Panel, Polyline
from moegeom.document.colours import GROUPS
from moegeom.document.drawing import interval
from moegeom.document.excerpts import worst_excerpt
from moegeom.document.model import (
    Block,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Judged,
    Note,
    Table,
    Title,
    View,
)
from moegeom.document.place import place
from moegeom.document.sparkline import sparkline
from moegeom.document.verdict_blocks import (
    checks_table,
    findings_excerpt,
    unjudged,
    verdict_card,
    verdict_record,
)
from moegeom.kernels.batch import NUM_BLOCKS

#: The figure that the lines of routers show: load with tokens, drift without.
LEADING = ("max_vio_global", "row_drift_median", "gram_score_centred")

#: Marks of a series: at most so many, and what the rest of the widest line takes.
MOST_MARKS = 40
BESIDE_MARKS = 68

#: Headings, as wide as the columns below them usually are: tables under each other stay in line.
_LAYER = f"{'layer':<7}"
_MEDIAN = f"{'median over layers':<34}"
_ENDS = f"{'first -> last':>17}"
_SLOPE = f"{'per 1000 steps':>21}"

#: Figures beside which the level of chance is shown.
_BESIDE_CHANCE = ("overlap_with_last", "overlap_with_previous")

_WORDS = {column.name: column.words for column in SERIES_COLUMNS}


def document(series: Series, view: View) -> Document:
    """What ``moegeom track`` says; a page holds every figure of every router, step by step."""
    # columns of a sparkline, so that no line is wider than the screen
    widest = max((len(_ends(middle)) for middle in _middles(series).values()), default=0)
    beside = BESIDE_MARKS + max(0, widest - len(_ENDS))
    size = max(6, min(len(series.steps), MOST_MARKS, view.width - beside))
    loads, verdict = series.expert_loads, series.verdict
    assert verdict is not None
    return Document(
        "track",
        series.name,
        [
            verdict_card(verdict),
            [*_header(series)],
            [*findings_excerpt(verdict.findings, series.run, view.detail)],
            [*unjudged(verdict, series.run, view.detail)],
            [*_routers(series, size, view)],
            _lines(loads[0].column, loads, series, size, view) if loads else [],
            [_medians(series, size)],
            [Gallery(lambda: [*_curves(series), *_usage(series)] if len(series.steps) > 1 else [])],
            [Excerpt([], [_whole(series)])],
            [Excerpt([], [checks_table(verdict)], "All checks")],
            [*map(Note, (*series.notes, *_limits(series, size, verdict)))],
        ],
        lambda: _record(series, verdict),
        Judged(verdict, series.run),
    )


def _header(series: Series) -> Iterator[Block]:
    steps = series.steps
    span = " to ".join(f"{step:g}" for step in sorted({steps[0].step, steps[-1].step}))
    yield Title(series.name, f"{number_of(len(steps), 'checkpoint')}, steps {span}")
    if series.rule:
        yield Fact("rule", f"{series.rule}.")
    reused = sum(step.is_reused for step in steps)
    measured = f"{len(steps) - reused} measured now, {reused} before"
    yield Fact("results", f"{measured}; {steps[-1].results}")
    yield Fact("tokens", _tokens(series))
    listed = Fact("steps", ", ".join(f"{step.step:g}" for step in steps))
    yield Excerpt([], [listed])
    stale = [step.name for step in steps if step.is_stale]
    if stale:
        text = f"{', '.join(stale)}: RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)"
        yield Fact("stale", text, "warning")
    for name, reason in series.skipped:
        yield Fact("skipped", f"{name}: {reason}", "warning")


def _tokens(series: Series) -> str:
    counts = sorted({step.num_tokens or 0 for step in series.steps})
    if not any(counts):
        return "none: weights alone"
    number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    text = f"{number} at each step, each from its own recording"
    if left_out := max(step.num_left_out for step in series.steps):
        text += f". Left out, as not finite or first of documents: up to {left_out:,}"
    if len(counts) > 1:
        text += ". NOT EQUAL: load figures of fewer tokens are higher by chance"
    return text


def _routers(series: Series, size: int, view: View) -> Iterator[Block]:
    leading = next((name for name in LEADING if series.of_column(name)), None)
    if leading is None:
        return
    curves = sorted(
        series.of_column(leading),
        key=lambda c: -([v for v in c.values if v is not None] or [0.0])[-1],
    )
    yield from _lines(_WORDS[leading], curves, series, size, view)
    drivers = [d for d in series.drivers if d.kind == "expert"]
    for curve in curves[:3]:
        named = [d for d in drivers if d.router == curve.router]
        if named:
            parts = [
                f"expert {d.name} {d.first:.2f}x -> {d.last:.2f}x "
                f"({percent(abs(d.contribution or 0.0), '.0f')} of the change)"
                for d in named
            ]
            text = f"layer {place(curve.router, series.routers())} driven by {', '.join(parts)}"
            yield Note(text, "plain", indent=3)
    domains = [d for d in series.drivers if d.kind == "domain"][:3]
    if domains:
        parts = [
            f"layer {place(d.router, series.routers())} {d.name} {d.first:.2f} -> {d.last:.2f}"
            for d in domains
        ]
        yield Note(f"domains whose MaxVio moved most: {', '.join(parts)}", "plain", indent=3)


def _lines(
    title: str, curves: Sequence[Curve], series: Series, size: int, view: View
) -> Sequence[Block]:
    """A line for each router, on a screen for the first of them."""

    def table(some: Sequence[Curve]) -> Table:
        rows = [
            [
                place(curve.router, series.routers()),
                sparkline(_condensed(curve.values, size)),
                _ends(curve.values),
                _slope(curve),
                _since(curve),
            ]
            for curve in some
        ]
        heads = [[_LAYER, " " * size, _ENDS, _SLOPE, "since step"]]
        others = len(curves) - len(some)
        rest = f"and {others} more: --detail" if others else ""
        return Table(heads, rows, left=(0, 1, 4), rest=rest)

    # as bad as each other: the first ones stay
    return Note(title, "strong"), worst_excerpt(curves, lambda curve: 0.0, view, table)


def _medians(series: Series, size: int) -> Table:
    """Medians over routers of every figure."""
    chance = _middle(series.of_column("overlap_by_chance"))
    beside: dict[str, str] = (
        dict.fromkeys(_BESIDE_CHANCE, f"chance {_figure(chance[-1])}") if chance else {}
    )
    rows = [
        [_WORDS[name], sparkline(_condensed(middle, size)), _ends(middle), beside.get(name, "")]
        for name, middle in _middles(series).items()
    ]
    heads = [[_MEDIAN, " " * size, _ENDS, ""]]
    return Table(heads, rows, left=(0, 1, 3), heads_look="strong")


def _whole(series: Series) -> Table:
    """Every figure of every router, with its values step by step."""
    rows = [
        [
            curve.router,
            _WORDS.get(curve.column, curve.column.replace("_", " ")),
            sparkline(curve.values),
            " ".join(map(_figure, curve.values)),
            _slope(curve),
            _since(curve),
        ]
        for curve in (*series.curves, *series.expert_loads)
    ]
    heads = [["router", "figure", "", "values", "per 1000 steps", "since step"]]
    return Table(heads, rows, left=(0, 1, 2, 3))


def _limits(series: Series, size: int, verdict: Verdict) -> Iterator[str]:
    yield (
        "Slopes have 95 % intervals: the wider of scatter about the line and what other "
        "documents could have done. 'since step': from there on every value lies outside the "
        "range before, at 5 % over all routers (Holm)."
    )
    if len(series.steps) > size:
        yield f"{number_of(len(series.steps), 'step')}: each mark is the mean of several of them."
    yield f"Not checked: {'; '.join(verdict.not_looked_at)}."
    if any(step.num_tokens for step in series.steps):
        yield "This does not say why: a load that drifts may follow the data or the router."


def _middles(series: Series) -> dict[str, list[float | None]]:
    """Every figure that a router has, as the median over routers."""
    columns = {column.name: series.of_column(column.name) for column in SERIES_COLUMNS}
    return {name: _middle(curves) for name, curves in columns.items() if curves}


def _middle(curves: Sequence[Curve]) -> list[float | None]:
    """Median over routers at each step; None where no router has the figure."""
    columns = zip(*(curve.values for curve in curves), strict=True)
    numbers = [[value for value in column if value is not None] for column in columns]
    return [float(np.median(column)) if column else None for column in numbers]


def _condensed(values: Sequence[float | None], size: int) -> list[float | None]:
    """At most ``size`` values, each the mean of the known ones of a stretch of steps."""
    if len(values) <= size:
        return list(values)
    parts = np.array_split(np.arange(len(values)), size)
    stretches = [[v for v in (values[i] for i in part) if v is not None] for part in parts]
    return [float(np.mean(part)) if part else None for part in stretches]


def _ends(values: Sequence[float | None]) -> str:
    """The first and the last known value."""
    numbers = [value for value in values if value is not None]
    return f"{_figure(numbers[0])} -> {_figure(numbers[-1])}" if numbers else "-"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _slope(curve: Curve) -> str:
    if curve.slope is None:
        return "-"
    width = "" if curve.slope_half_width is None else f" +- {curve.slope_half_width:.2g}"
    return f"{curve.slope:+.3g}{width}"


def _since(curve: Curve) -> str:
    return "" if curve.onset is None else f"{curve.onset:g}"


def _record(series: Series, verdict: Verdict) -> Mapping[str, Any]:
    """Every field of the series, and the words for its columns."""
    columns = [dataclasses.asdict(c) for c in SERIES_COLUMNS if series.of_column(c.name)]
    fields = dataclasses.asdict(dataclasses.replace(series, verdict=None, run={}, usage=()))
    del fields["verdict"], fields["run"], fields["usage"]
    return {**verdict_record(verdict), **fields, "columns": columns}


#: Figures that get a panel, as far as they are known.
_PANELS = (
    "max_vio_global",
    "routing_entropy_normalised",
    "overlap_with_last",
    "expert_set_churn",
    "row_drift_median",
    "margin_p50",
)

#: Routers up to this many get a colour each; of more the median and both ends are drawn.
_NAMED = 6

#: Layers whose experts are drawn.
_LAYERS = 4


def _curves(series: Series) -> Iterator[Chart]:
    measured = _middles(series)
    names = [name for name in _PANELS if name in measured] or [*measured][:6]
    if not names:
        return
    steps = [step.step for step in series.steps]
    panels = [
        Panel(
            _WORDS[name],
            Axis("training step"),
            Axis(_WORDS[name]),
            _curve_lines(series, series.of_column(name), steps),
            is_wide=False,
        )
        for name in names
    ]
    ends = []
    for name in names:
        middle = ["unknown" if v is None else figure_text(v) for v in measured[name]]
        ends.append(
            f"{_WORDS[name]}: median {middle[0]} at the first step, {middle[-1]} at the last"
        )
    every = [curve for name in measured for curve in series.of_column(name)]
    rows = [(curve, at) for curve in every for at in range(len(steps))]
    yield Chart(
        "curves",
        "Step by step",
        "Each figure at each checkpoint, with its 95 % interval over documents. Of more than "
        f"{_NAMED} routers the median, the highest and the lowest at the last step.",
        "What comes between two checkpoints, and whether the model got better.",
        f"{'; '.join(ends)}.",
        panels,
        [
            ("router", [curve.router for curve, _ in rows]),
            ("figure", [curve.column for curve, _ in rows]),
            ("step", [steps[at] for _, at in rows]),
            ("value", [curve.values[at] for curve, at in rows]),
            ("standard_error", [curve.errors[at] for curve, at in rows]),
        ],
    )


def _curve_lines(series: Series, curves: Sequence[Curve], steps: Sequence[float]) -> list[Mark]:
    names = series.routers()

    def line(curve: Curve, role: str, text: str) -> Polyline:
        low, high = interval(curve.values, curve.errors, NUM_BLOCKS)
        return Polyline(text, role, steps, curve.values, low, high)

    if len(curves) <= _NAMED:
        return [
            line(curve, f"g{number}", f"layer {place(curve.router, names)}")
            for number, curve in enumerate(curves)
        ]
    ordered = sorted(curves, key=lambda curve: curve.values[-1] or 0.0)
    ends = (("other", "highest", ordered[-1]), ("tokens", "lowest", ordered[0]))
    marks: list[Mark] = [
        line(curve, role, f"{text}, layer {place(curve.router, names)}")
        for role, text, curve in ends
    ]
    return [*marks, Polyline("median", "dim", steps, _middle(curves))]


def _usage(series: Series) -> Iterator[Chart]:
    by_router: dict[str, dict[int, dict[float, float]]] = {}
    for router, step, expert, load in series.usage:
        by_router.setdefault(router, {}).setdefault(expert, {})[step] = load
    if not by_router:
        return
    steps = [step.step for step in series.steps]
    worst = {c.router: c.values[-1] or 0.0 for c in series.of_column("max_vio_global")}
    chosen = sorted(by_router, key=lambda router: -worst.get(router, 0.0))[:_LAYERS]
    routers = [router for router in by_router if router in chosen]
    panels, texts = [], []
    for router in routers:
        loads, name = by_router[router], place(router, series.routers())
        experts = sorted(loads, key=lambda e: -loads[e].get(steps[-1], 0.0))
        totals = {s: sum(loads[e].get(s, 0.0) for e in experts) for s in steps}
        shares = [
            [loads[e].get(s, 0.0) / totals[s] if totals[s] else None for s in steps]
            for e in experts
        ]
        names = [f"expert {expert}" for expert in experts]
        marks: list[Mark] = [Areas(steps, shares, names)]
        if len(experts) <= 4 * len(GROUPS):
            marks.append(Guide("fair share", "limit", 1.0 / len(experts)))
        title = f"layer {name}"
        panels.append(Panel(title, Axis("training step"), Axis("share of choices"), marks, False))
        ends = [percent(shares[0][at] or 0.0, ".3g") for at in (0, -1)]
        texts.append(f"layer {name}: expert {experts[0]} {ends[0]}, then {ends[1]}")
    yield Chart(
        "usage",
        "Who gets the tokens, step by step",
        "The share of all choices that each expert gets, stacked, the busiest of the last step at "
        "the bottom; the dashed line is a fair share.",
        "Which tokens they are. Each step has its own recording.",
        f"{number_of(len(by_router), 'layer')}, first and last step: {'; '.join(texts)}.",
        panels,
        [
            ("router", [row[0] for row in series.usage]),
            ("step", [row[1] for row in series.usage]),
            ("expert", [row[2] for row in series.usage]),
            ("load", [row[3] for row in series.usage]),
        ],
    )
