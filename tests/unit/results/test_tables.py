"""Tables are whole, described, read alike by all that reads Parquet, and shown as they are; counts
equal the choices. What is not as a scan writes it is said, and never judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import shutil
from typing import get_type_hints

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import moegeom as mg
from moegeom.core.errors import MoeGeomError, ResultsError
from moegeom.document.figures import space
from moegeom.document.header import duration, size
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.results import results_document
from moegeom.engine.loop import Progress, read_snapshot, write_snapshot
from moegeom.metrics import METRICS
from moegeom.results import reader, run_file
from moegeom.results.reader import EMPTY_COLUMNS, is_results, open_results
from moegeom.results.run_file import fault
from moegeom.results.schema import (
    KEYS,
    OTHER_TABLES,
    ROUTER_FACTS,
    arrow_schema,
    fits,
    is_text,
    keyed,
    metric_tables,
    other_schema,
    table_of,
    without_empty,
)
from moegeom.studies.check.study import GateRequest, gate
from tests.by_day import IS_NIGHT, by_day
from tests.unit.document.records import SAMPLE
from tests.unit.results.conftest import TOKENS

#: Metrics of a scan: the others are measured by ``boundary-report``.
OF_A_SCAN = [metric for metric in METRICS.all() if metric.scope in ("weights", "router")]
TABLES = (*metric_tables(OF_A_SCAN), *OTHER_TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_pandas_duckdb_and_polars_read_what_was_written(disk, table):
    path = disk.undisturbed / f"{table}.parquet"
    expected = pq.read_table(path).to_pylist()
    by_pandas = pd.read_parquet(path, dtype_backend="pyarrow")
    for frame in (by_pandas, duckdb.sql(f"select * from '{path}'"), pl.read_parquet(path)):
        np.testing.assert_equal(pa.table(frame).to_pylist(), expected)


def empty_in(schema) -> list[str]:
    """Columns that the file lacks, as it says: they would hold nothing."""
    return schema.metadata[EMPTY_COLUMNS].decode().split(",")


def test_every_metric_column_says_what_it_is(disk):
    for metric in OF_A_SCAN:
        for table, columns in metric.columns.items():
            schema = pq.read_schema(disk.undisturbed / f"{table}.parquet")
            assert schema.metadata[b"moegeom_schema"] == b"2"
            for column in columns:
                if column.name in empty_in(schema):
                    continue
                facts = schema.field(column.name).metadata
                assert facts[b"metric_version"] == str(metric.version).encode()
                assert facts[b"text"].decode() == column.text
                assert facts.get(b"unit", b"").decode() == column.unit
                assert facts.get(b"formula", b"").decode() == column.formula
                if column.has_se and f"{column.name}_se" not in empty_in(schema):
                    assert schema.field(f"{column.name}_se").metadata[b"metric"] == facts[b"metric"]


def test_every_router_has_rows_for_itself_its_null_and_its_domains(disk):
    for table in metric_tables(OF_A_SCAN):
        names = pq.read_schema(disk.undisturbed / f"{table}.parquet").names
        assert names[:7] == [*(column.name for column in KEYS), *ROUTER_FACTS.names]
        by_topic = ("num_tokens", "z_loss", "gini", "num_expert_sets", "margin_p50", "row_rank")
        assert table != "layers" or sorted(by_topic, key=names.index) == [*by_topic]
    rows = open_results(disk.undisturbed).rows("layers")
    populations = ("all", "domain=code", "outliers")
    expected = itertools.product(("text/0", "text/1"), ("as_stored", "random"), populations)
    assert [tuple(row[column.name] for column in KEYS) for row in rows] == [*expected]


def test_rows_are_in_natural_order_and_say_stack_layer_and_size_of_their_router():
    routers = [
        {"name": name, "num_experts": experts, "top_k": 2}
        for name, experts in (("text/2", 8), ("text/10/second", 16), ("mtp/0", 4))
    ]
    variants = ["as_stored", "random", "run-b", "bf16", "random+bf16", "topk:2", "topk:10"]
    populations = ["all", "domain=a2", "domain=a10", "outliers"]
    expected = list(itertools.product([r["name"] for r in routers], variants, populations))
    names = [column.name for column in KEYS]
    rows = [dict(zip((*names, "nothing"), (*keys, None), strict=True)) for keys in expected[::-1]]
    table = without_empty(keyed(pa.Table.from_pylist(rows), routers))
    assert [tuple(row[name] for name in names) for row in table.to_pylist()] == expected
    sizes = [tuple(row.values()) for row in table.select(ROUTER_FACTS.names).to_pylist()]
    assert list(dict.fromkeys(sizes)) == [("text", 2, 8, 2), ("text", 10, 16, 2), ("mtp", 0, 4, 2)]
    assert empty_in(table.schema) == ["nothing"]
    assert table.schema.field("layer").type == pa.int32()
    # categories of a frame sort as the rows do
    assert list(table.to_pandas()["variant"].cat.categories) == variants
    # of names of other tables: sorted by their numbers, and no number is no layer
    others = keyed(pa.table({"router": ["text/10", "text/2", "text/0-2"], "load": [1.0] * 3}))
    assert others.column_names == ["router", "stack", "layer", "load"]
    assert others["router"].to_pylist() == ["text/0-2", "text/2", "text/10"]
    assert others["layer"].to_pylist() == [None, 2, 10]


ON_SAMPLE = (SAMPLE / "step_1500", SAMPLE / "rec/step_1500")

#: Studies that write a table of routers, on the middle one of a sample.
STUDY_TABLES = {
    "imbalance": lambda to: mg.imbalance(*ON_SAMPLE, layers=1, out=to),
    "perturb": lambda to: mg.perturb(*ON_SAMPLE, layers=1, at=(5,), out=to),
    "outputs": lambda to: mg.outputs(*ON_SAMPLE, layers=1, out=to),
    "continuity": lambda to: mg.continuity(*ON_SAMPLE, layers=1, out=to),
    "regions": lambda to: mg.regions(*ON_SAMPLE, layers=1, segments=3, out=to),
}


@pytest.mark.parametrize("study", by_day(STUDY_TABLES, ["perturb", "outputs"]))
def test_a_table_of_a_study_has_the_sizes_of_its_routers_behind_their_names(tmp_path, study):
    STUDY_TABLES[study](tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.column_names[:5] == ["router", *ROUTER_FACTS.names]
    assert {*zip(*(table[n].to_pylist() for n in ROUTER_FACTS.names), strict=True)} == {
        ("text", 1, 16, 4)
    }


def test_a_column_that_would_hold_nothing_is_not_written_and_is_none_to_who_asks(disk, results):
    for path in results.glob("*.parquet"):
        table = pq.read_table(path)
        assert all(table[name].null_count < max(len(table), 1) for name in table.column_names), path
    opened, file = open_results(results), results / "layers.parquet"
    assert opened.table("layers")["harm_kl"].to_pylist() == [None] * 12
    assert {row["harm_kl"] for row in opened.rows("layers")} == {None}
    assert {*opened.columns("experts", ["selection_bias"])["selection_bias"]} == {None}
    with pytest.raises(ResultsError, match="no column 'harm'"):
        opened.rows("layers")[0]["harm"]
    pq.write_table(pq.read_table(file).drop_columns("num_dead"), file)
    with pytest.raises(ResultsError, match="no column 'num_dead'"):
        open_results(results).rows("layers")[0]["num_dead"]


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
    with pytest.raises(ResultsError, match=r"schema 99.*reads schema 2"):
        open_results(tmp_path)
    (tmp_path / "run.json").write_bytes((disk.undisturbed / "run.json").read_bytes())
    with pytest.raises(ResultsError, match="cannot be read"):
        open_results(tmp_path).table("layers")
    (tmp_path / "layers.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(ResultsError, match="cannot be read"):
        open_results(tmp_path).table("layers")


def test_layers_are_the_rows_of_the_routers_of_a_variant_on_all_tokens(disk):
    results = open_results(disk.undisturbed)
    layers, keys = results.layers(), {"variant": "as_stored", "population": "all"}
    rows = [row for row in results.rows("layers") if keys.items() <= row.items()]
    assert len(rows) == len(results.run["routers"])
    assert [{name: row[name] for name in layers.column_names} for row in rows] == layers.to_pylist()
    assert layers.column_names[:5] == ["router", *ROUTER_FACTS.names]
    assert not any(layers[name].null_count == len(layers) for name in layers.column_names)
    assert results.layers("random")["margin_p50"] != layers["margin_p50"]
    assert results.layers("bf16").num_rows == 0


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


@pytest.fixture
def results(disk, tmp_path):
    """A copy of whole results, to be spoiled."""
    return shutil.copytree(disk.undisturbed, tmp_path / "res")


#: Formats, and those in which facts of a run are shown by day: pages and Markdown show no others.
FORMS = tuple(one.name for one in RENDERERS.all() if not one.of_verdicts)
FORMS_OF_FACTS = by_day(FORMS, {"sentences": "table", "records": "json"})


def show(results, forms=FORMS):
    """Everything that reads results from elsewhere."""
    opened = open_results(results)
    for name in forms:
        render(results_document(opened, View()), name)
    gate(GateRequest(str(results)))


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    """By day points are drawn where they are: t-SNE takes longer than all the rest."""
    if not IS_NIGHT:
        monkeypatch.setattr(space, "embedding", lambda points: np.resize(points, (len(points), 2)))


def test_what_a_scan_writes_is_as_it_must_be_and_known_to_its_reader(disk):
    """``plan`` is compared as a whole; what a part says beside its reasons is not read."""
    run = json.loads((disk.undisturbed / "run.json").read_text())
    assert fault(run) == ""
    show(disk.undisturbed)
    kinds = get_type_hints(run_file._Run)
    assert {*run} - {*kinds} == {"plan", "schema"}
    for place, kind in (("checkpoint", "_Checkpoint"), ("tokens", "_Tokens"), ("trust", "_Trust")):
        assert {*run[place]} <= {*get_type_hints(getattr(run_file, kind))}, place
    assert {*run["routers"][0]} <= {*get_type_hints(run_file._Router)}


def test_types_of_columns_are_those_of_the_metrics():
    for table in metric_tables(METRICS.all()):
        for field in arrow_schema(table, METRICS.all()):
            assert fits(table, field), (table, field)
            assert pa.types.is_string(field.type) == is_text(field.name)
    for table in OTHER_TABLES:
        assert all(fits(table, field) for field in other_schema(table))


#: Facts by their place in run.json, and what may stand there instead.
PLACES = """
checkpoint checkpoint.name checkpoint.notes checkpoint.num_expected checkpoint.layer_notes routers
routers.0 routers.0.name routers.1.name routers.0.num_experts routers.0.is_affine
routers.0.num_groups routers.0.num_kept_groups routers.0.group_fill tokens tokens.num_tokens
tokens.stage trust trust.overridden trust.fingerprint parts parts.text/0.reasons seconds
column_versions initialised initialised.initializer_range initialised.routers.0.num_weights
initialised.routers.0.std initialised.groups gating gating.unsaid quantisation device device.names
noise run_b checkpoint_b token_tables
""".split()
NONSENSE = ([], {}, "x", "x/y", 1.5, 0, -1, True, None, [[]], {"a": {"b": 1}})


def put(results, place, value):
    """Puts a value into a run.json that says how its routers began."""
    run = holder = json.loads((results / "run.json").read_text())
    moments = {"num_weights": 1024, "mean": 0.0, "std": 0.02, "kurtosis": 0.0}
    one = {"router": "text/0"} | moments
    run["initialised"] = {"initializer_range": 0.02, "routers": [one]}
    *parents, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    for key in parents:
        holder = holder[key]
    holder[last] = value
    (results / "run.json").write_text(json.dumps(run))


def test_any_nonsense_in_run_json_is_opened_or_refused_in_a_sentence(results):
    whole = (results / "run.json").read_text()
    for place, value in itertools.product(PLACES, NONSENSE):
        put(results, place, value)
        with contextlib.suppress(ResultsError):
            open_results(results)
        (results / "run.json").write_text(whole)


@pytest.mark.parametrize(
    ("place", "number"),
    by_day(
        itertools.product(PLACES, range(len(NONSENSE))),
        [(place, number % len(NONSENSE)) for number, place in enumerate(PLACES)],
    ),
)
def test_nonsense_in_run_json_is_a_sentence_or_harmless_wherever_it_is_shown(
    results, place, number
):
    put(results, place, NONSENSE[number])
    with contextlib.suppress(MoeGeomError):
        show(results, FORMS_OF_FACTS)


def test_a_run_json_that_is_none_is_refused_shortly_and_what_is_missing_is_named(results):
    run, file = json.loads((results / "run.json").read_text()), results / "run.json"
    texts = ["", "[]", "5", "{", "null", '"x"', '{"schema": 1e999}', "[" * 99999]
    for text in (*texts, '{"schema": ' + "9" * 5000, "\udcff"):
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ResultsError):
            open_results(results)
    for key in ("checkpoint", "routers", "tokens", "trust", "parts"):
        file.write_text(json.dumps({name: run[name] for name in run if name != key}))
        with pytest.raises(ResultsError, match=f"'{key}' is missing"):
            open_results(results)
    for changes in (
        {"routers": [run["routers"][0] | {"name": ["x" * 100_000]}]},
        {"schema": {"a": {"b": ["c" * 5000] * 50}}},
        {"parts": run["parts"] | {"k" * 100_000: {"reasons": 1}}},
        {"libraries": run["libraries"] | {"k" * 100_000: 1}},
    ):
        file.write_text(json.dumps(run | changes))
        with pytest.raises(ResultsError) as caught:
            open_results(results)
        assert len(str(caught.value).replace(str(results), "")) < 500


def test_a_run_json_holds_as_many_values_as_any_may_and_not_one_more(results):
    file = results / "run.json"
    raw = file.read_bytes().strip()
    left = 10**6 - sum(raw.count(mark) for mark in (b"{", b"[", b":", b","))
    for more, is_read in ((0, True), (1, False)):
        many = b"1," * (left - 3 + more) + b"1"
        file.write_bytes(raw[:-1] + b', "filler": [' + many + b"]}")
        with (
            contextlib.nullcontext()
            if is_read
            else pytest.raises(ResultsError, match="than 1000000 values")
        ):
            open_results(results)


def _one_row(column, value):
    """The column with this in one row of it, in the middle."""
    values = column.to_pylist()
    values[len(values) // 3] = value(values[len(values) // 3]) if callable(value) else value
    return pa.array(values, column.type)


def shorter(value):
    return value[:-1] if isinstance(value, str | list) else None


#: What is done to a column: of the whole of it, and of one row.
CHANGES = {
    "text": lambda column: pa.array(["x"] * len(column)),
    "bytes": lambda column: pa.array([b"\xff"] * len(column)),
    "struct": lambda column: pa.array([{"a": 1}] * len(column)),
    "null": lambda column: pa.array([None] * len(column)),
    "one null": lambda column: _one_row(column, None),
    "one far": lambda column: _one_row(column, FAR.get(column.type)),
    "one shorter": lambda column: _one_row(column, shorter),
    "missing": None,
    "twice": None,
}
FAR = {pa.int64(): -3, pa.int32(): -3, pa.float64(): 1e300, pa.float32(): 1e38, pa.string(): "x"}


def of_metrics(table):
    return arrow_schema(table, METRICS.all())


#: Every column that a scan writes, each with one change.
TURNS = [
    (table, column, list(CHANGES)[number % len(CHANGES)])
    for number, (table, column) in enumerate(
        (table, field.name)
        for table in (*metric_tables(METRICS.all()), *OTHER_TABLES)
        for field in (other_schema if table in OTHER_TABLES else of_metrics)(table)
    )
]


@pytest.mark.parametrize(
    ("table", "column", "change"),
    by_day(
        dict.fromkeys([*TURNS, *(("matrices", "values", change) for change in CHANGES)]),
        [*TURNS[:: len(TURNS) // 8], ("matrices", "values", "one null")],
    ),
)
def test_columns_that_are_missing_or_hold_something_else_are_a_sentence_or_unknown(
    results, table, column, change
):
    file = results / f"{table}.parquet"
    rows = pq.read_table(file)
    if column not in rows.column_names:
        pytest.skip("a column of a scan with more options")
    place = rows.schema.get_field_index(column)
    if change == "missing":
        rows = rows.remove_column(place)
    elif change == "twice":
        rows = rows.append_column(column, rows.column(column))
    else:
        cells = rows.column(column)
        is_text = pa.types.is_dictionary(cells.type)
        cells = CHANGES[change](cells.cast(pa.string()) if is_text else cells)
        rows = rows.set_column(place, column, cells)
    pq.write_table(rows, file)
    with contextlib.suppress(MoeGeomError):
        show(results)


def test_snapshots_are_as_they_were_written_and_begun_anew_where_mutated_or_missing(tmp_path):
    progress = Progress(3, 3072, (5,), 1, {"load": {"counts": np.arange(24.0).reshape(2, 3, 4)}})
    path, moments = tmp_path / "x.npz", random.Random(3)
    assert read_snapshot(path) is None
    write_snapshot(path, progress)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    raw = path.read_bytes()
    again = read_snapshot(path)
    np.testing.assert_equal(dataclasses.asdict(again), dataclasses.asdict(progress))
    num_refused = 0
    for _ in range(400):
        spoiled = bytearray(raw)
        at = moments.randrange(len(raw))
        spoiled[at : at + moments.randint(1, 4)] = moments.randbytes(moments.randint(0, 4))
        path.write_bytes(spoiled[: moments.choice([len(spoiled), moments.randrange(len(spoiled))])])
        again = read_snapshot(path)
        num_refused += again is None
        if again is not None:  # in bytes that say nothing
            np.testing.assert_equal(again.states, progress.states)
    assert num_refused > 300


def test_results_are_recognised_only_where_nothing_else_is(results):
    assert is_results(results)
    (results / "report.md").write_text("kept beside them")
    assert is_results(results)
    for name in ("config.json", "model.safetensors", "notes.json"):
        (results / name).write_text("{}")
        assert not is_results(results)
        (results / name).unlink()
    (results / "tokens").mkdir(exist_ok=True)
    (results / "tokens" / "model.bin").write_text("")
    assert not is_results(results)


def test_results_shipped_with_a_checkpoint_are_not_judged(disk, tmp_path):
    model = shutil.copytree(disk.model, tmp_path / "model")
    shutil.copytree(disk.undisturbed, model, dirs_exist_ok=True)
    judged = gate(GateRequest(str(model)))
    assert judged.run["tokens"] is None  # the weights were read, and nothing else
    assert "run.json beside the weights" in str(judged.verdict.not_looked_at)
    of_results = gate(GateRequest(str(disk.undisturbed))).verdict
    assert "results of a scan" in str(of_results.not_looked_at)


def test_a_table_of_rows_that_repeat_or_of_more_than_is_read_is_refused(results, monkeypatch):
    path = results / "layers.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table]), path)
    with pytest.raises(ResultsError, match=rf"{len(table)} rows with the router, variant and"):
        open_results(results).rows("layers")
    monkeypatch.setattr(reader, "RESULT_COLUMNS", 9)
    num_columns = table.num_columns + len(empty_in(table.schema))
    with pytest.raises(ResultsError, match=f"values in {num_columns} columns; at most"):
        open_results(results).rows("layers")
    pq.write_table(
        pa.concat_tables([table.select([column.name for column in KEYS])] * 400_000), path
    )
    with pytest.raises(ResultsError, match="has [0-9]{3},[0-9]{3},000 values in [0-9]{2} "):
        open_results(results).rows("layers")
