"""What is said of a series: drift, drivers, reports, and exports read back by their own tools."""

import csv
import json
import statistics

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from moegeom.document.sparkline import sparkline
from moegeom.results.reader import open_results
from moegeom.studies.track.document import document
from moegeom.studies.track.exports import SERIES_EXPORTS
from moegeom.studies.track.study import TrackRequest, track
from tests.unit.studies.samples import BALANCED, few_tokens, worded


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in (100, 1000, 300):
        (folder / f"step_{step}").symlink_to(BALANCED / f"step_{step}")
        (folder / f"rec_{step}").symlink_to(few_tokens(BALANCED.name, step))
    steps, tokens = (str(folder / "step_*"),), str(folder / "rec_{step}")
    return folder, track(TrackRequest(steps, out=folder / "first", tokens=tokens, layers="0,2"))


def curve(series, router, column):
    (found,) = [c for c in series.curves if (c.router, c.column) == (router, column)]
    return found


def test_experts_that_drive_the_load_are_those_whose_term_changed_most(run):
    def loads(step):
        rows = open_results(run[0] / "first" / f"step_{step}.moegeom").rows("experts")
        place = ("text/0", "as_stored", "all")
        return np.array(
            [r["load"] for r in rows if (r["router"], r["variant"], r["population"]) == place]
        )

    change = (loads(1000) - 1) ** 2 - (loads(100) - 1) ** 2
    first = next(d for d in run[1].drivers if (d.router, d.kind) == ("text/0", "expert"))
    assert int(first.name) == np.abs(change).argmax()
    np.testing.assert_allclose(
        first.contribution, change[int(first.name)] / np.abs(change).sum(), rtol=1e-9
    )


def test_every_export_holds_every_router(run, tmp_path):
    series = run[1]
    assert len(json.loads(worded(document, series, "json"))["curves"]) == len(series.curves)
    SERIES_EXPORTS["csv"].write(series, tmp_path / "series.csv")
    text = (tmp_path / "series.csv").read_text("utf-8")
    lines = list(csv.DictReader(text.splitlines()))
    assert len(lines) == 3 * len(series.curves)


def test_openmetrics_is_read_by_the_client_of_prometheus_and_a_sparkline_shows_gaps(run, tmp_path):
    file = tmp_path / "series.prom"
    SERIES_EXPORTS["openmetrics"].write(run[1], file)
    text = file.read_text("utf-8")
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {s.labels["router"]: s.value for s in families["moegeom_max_vio_global"].samples}
    assert found == {c.router: c.values[-1] for c in run[1].of_column("max_vio_global")}
    assert sparkline([0.0, 1.0, None, 0.5]) == "▁█ ▅"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([None, None]) == "  "


def test_tensorboard_reads_what_was_written(run, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    SERIES_EXPORTS["tensorboard"].write(run[1], tmp_path / "events")
    events = reader.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = events.Scalars("max_vio_global/text/0")
    assert [event.step for event in found] == [100, 300, 1000]
    values = curve(run[1], "text/0", "max_vio_global").values
    np.testing.assert_allclose([event.value for event in found], values, rtol=1e-6)


def test_a_run_of_wandb_holds_medians_and_the_worst_routers(run, tmp_path, monkeypatch):
    """Offline, in the file that wandb writes: read by its own classes, block by block as LevelDB
    logs are.
    """
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    SERIES_EXPORTS["wandb"].write(run[1], "routers")
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(record) for record in log_records(file.read_bytes())]
    assert next(r.run.project for r in records if r.HasField("run")) == "routers"
    rows = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [row["step"] for row in rows] == [100, 300, 1000]
    curves = run[1].of_column("max_vio_global")
    for index, row in enumerate(rows):
        values = [curve.values[index] for curve in curves]
        assert row["max_vio_global/worst"] == max(values)
        assert row["max_vio_global/median"] == statistics.median(values)
        assert row["max_vio_global/text/0"] == curves[0].values[index]
    worst = max(curves, key=lambda curve: curve.values[-1]).router
    summary = {i.key: i.value_json for r in records for i in r.summary.update}
    assert json.loads(summary["max_vio_global/worst_router"]) == worst
    assert not any("expert" in name.split("/") for row in rows for name in row)


def log_records(log):
    """Payloads of a LevelDB log behind its first seven bytes: fragments of blocks of 32 KiB."""
    place, whole = 7, b""
    while place + 7 <= len(log):
        left = 2**15 - place % 2**15
        size, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        if left < 7 or kind == 0:
            place += left
            continue
        whole += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last fragment
            yield whole
            whole = b""
