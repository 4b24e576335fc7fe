"""The screen of a series: a line per router, worst first, then the other figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from moegeom.core.series import SERIES_COLUMNS, Curve, Series
from moegeom.report._reporter import View
from moegeom.report._series_reporter import SeriesReporter
from moegeom.report.screen import STYLES, labelled, titled, to_text, wrapped
from moegeom.report.sparkline import sparkline

#: Routers shown without --all-layers.
MOST_ROUTERS = 12

#: The figure that the lines of routers show: load with tokens, drift without.
LEADING = ("max_vio_global", "row_drift_median", "gram_score_centred")

_WORDS = {column.name: column.words for column in SERIES_COLUMNS}


def render(series: Series, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
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
    for note in (*series.notes, *_limits(series)):
        lines += [Text(part, style="dim") for part in wrapped(note, view.width)]
    return to_text(lines, view)


def _header(lines: list[Text], series: Series, width: int) -> None:
    steps = series.steps
    span = f"{steps[0].step:g} to {steps[-1].step:g}" if len(steps) > 1 else f"{steps[0].step:g}"
    lines += titled(series.name, f"{len(steps)} checkpoints, steps {span}", width)
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
            text = f"layer {_place(curve.router, series)} driven by {', '.join(parts)}"
            lines += [Text(part) for part in wrapped(text, view.width, "   ")]
    domains = [d for d in series.drivers if d.kind == "domain"][:3]
    if domains:
        parts = [
            f"layer {_place(d.router, series)} {d.name} {d.first:.2f} -> {d.last:.2f}"
            for d in domains
        ]
        text = f"domains whose MaxVio moved most: {', '.join(parts)}"
        lines += [Text(part) for part in wrapped(text, view.width, "   ")]


def _table(
    lines: list[Text], title: str, curves: Sequence[Curve], series: Series, view: View
) -> None:
    shown = curves if view.all_layers else curves[:MOST_ROUTERS]
    size = max(len(series.steps), 6)
    head = f"{'layer':<9}{'':<{size}}  {'first -> last':>17}  {'per 1000 steps':>21}  since step"
    lines.append(Text(f"{title}", style="bold"))
    lines.append(Text(head, style="dim"))
    for curve in shown:
        drawn = sparkline(curve.values, view.is_ascii)
        ends = f"{_figure(_first(curve))} -> {_figure(_last(curve))}"
        since = "" if curve.onset is None else f"{curve.onset:g}"
        line = f"{_place(curve.router, series):<9}{drawn:<{size}}  {ends:>17}"
        lines.append(Text(f"{line}  {_slope(curve):>21}  {since}".rstrip()))
    if len(curves) > len(shown):
        lines.append(Text(f"and {len(curves) - len(shown)} more: --all-layers", style="dim"))


def _others(lines: list[Text], series: Series, view: View) -> None:
    """Medians over routers of every other figure."""
    size = max(len(series.steps), 6)
    head = f"{'median over layers':<36}{'':<{size}}  {'first -> last':>17}"
    lines.append(Text(head, style="bold"))
    for column in SERIES_COLUMNS:
        curves = series.of_column(column.name)
        if not curves:
            continue
        rows = zip(*(curve.values for curve in curves), strict=True)
        middle = [_median(row) for row in rows]
        known = [value for value in middle if value is not None]
        drawn = sparkline(middle, view.is_ascii)
        ends = f"{_figure(known[0])} -> {_figure(known[-1])}" if known else "-"
        lines.append(Text(f"{column.words:<36}{drawn:<{size}}  {ends:>17}".rstrip()))


def _limits(series: Series) -> list[str]:
    said = [
        (
            "Slopes have 95 % intervals: the wider of scatter about the line and what other "
            "documents could have done. 'since step': the value left the first one for good."
        )
    ]
    if any(step.num_tokens for step in series.steps):
        said.append("This does not say why: a load that drifts may follow the data or the router.")
    return said


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


def _place(router: str, series: Series) -> str:
    """``31`` when all routers are in one stack and slot, else the whole name."""
    names = [name.split("/") for name in series.routers()]
    is_plain = len({parts[0] for parts in names}) == 1 and all(len(p) == 2 for p in names)
    return router.split("/")[1] if is_plain else router


REPORTER = SeriesReporter("table", render)
