"""The whole series as one JSON document."""

from __future__ import annotations

import dataclasses

from moegeom.core.series import SERIES_COLUMNS, Series
from moegeom.document._reporter import Reporter, View
from moegeom.document.strict_json import document_text


def render(series: Series, view: View) -> str:
    """Every field of the series, and the words for its columns; unknown is null."""
    shown = {curve.column for curve in series.curves}
    columns = [dataclasses.asdict(column) for column in SERIES_COLUMNS if column.name in shown]
    document = dataclasses.asdict(series) | {"columns": columns}
    return document_text(document)


REPORTER = Reporter("json", render)
