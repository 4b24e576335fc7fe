"""OpenMetrics text of the last step, for a Prometheus text-file collector."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.files import write_whole
from moegeom.core.series import SERIES_COLUMNS, Curve, Series
from moegeom.studies.track.export import SeriesExport


def write(series: Series, path: Path) -> None:
    """A gauge for each figure of the last step, and one for its slope.

    Samples carry no time: collectors refuse old ones, and the step stands in a label.
    """
    last = series.steps[-1]
    lines: list[str] = []
    for column in SERIES_COLUMNS:
        curves = [c for c in series.of_column(column.name) if c.values[-1] is not None]
        if not curves:
            continue
        name = f"moegeom_{column.name}"
        lines += [f"# TYPE {name} gauge", f"# HELP {name} {_escaped(column.words)}."]
        lines += [_sample(name, series, c, f"{last.step:g}", c.values[-1]) for c in curves]
        name = f"moegeom_{column.name}_slope"
        sloped = [c for c in curves if c.slope is not None]
        if sloped:
            words = f"{column.words}, change per 1000 steps"
            lines += [f"# TYPE {name} gauge", f"# HELP {name} {_escaped(words)}."]
            lines += [_sample(name, series, c, f"{last.step:g}", c.slope) for c in sloped]
    write_whole(path, "\n".join([*lines, "# EOF"]) + "\n")


def _sample(name: str, series: Series, curve: Curve, step: str, value: float | None) -> str:
    labels = f'series="{_escaped(series.name)}",router="{_escaped(curve.router)}",step="{step}"'
    return f"{name}{{{labels}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


EXPORT = SeriesExport("openmetrics", write)
