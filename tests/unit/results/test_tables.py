"""Tables are whole, described, read alike by all that reads Parquet, and shown as they are."""

from __future__ import annotations

import json
import math

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moegeom.core.errors import ResultsError
from moegeom.document.header import duration, size
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.document.results import results_document
from moegeom.metrics import METRICS
from moegeom.results.reader import DERIVED, open_results, with_derived
from moegeom.results.schema import OTHER_TABLES, metric_tables, table_of
from tests.unit.results.conftest import TOKENS

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


def test_every_router_has_rows_for_itself_its_null_and_its_domains(disk):
    for table in metric_tables(OF_A_SCAN):
        names = pq.read_schema(disk.undisturbed / f"{table}.parquet").names
        assert names[:3] == ["router", "variant", "population"]
    rows = open_results(disk.undisturbed).rows("layers")
    keys = [(row["router"], row["variant"], row["population"]) for row in rows]
    expected = [
        (router, variant, population)
        for router in ("text/0", "text/1")
        for variant in ("as_stored", "random")
        for population in ("all", "domain=code", "outliers")
    ]
    assert keys == expected


def test_nan_is_null_and_a_row_may_lack_what_another_holds():
    schema = pa.schema([pa.field("x", pa.float64())])
    rows = [{"x": np.float64(np.nan)}, {"x": np.inf}, {"x": None}, {}, {"x": np.float32(2.0)}]
    assert table_of(rows, schema)["x"].to_pylist() == [None, np.inf, None, None, 2.0]
    schema = pa.schema(
        {"router": pa.string(), "load": pa.float64(), "nobody": pa.list_(pa.int64())}
    )
    rows = [{"router": "text/0"}, {"router": "text/1", "load": 0.5, "no column": 1}]
    assert table_of(rows, schema).to_pylist() == [
        {"router": "text/0", "load": None, "nobody": None},
        {"router": "text/1", "load": 0.5, "nobody": None},
    ]
    assert table_of([], schema).schema == schema


def test_results_are_opened_from_run_json_and_name_no_path_and_no_token_id(disk):
    results = open_results(disk.undisturbed)
    assert results.run["schema"] == 1
    assert results.run["parts"]["text/1"]["num_non_finite"] == 0
    assert repr(results).startswith("Results(") and len(repr(results)) < 300
    assert f"2 routers, {TOKENS:,} tokens" in repr(results)
    text = (disk.undisturbed / "run.json").read_text()
    assert str(disk.folder) not in text
    assert '"token_id"' not in text


def test_what_is_missing_damaged_or_of_a_later_schema_is_an_error_of_results(disk, tmp_path):
    with pytest.raises(ResultsError, match=r"no results: run\.json cannot be read"):
        open_results(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 99}')
    with pytest.raises(ResultsError, match=r"schema 99.*reads schema 1"):
        open_results(tmp_path)
    (tmp_path / "run.json").write_bytes((disk.undisturbed / "run.json").read_bytes())
    with pytest.raises(ResultsError, match="cannot be read"):
        open_results(tmp_path).table("layers")
    (tmp_path / "layers.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(ResultsError, match="cannot be read"):
        open_results(tmp_path).table("layers")


def test_layers_are_the_rows_of_the_routers_of_a_variant_on_all_tokens(disk):
    results = open_results(disk.undisturbed)
    layers, all_rows = results.layers(), results.table("layers").to_pylist()
    by_router = {
        row["router"]: row
        for row in all_rows
        if (row["variant"], row["population"]) == ("as_stored", "all")
    }
    assert len(all_rows) > len(by_router) == len(results.run["routers"])
    for row, facts in zip(layers.to_pylist(), results.run["routers"], strict=True):
        same = by_router[facts["name"]]
        assert row["layer"] == int(facts["name"].split("/")[1])
        assert (row["num_experts"], row["top_k"]) == (facts["num_experts"], facts["top_k"])
        assert {n: v for n, v in row.items() if n in same} == {
            n: v for n, v in same.items() if n in row
        }
    assert layers.column_names[:4] == ["router", "layer", "num_experts", "top_k"]
    assert not any(layers[name].null_count == len(layers) for name in layers.column_names)
    assert results.layers("random")["margin_p50"] != layers["margin_p50"]
    assert results.layers("bf16").num_rows == 0


FACTS = {"name": "text/0", "num_experts": 8, "top_k": 2, "hidden_size": 64}

WRITTEN = {column.name for metric in METRICS.all() for column in metric.columns.get("layers", ())}


def layers(router="text/0", **columns):
    return pa.table({"router": [router]} | {name: [value] for name, value in columns.items()})


#: What is derived, a value of its source, and what that makes of it, worked out by hand.
BY_HAND = [
    ("load_imbalance_global", 0.5, 1.5),
    ("load_entropy_nats", 1.0, math.log(8)),
    ("kl_to_uniform_nats", 1.0, 0.0),
    ("diversity", 4.0, 0.5),
    ("load_balancing_loss_hf", 1.0, 2.0),
    ("boundary_distance_rms_p50", 16.0, 2.0),
    ("chosen_entropy_normalised", math.log(2), 1.0),
    ("load_cv_ddof1", math.sqrt(7 / 8), 1.0),
    ("routing_entropy_nats", 0.5, math.log(8) / 2),
]


def test_what_is_derived_is_not_written_and_has_the_values_worked_out_by_hand():
    assert {name: DERIVED[name].column in WRITTEN for name in DERIVED} == dict.fromkeys(DERIVED, 1)
    assert not WRITTEN & DERIVED.keys()
    for name, source, value in BY_HAND:
        table = with_derived(layers(**{DERIVED[name].column: source}), [FACTS])
        assert table[name].to_pylist() == [pytest.approx(value)], name
    # an error is scaled and never negative
    rows = layers(load_entropy_normalised=0.5, load_entropy_normalised_se=0.1)
    table = with_derived(rows, [FACTS])
    assert table["kl_to_uniform_nats_se"].to_pylist() == [pytest.approx(0.1 * math.log(8))]


def test_what_a_file_holds_is_believed_and_where_nothing_follows_there_is_null():
    table = with_derived(layers(max_vio_global=0.5, load_imbalance_global=9.0), [FACTS])
    assert table["load_imbalance_global"].to_pylist() == [9.0]
    foreign = with_derived(layers("text/9", diversity=None, max_vio_global=1.0), [FACTS])
    assert foreign["load_imbalance_global"].to_pylist() == [None]
    one = FACTS | {"num_experts": 1, "top_k": 1}
    table = with_derived(layers(load_cv_ddof0=0.0, chosen_entropy_nats=0.0), [one])
    assert table["load_cv_ddof1"].to_pylist() == [None]
    assert table["chosen_entropy_normalised"].to_pylist() == [None]


def rendered(disk, name: str, **view) -> str:
    form = View(**view)
    return render(results_document(open_results(disk.undisturbed), form), name, form)


def test_json_is_strict_and_markdown_and_json_hold_every_layer(disk):
    text = rendered(disk, "json")
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"not strict: {name}"))
    stored = [row for row in document["layers"] if row["variant"] == "as_stored"]
    assert {row["router"] for row in stored} == {"text/0", "text/1"}
    lines = rendered(disk, "md").splitlines()
    assert sum(line.startswith(("| 0 |", "| 1 |")) for line in lines) == 2


def test_sizes_and_times_read_as_a_person_would_write_them():
    assert [size(n) for n in (0, 999, 27_800_000, 61.1e9)] == ["0 B", "999 B", "27.8 MB", "61.1 GB"]
    assert [duration(s) for s in (0.004, 0.25, 12.0)] == ["4 ms", "0.2 s", "12.0 s"]
