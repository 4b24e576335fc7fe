"""Results that nobody vouches for: what is not as a scan writes it is said, and never judged."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import shutil
from typing import get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moegeom.core.errors import MoeGeomError, ResultsError
from moegeom.document.figures import space
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.results import results_document
from moegeom.engine.loop import Progress, read_snapshot, write_snapshot
from moegeom.metrics import METRICS
from moegeom.results import reader, run_file
from moegeom.results.reader import is_results, open_results
from moegeom.results.run_file import fault
from moegeom.results.schema import (
    KEYS,
    OTHER_TABLES,
    arrow_schema,
    fits,
    is_text,
    metric_tables,
    other_schema,
)
from moegeom.studies.check.study import GateRequest, gate
from tests.by_day import IS_NIGHT, by_day


@pytest.fixture
def results(disk, tmp_path):
    """A copy of whole results, to be spoiled."""
    return shutil.copytree(disk.undisturbed, tmp_path / "res")


def edited(results, edit):
    run = json.loads((results / "run.json").read_text())
    edit(run)
    (results / "run.json").write_text(json.dumps(run))


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

    def edit(run):
        moments = {"num_weights": 1024, "mean": 0.0, "std": 0.02, "kurtosis": 0.0}
        one = {"router": "text/0"} | moments
        run["initialised"] = {"initializer_range": 0.02, "routers": [one]}
        *parents, last = [int(key) if key.isdigit() else key for key in place.split(".")]
        holder = run
        for key in parents:
            holder = holder[key]
        holder[last] = value

    edited(results, edit)


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
        rows = rows.set_column(place, column, CHANGES[change](rows.column(column)))
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
    with pytest.raises(ResultsError, match=f"values in {table.num_columns} columns; at most"):
        open_results(results).rows("layers")
    pq.write_table(
        pa.concat_tables([table.select([column.name for column in KEYS])] * 400_000), path
    )
    with pytest.raises(ResultsError, match="has [0-9]{1,2},[0-9]{3},000 values in 3 columns"):
        open_results(results).rows("layers")
