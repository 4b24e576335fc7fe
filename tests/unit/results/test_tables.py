"""Tables are whole, described, and read alike by everything that reads Parquet."""

from __future__ import annotations

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moegeom.core.errors import ResultsError
from moegeom.metrics import METRICS
from moegeom.results.reader import open_results
from moegeom.results.schema import OTHER_TABLES, metric_tables, table_of

#: Metrics of a scan: the others are measured by ``boundary-report``.
OF_A_SCAN = [metric for metric in METRICS.all() if metric.scope in ("weights", "router")]
TABLES = (*metric_tables(OF_A_SCAN), *OTHER_TABLES)


def plain(rows) -> list[dict]:
    """Rows with lists instead of arrays and None instead of a frame's nan."""
    return [
        {
            name: list(value)
            if isinstance(value, (list, tuple, np.ndarray))
            else None
            if pd.isna(value)
            else value
            for name, value in row.items()
        }
        for row in rows
    ]


@pytest.mark.parametrize("table", TABLES)
def test_pandas_duckdb_and_polars_read_what_was_written(disk, table):
    path = disk.undisturbed / f"{table}.parquet"
    expected = plain(pq.read_table(path).to_pylist())
    by_pandas = pd.read_parquet(path, dtype_backend="pyarrow").to_dict("records")
    by_polars = pl.read_parquet(path).to_dicts()
    query = duckdb.sql(f"select * from '{path}'")
    by_duckdb = [dict(zip(query.columns, row, strict=True)) for row in query.fetchall()]
    np.testing.assert_equal(plain(by_pandas), expected)
    np.testing.assert_equal(plain(by_polars), expected)
    np.testing.assert_equal(plain(by_duckdb), expected)


def test_every_metric_column_says_what_it_is(disk):
    for metric in OF_A_SCAN:
        for table, columns in metric.columns.items():
            schema = pq.read_schema(disk.undisturbed / f"{table}.parquet")
            assert schema.metadata[b"moegeom_schema"] == b"1"
            for column in columns:
                facts = schema.field(column.name).metadata
                assert facts[b"metric_version"] == str(metric.version).encode()
                assert facts[b"text"].decode() == column.text
                assert facts.get(b"unit", b"").decode() == column.unit
                assert facts.get(b"formula", b"").decode() == column.formula
                if column.has_se:
                    assert schema.field(f"{column.name}_se").metadata[b"metric"] == facts[b"metric"]


def test_every_key_begins_with_router_variant_and_population(disk):
    for table in metric_tables(OF_A_SCAN):
        names = pq.read_schema(disk.undisturbed / f"{table}.parquet").names
        assert names[:3] == ["router", "variant", "population"]


def test_every_router_has_rows_for_itself_its_null_and_its_domains(disk):
    rows = open_results(disk.undisturbed).rows("layers")
    keys = [(row["router"], row["variant"], row["population"]) for row in rows]
    expected = [
        (router, variant, population)
        for router in ("text/0", "text/1")
        for variant in ("as_stored", "random")
        for population in ("all", "domain=code", "outliers")
    ]
    assert keys == expected


def test_nan_is_null_and_infinity_is_not(disk):
    schema = pa.schema([pa.field("x", pa.float64())])
    rows = [{"x": np.float64(np.nan)}, {"x": np.inf}, {"x": None}, {}, {"x": np.float32(2.0)}]
    assert table_of(rows, schema)["x"].to_pylist() == [None, np.inf, None, None, 2.0]


def test_a_row_may_hold_what_the_first_does_not_and_no_row_what_the_schema_has():
    schema = pa.schema(
        {"router": pa.string(), "load": pa.float64(), "nobody": pa.list_(pa.int64())}
    )
    rows = [{"router": "text/0"}, {"router": "text/1", "load": 0.5, "no column": 1}]
    assert table_of(rows, schema).to_pylist() == [
        {"router": "text/0", "load": None, "nobody": None},
        {"router": "text/1", "load": 0.5, "nobody": None},
    ]
    assert table_of([], schema).schema == schema


def test_results_are_opened_from_run_json(disk, tmp_path):
    found = open_results(disk.undisturbed)
    assert found.run["schema"] == 1
    assert found.run["parts"]["text/1"]["num_non_finite"] == 0
    with pytest.raises(ResultsError, match=r"no results: run\.json cannot be read"):
        open_results(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 99}')
    with pytest.raises(ResultsError, match="schema 99"):
        open_results(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", '"x"', "{", "null", "\udcff"])
def test_a_damaged_run_json_is_an_error_of_results(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ResultsError):
        open_results(tmp_path)


def test_a_missing_or_damaged_table_is_an_error_of_results(disk, tmp_path):
    (tmp_path / "run.json").write_bytes((disk.undisturbed / "run.json").read_bytes())
    with pytest.raises(ResultsError, match="cannot be read"):
        open_results(tmp_path).table("layers")
    (tmp_path / "layers.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(ResultsError, match="cannot be read"):
        open_results(tmp_path).table("layers")
