"""Markdown, for a job summary."""

from __future__ import annotations

from moegeom.core.series import SERIES_COLUMNS, Series
from moegeom.document._reporter import Reporter, View
from moegeom.document.markdown import escaped
from moegeom.document.sparkline import sparkline
from moegeom.document.untrusted import printable


def render(series: Series, view: View) -> str:
    """A table of every figure of every router, with its values step by step."""
    series = printable(series)
    words = {column.name: column.words for column in SERIES_COLUMNS}
    steps = ", ".join(f"{step.step:g}" for step in series.steps)
    lines = [f"## moegeom track: {escaped(series.name)}", "", f"Steps {steps}.", ""]
    lines += [f"- **rule** {escaped(series.rule)}"] if series.rule else []
    lines += [f"- **skipped** {escaped(f'{name}: {why}')}" for name, why in series.skipped]
    stale = [step.name for step in series.steps if step.is_stale]
    lines += [f"- **stale inputs** {escaped(name)}" for name in stale]
    lines += ["", "| router | figure | | values | per 1000 steps | since step |", "|" + "---|" * 6]
    for curve in series.curves:
        values = " ".join("-" if value is None else f"{value:.3g}" for value in curve.values)
        slope = "-" if curve.slope is None else f"{curve.slope:+.3g}"
        if curve.slope is not None and curve.slope_half_width is not None:
            slope += f" +- {curve.slope_half_width:.2g}"
        since = "" if curve.onset is None else f"{curve.onset:g}"
        drawn = sparkline(curve.values, view.is_ascii)
        figure = escaped(words.get(curve.column, curve.column.replace("_", " ")))
        lines.append(
            f"| {escaped(curve.router)} | {figure} | {drawn} | {values} | {slope} | {since} |"
        )
    lines += ["", *(f"- {escaped(note)}" for note in series.notes)]
    return "\n".join(lines) + "\n"


REPORTER = Reporter("md", render)
