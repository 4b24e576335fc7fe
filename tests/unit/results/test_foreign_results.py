"""Results that nobody vouches for: what is not as a scan writes it is said, and never judged."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moegeom.core.errors import MoeGeomError, ResultsError
from moegeom.core.router import TokenTable
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.results import results_document
from moegeom.engine.snapshot import read_snapshot
from moegeom.metrics import METRICS
from moegeom.results.reader import is_results, open_results
from moegeom.results.run_file import _RUN, fault
from moegeom.results.schema import (
    OTHER_TABLES,
    arrow_schema,
    fits,
    is_text,
    metric_tables,
    other_schema,
)
from moegeom.studies.check.study import GateRequest, gate


@pytest.fixture
def results(disk, tmp_path):
    """A copy of whole results, to be spoiled."""
    return shutil.copytree(disk.undisturbed, tmp_path / "res")


def edited(results, edit):
    run = json.loads((results / "run.json").read_text())
    edit(run)
    (results / "run.json").write_text(json.dumps(run))


def shown(results):
    """Everything that reads results from elsewhere."""
    found = open_results(results)
    for name in (one.name for one in RENDERERS.all() if not one.of_verdicts):
        render(results_document(found, View()), name)
    gate(GateRequest(str(results)))


def test_what_a_scan_writes_is_as_it_must_be(disk):
    run = json.loads((disk.undisturbed / "run.json").read_text())
    assert fault(run) == ""
    shown(disk.undisturbed)


def test_types_of_columns_are_those_of_the_metrics():
    for table in metric_tables(METRICS.all()):
        for field in arrow_schema(table, METRICS.all()):
            assert fits(table, field), (table, field)
            assert pa.types.is_string(field.type) == is_text(field.name)
    for table in OTHER_TABLES:
        assert all(fits(table, field) for field in other_schema(table))


PLACES = [
    ("checkpoint",),
    ("checkpoint", "name"),
    ("checkpoint", "notes"),
    ("checkpoint", "num_expected"),
    ("routers",),
    ("routers", 0),
    ("routers", 0, "name"),
    ("routers", 1, "name"),
    ("routers", 0, "num_experts"),
    ("routers", 0, "is_affine"),
    ("tokens",),
    ("tokens", "num_tokens"),
    ("tokens", "stage"),
    ("trust",),
    ("trust", "overridden"),
    ("parts",),
    ("parts", "text/0", "reasons"),
    ("seconds",),
    ("column_versions",),
    ("initialised",),
    ("initialised", "initializer_range"),
    ("initialised", "routers", 0, "num_weights"),
    ("initialised", "routers", 0, "std"),
    ("initialised", "groups"),
    ("gating",),
    ("gating", "unsaid"),
    ("quantisation",),
    ("routers", 0, "num_groups"),
    ("routers", 0, "num_kept_groups"),
    ("routers", 0, "group_fill"),
    ("trust", "fingerprint"),
    ("checkpoint", "layer_notes"),
    ("device",),
    ("device", "names"),
    ("noise",),
    ("run_b",),
    ("checkpoint_b",),
    ("token_tables",),
]


def test_every_fact_that_a_scan_writes_is_known_to_its_reader(disk):
    """``plan`` is compared as a whole; what a part says beside its reasons is not read."""
    run = json.loads((disk.undisturbed / "run.json").read_text())
    assert {*run} - {*_RUN} == {"plan", "schema"}
    for place in ("checkpoint", "tokens", "trust"):
        assert {*run[place]} <= {*_RUN[place]}, place
    assert {*run["routers"][0]} <= {*_RUN["routers"][0]}


def test_the_table_of_token_tables_is_that_of_the_program():
    assert {*_RUN["token_tables"][0]} == {field.name for field in dataclasses.fields(TokenTable)}


def test_what_is_said_of_a_run_json_is_short(results):
    for edit in (
        lambda run: run["routers"][0].update(name=["x" * 100_000]),
        lambda run: run.update(schema={"a": {"b": ["c" * 5000] * 50}}),
        lambda run: run["parts"].update({"k" * 100_000: {"reasons": 1}}),
        lambda run: run["libraries"].update({"k" * 100_000: 1}),
    ):
        before = (results / "run.json").read_text()
        edited(results, edit)
        with pytest.raises(ResultsError) as caught:
            open_results(results)
        assert len(str(caught.value).replace(str(results), "")) < 500
        (results / "run.json").write_text(before)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
@pytest.mark.parametrize(
    "value", [[], {}, "x", "x/y", 1.5, 0, -1, True, None, [[]], {"a": {"b": 1}}]
)
def test_any_nonsense_in_run_json_is_a_sentence_or_harmless(results, place, value):
    def edit(run):
        moments = {"num_weights": 1024, "mean": 0.0, "std": 0.02, "kurtosis": 0.0}
        run["initialised"] = {
            "initializer_range": 0.02, "routers": [{"router": "text/0"} | moments],
        }  # fmt: skip
        holder = run
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = value

    edited(results, edit)
    with contextlib.suppress(MoeGeomError):
        shown(results)


@pytest.mark.parametrize("key", ["checkpoint", "routers", "tokens", "trust", "parts"])
def test_what_is_missing_is_named(results, key):
    edited(results, lambda run: run.pop(key))
    with pytest.raises(ResultsError, match=f"'{key}' is missing"):
        open_results(results)


@pytest.mark.parametrize(
    "text", ["", "[]", "5", "{", '{"schema": 1e999}', "[" * 99999, '{"schema": ' + "9" * 5000]
)
def test_a_run_json_that_is_none_is_refused(results, text):
    (results / "run.json").write_text(text)
    with pytest.raises(ResultsError):
        open_results(results)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("column", ["router", "variant", "population", "num_tokens", "margin_p50"])
@pytest.mark.parametrize("change", ["missing", "text", "bytes", "struct", "null", "twice"])
@pytest.mark.parametrize("table", ["layers", "experts"])
def test_columns_that_are_missing_or_of_another_type_are_a_sentence_or_unknown(
    results, table, column, change
):
    file = results / f"{table}.parquet"
    held = pq.read_table(file)
    if column not in held.column_names:
        column = "load"
    place, rows = held.schema.get_field_index(column), len(held)
    if change == "missing":
        held = held.remove_column(place)
    elif change == "twice":
        held = held.append_column(column, held.column(column))
    else:
        kind = {
            "text": pa.array(["x"] * rows),
            "bytes": pa.array([b"\xff"] * rows),
            "struct": pa.array([{"a": 1}] * rows),
            "null": pa.nulls(rows),
        }[change]
        held = held.set_column(place, column, kind)
    pq.write_table(held, file)
    with contextlib.suppress(MoeGeomError):
        shown(results)


@pytest.mark.nightly  # by day the fuzzer tries results among all other kinds
def test_mutated_results_end_in_a_report_or_in_one_of_our_errors(results):
    moments = random.Random(19)
    files = sorted(path for path in results.iterdir() if path.is_file())
    for _ in range(120):
        file = moments.choice(files)
        before = file.read_bytes()
        raw = bytearray(before)
        for _ in range(moments.randint(1, 3)):
            at = moments.choice(
                [moments.randrange(len(raw)), max(0, len(raw) - moments.randint(1, 2000))]
            )
            raw[at : at + moments.randint(0, 4)] = moments.randbytes(moments.randint(0, 4))
        file.write_bytes(raw)
        with contextlib.suppress(MoeGeomError):
            shown(results)
        file.write_bytes(before)


def test_mutated_snapshots_are_begun_anew_or_as_they_were(tmp_path):
    import numpy as np

    from moegeom.engine.loop import Progress
    from moegeom.engine.snapshot import write_snapshot

    held = Progress(3, 3072, (5,), 1, {"load": {"counts": np.arange(24.0).reshape(2, 3, 4)}})
    path, moments = tmp_path / "x.npz", random.Random(3)
    write_snapshot(path, held)
    raw = path.read_bytes()
    again = read_snapshot(path)
    assert (again.next_tile, again.non_finite) == (3, (5,))
    np.testing.assert_array_equal(again.states["load"]["counts"], held.states["load"]["counts"])
    num_refused = 0
    for _ in range(400):
        spoiled = bytearray(raw)
        at = moments.randrange(len(raw))
        spoiled[at : at + moments.randint(1, 4)] = moments.randbytes(moments.randint(0, 4))
        path.write_bytes(spoiled[: moments.choice([len(spoiled), moments.randrange(len(spoiled))])])
        found = read_snapshot(path)
        num_refused += found is None
        if found is not None:  # in bytes that say nothing
            np.testing.assert_equal(found.states, held.states)
    assert num_refused > 300


def test_results_are_recognised_only_where_nothing_else_is(results, disk, tmp_path):
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
    found = gate(GateRequest(str(model)))
    assert found.run["tokens"] is None  # the weights were read, and nothing else
    assert any("run.json beside the weights" in said for said in found.verdict.not_looked_at)
    of_results = gate(GateRequest(str(disk.undisturbed))).verdict
    assert any("results of a scan" in said for said in of_results.not_looked_at)
