"""One JSON document: run facts, findings, and every table but the rows per token."""

from __future__ import annotations

import json
import math
from typing import Any

from moegeom.report._reporter import Reporter, View
from moegeom.results.reader import Results


def render(results: Results, view: View) -> str:
    """The results as JSON; infinities are the strings "inf" and "-inf", unknown is null."""
    document = {"run": results.run, "results": results.path.name}
    document |= {table: results.rows(table) for table in results.tables()}
    return json.dumps(_strict(document), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


REPORTER = Reporter("json", render)
