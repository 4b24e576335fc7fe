"""The screen of a series: a line per router, worst first, then the other figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from moegeom.core.series import SERIES_COLUMNS, Curve, Series
from moegeom.core.text import number_of
from moegeom.document._reporter import Reporter, View
from moegeom.document.place import place
from moegeom.document.screen import STYLES, labelled, titled, to_text, wrapped
from moegeom.document.sparkline import sparkline
from moegeom.document.untrusted import printable

#: Routers shown without --all-layers.
MOST_ROUTERS = 12

#: The figure that the lines of routers show: load with tokens, drift without.
LEADING = ("max_vio_global", "row_drift_median", "gram_score_centred")

#: Marks of a series: at most so many, and what the rest of the widest line takes.
MOST_MARKS = 40
BESIDE_MARKS = 68

#: Figures beside which the level of chance is shown.
_BESIDE_CHANCE = ("overlap_with_last", "overlap_with_previous")

_WORDS = {column.name: column.words for column in SERIES_COLUMNS}


def render(series: Series, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    series = printable(series)
    lines: list[Text] = []
    _header(lines, series, view.width)
    lines.append(Text())
    leading = next((name for name in LEADING if series.of_column(name)), None)
    if leading is not None:
        _routers(lines, series, leading, view)
        lines.append(Text())
    if series.expert_loads:
        _table(lines, series.expert_loads[0].column, series.expert_loads, series, view)
        lines.append(Text())
    _others(lines, series, view)
    lines.append(Text())
    for note in (*series.notes, *_limits(series, view.width)):
        lines += [Text(part, style="dim") for part in wrapped(note, view.width)]
    return to_text(lines, view)


def _header(lines: list[Text], series: Series, width: int) -> None:
    steps = series.steps
    span = " to ".join(f"{step:g}" for step in sorted({steps[0].step, steps[-1].step}))
    lines += titled(series.name, f"{number_of(len(steps), 'checkpoint')}, steps {span}", width)
    if series.rule:
        lines += labelled("rule", f"{series.rule}.", width)
    reused = sum(step.is_reused for step in steps)
    measured = f"{len(steps) - reused} measured now, {reused} before"
    lines += labelled("results", f"{measured}; {steps[-1].results}", width)
    counts = sorted({step.num_tokens or 0 for step in steps})
    if not any(counts):
        lines += labelled("tokens", "none: weights alone", width)
    else:
        said = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        text = f"{said} at each step, each from its own recording"
        if len(counts) > 1:
            text += ". NOT EQUAL: load figures of fewer tokens are higher by chance"
        lines += labelled("tokens", text, width)
    stale = [step.name for step in steps if step.is_stale]
    if stale:
        text = f"{', '.join(stale)}: RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)"
        lines += labelled("stale", text, width, STYLES["warning"])
    for name, reason in series.skipped:
        lines += labelled("skipped", f"{name}: {reason}", width, STYLES["warning"])


def _routers(lines: list[Text], series: Series, leading: str, view: View) -> None:
    curves = sorted(series.of_column(leading), key=lambda c: -(_last(c) or 0.0))
    _table(lines, _WORDS[leading], curves, series, view)
    drivers = [d for d in series.drivers if d.kind == "expert"]
    for curve in curves[:3]:
        named = [d for d in drivers if d.router == curve.router]
        if named:
            parts = [
                f"expert {d.name} {d.first:.2f}x -> {d.last:.2f}x ({_percent(d.contribution)})"
                for d in named
            ]
            text = f"layer {place(curve.router, series.routers())} driven by {', '.join(parts)}"
            lines += [Text(part) for part in wrapped(text, view.width, "   ")]
    domains = [d for d in series.drivers if d.kind == "domain"][:3]
    if domains:
        parts = [
            f"layer {place(d.router, series.routers())} {d.name} {d.first:.2f} -> {d.last:.2f}"
            for d in domains
        ]
        text = f"domains whose MaxVio moved most: {', '.join(parts)}"
        lines += [Text(part) for part in wrapped(text, view.width, "   ")]


def _table(
    lines: list[Text], title: str, curves: Sequence[Curve], series: Series, view: View
) -> None:
    shown = curves if view.all_layers else curves[:MOST_ROUTERS]
    size = _size(series, view.width)
    head = f"{'layer':<9}{'':<{size}}  {'first -> last':>17}  {'per 1000 steps':>21}  since step"
    lines.append(Text(f"{title}", style="bold"))
    lines.append(Text(head, style="dim"))
    for curve in shown:
        drawn = sparkline(_condensed(curve.values, size), view.is_ascii)
        ends = f"{_figure(_first(curve))} -> {_figure(_last(curve))}"
        since = "" if curve.onset is None else f"{curve.onset:g}"
        line = f"{place(curve.router, series.routers()):<9}{drawn:<{size}}  {ends:>17}"
        lines.append(Text(f"{line}  {_slope(curve):>21}  {since}".rstrip()))
    if len(curves) > len(shown):
        lines.append(Text(f"and {len(curves) - len(shown)} more: --all-layers", style="dim"))


def _others(lines: list[Text], series: Series, view: View) -> None:
    """Medians over routers of every other figure."""
    size = _size(series, view.width)
    chance = _middle(series.of_column("overlap_by_chance"))
    head = f"{'median over layers':<36}{'':<{size}}  {'first -> last':>17}"
    lines.append(Text(head, style="bold"))
    for column in SERIES_COLUMNS:
        curves = series.of_column(column.name)
        if not curves:
            continue
        middle = _middle(curves)
        known = [value for value in middle if value is not None]
        drawn = sparkline(_condensed(middle, size), view.is_ascii)
        ends = f"{_figure(known[0])} -> {_figure(known[-1])}" if known else "-"
        line = f"{column.words:<36}{drawn:<{size}}  {ends:>17}"
        if column.name in _BESIDE_CHANCE and chance:
            line += f"  chance {_figure(chance[-1])}"
        lines.append(Text(line.rstrip()))


def _limits(series: Series, width: int) -> list[str]:
    said = [
        (
            "Slopes have 95 % intervals: the wider of scatter about the line and what other "
            "documents could have done. 'since step': from there on every value lies outside the "
            "range before, at 5 % over all routers (Holm)."
        )
    ]
    if len(series.steps) > _size(series, width):
        said.append(
            f"{number_of(len(series.steps), 'step')}: each mark is the mean of several of them."
        )
    if any(step.num_tokens for step in series.steps):
        said.append("This does not say why: a load that drifts may follow the data or the router.")
    return said


def _middle(curves: Sequence[Curve]) -> list[float | None]:
    """Median over routers at each step."""
    return [_median(row) for row in zip(*(curve.values for curve in curves), strict=True)]


def _size(series: Series, width: int) -> int:
    """Columns of a sparkline, so that no line is wider than the screen."""
    return max(6, min(len(series.steps), MOST_MARKS, width - BESIDE_MARKS))


def _condensed(values: Sequence[float | None], size: int) -> list[float | None]:
    """At most ``size`` values, each the mean of the known ones of a stretch of steps."""
    if len(values) <= size:
        return list(values)
    parts = np.array_split(np.arange(len(values)), size)
    known = [[v for v in (values[i] for i in part) if v is not None] for part in parts]
    return [float(np.mean(part)) if part else None for part in known]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _first(curve: Curve) -> float | None:
    return next((value for value in curve.values if value is not None), None)


def _last(curve: Curve) -> float | None:
    return next((value for value in reversed(curve.values) if value is not None), None)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * abs(value):.0f} % of the change"


def _slope(curve: Curve) -> str:
    if curve.slope is None:
        return "-"
    width = "" if curve.slope_half_width is None else f" +- {curve.slope_half_width:.2g}"
    return f"{curve.slope:+.3g}{width}"


REPORTER = Reporter("table", render)
