"""The whole series as one JSON document."""

from __future__ import annotations

import dataclasses
import json

from moegeom.core.series import SERIES_COLUMNS, Series
from moegeom.report._reporter import View
from moegeom.report._series_reporter import SeriesReporter


def render(series: Series, view: View) -> str:
    """Every field of the series, and the words for its columns; unknown is null."""
    shown = {curve.column for curve in series.curves}
    columns = [dataclasses.asdict(column) for column in SERIES_COLUMNS if column.name in shown]
    document = dataclasses.asdict(series) | {"columns": columns}
    return json.dumps(document, allow_nan=False) + "\n"


REPORTER = SeriesReporter("json", render)
