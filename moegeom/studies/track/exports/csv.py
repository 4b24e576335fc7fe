"""One line per router, step and figure."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from moegeom.core.files import write_whole
from moegeom.core.series import Series
from moegeom.studies.track.export import SeriesExport


def write(series: Series, path: Path) -> None:
    """Columns router, step, checkpoint, figure, value, standard_error; unknown is empty."""
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["router", "step", "checkpoint", "figure", "value", "standard_error"])
    for curve in (*series.curves, *series.expert_loads):
        for step, value, error in zip(series.steps, curve.values, curve.errors, strict=True):
            lines.writerow(
                [
                    curve.router,
                    f"{step.step:g}",
                    step.name,
                    curve.column,
                    "" if value is None else repr(value),
                    "" if error is None else repr(error),
                ]
            )
    write_whole(path, text.getvalue())


EXPORT = SeriesExport("csv", write)
