"""The whole series as one JSON document."""

from __future__ import annotations

import dataclasses
import json

from moegeom.core.series import Series
from moegeom.report._reporter import View
from moegeom.report._series_reporter import SeriesReporter


def render(series: Series, view: View) -> str:
    """Every field of the series; unknown is null."""
    return json.dumps(dataclasses.asdict(series), allow_nan=False) + "\n"


REPORTER = SeriesReporter("json", render)
