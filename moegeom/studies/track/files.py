"""What a series leaves beside the results of its steps: series.parquet and series.json."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.files import write_whole
from moegeom.core.series import Series
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.studies.track.document import document


def write_series(folder: Path, series: Series) -> None:
    """series.parquet: a row per router, step and column; series.json: what --format json prints."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        (curve.router, step.step, step.name, curve.column, value, error)
        for curve in (*series.curves, *series.expert_loads)
        for step, value, error in zip(series.steps, curve.values, curve.errors, strict=True)
    ]
    names = ("router", "step", "checkpoint", "column", "value", "value_se")
    kinds = (pa.string(), pa.float64(), pa.string(), pa.string(), pa.float64(), pa.float64())
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    arrays = [pa.array(column, type=kind) for column, kind in zip(columns, kinds, strict=True)]
    table = pa.Table.from_arrays(arrays, names=list(names))
    write_whole(folder / "series.parquet", lambda file: pq.write_table(table, file))
    write_whole(folder / "series.json", render(document(series, View()), "json"))
