"""A results directory is whole or absent, belongs to one plan and has one writer."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest

from moegeom import pipeline
from moegeom.core.errors import UsageError
from moegeom.metrics import METRICS
from moegeom.pipeline import scan
from moegeom.results import writer as writer_module
from moegeom.results.writer import ResultsWriter


class Killed(BaseException):
    """Stands for the end of the process at this place."""


@pytest.fixture
def interrupted(disk, tmp_path, monkeypatch):
    """A run that ended after its first router."""

    def stop(router, *rest):
        if router.name == "text/1":
            raise Killed
        return measure(router, *rest)

    measure = pipeline.measure
    monkeypatch.setattr(pipeline, "measure", stop)
    with pytest.raises(Killed):
        scan(disk.request(tmp_path / "out"))
    monkeypatch.setattr(pipeline, "measure", measure)
    return tmp_path / "out"


def test_an_existing_output_is_a_usage_error_and_left_alone(disk, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already") as caught:
        scan(disk.request(out))
    assert caught.value.exit_code == 2
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_a_run_goes_on_after_the_routers_that_are_finished(disk, interrupted, monkeypatch):
    begun = []
    measure = pipeline.measure_router
    monkeypatch.setattr(
        pipeline, "measure_router", lambda run: begun.append(run.router.name) or measure(run)
    )
    assert not interrupted.exists()
    out = scan(disk.request(interrupted))
    assert begun == ["text/1"]
    np.testing.assert_equal(disk.tables(out), disk.tables(disk.undisturbed))
    assert not out.with_name("out.partial").exists()


def test_at_no_moment_is_there_a_part_of_the_results(disk, tmp_path):
    """Looked at before every file that is opened, made, moved or removed."""
    out = tmp_path / "out"
    whole = sorted(p.name for p in disk.undisturbed.iterdir())
    seen: set[tuple[str, ...]] = set()
    watching = True

    def look(event: str, arguments: tuple) -> None:
        nonlocal watching
        if watching and (event == "open" or event.startswith(("os.", "shutil."))):
            watching = False  # listing a folder is an event of its own
            seen.add(tuple(sorted(p.name for p in out.iterdir())) if out.exists() else ())
            watching = True

    sys.addaudithook(look)  # stays until the process ends, so it can be told to look away
    try:
        scan(disk.request(out))
    finally:
        watching = False
    assert seen == {(), tuple(whole)}


@pytest.mark.parametrize("change", [{"seed": 5}, {"layers": "0"}])
def test_another_plan_is_refused_and_named(disk, interrupted, change):
    with pytest.raises(UsageError, match="options differ"):
        scan(disk.request(interrupted, **change))
    out = scan(disk.request(interrupted))  # refusing has destroyed nothing
    np.testing.assert_equal(disk.tables(out), disk.tables(disk.undisturbed))


def test_another_pace_goes_on(disk, interrupted):
    out = scan(disk.request(interrupted, num_workers=2, batch_tokens=300))
    np.testing.assert_equal(disk.tables(out), disk.tables(disk.undisturbed))


def test_restart_discards(disk, interrupted, monkeypatch):
    begun = []
    measure = pipeline.measure_router
    monkeypatch.setattr(
        pipeline, "measure_router", lambda run: begun.append(run.router.name) or measure(run)
    )
    scan(disk.request(interrupted, seed=5, restart=True))
    assert begun == ["text/0", "text/1"]


def test_a_recording_that_changed_meanwhile_is_another_plan(disk, tmp_path, monkeypatch):
    tokens = shutil.copytree(disk.tokens, tmp_path / "rec")
    out = tmp_path / "out"

    def stop(router, *rest):
        if router.name == "text/1":
            raise Killed
        return measure(router, *rest)

    measure = pipeline.measure
    monkeypatch.setattr(pipeline, "measure", stop)
    with pytest.raises(Killed):
        scan(disk.request(out, tokens=str(tokens)))
    monkeypatch.setattr(pipeline, "measure", measure)
    file = next(tokens.glob("router_input*"), None) or next(tokens.glob("*.safetensors"))
    file.touch()
    with pytest.raises(UsageError, match="token_files differ"):
        scan(disk.request(out, tokens=str(tokens)))


def test_two_writers_at_once_are_one_too_many(tmp_path):
    out = tmp_path / "out"
    with ResultsWriter(out, {}, METRICS.all()):
        refused = pytest.raises(UsageError, match="being written by another process")
        with refused, ResultsWriter(out, {}, METRICS.all()):
            pass
        assert (tmp_path / "out.partial" / "plan.json").exists()


def test_a_run_that_fails_before_measuring_leaves_nothing(disk, tmp_path, monkeypatch):
    def stop(*arguments):
        raise Killed

    monkeypatch.setattr(pipeline, "measure", stop)
    with pytest.raises(Killed):
        scan(disk.request(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_cut_off_in_the_middle_is_begun_anew(disk, interrupted):
    plan = interrupted.with_name("out.partial") / "plan.json"
    plan.write_text(plan.read_text()[:40])
    out = scan(disk.request(interrupted, seed=5))  # of no known plan: discarded
    assert json.loads((out / "run.json").read_text())["seed"] == 5


@pytest.mark.parametrize("when", ["restarting", "tidying up"])
def test_parts_that_were_half_removed_are_not_taken_for_whole(disk, interrupted, monkeypatch, when):
    """The process may end while it removes what it no longer needs."""
    partial = interrupted.with_name("out.partial")
    rmtree = shutil.rmtree

    def half(path, **options):
        if path in (partial, partial / "parts"):
            (partial / "parts" / "text.0" / "layers.parquet").unlink()
            raise Killed
        rmtree(path, **options)

    monkeypatch.setattr(writer_module.shutil, "rmtree", half)
    with pytest.raises(Killed):
        scan(disk.request(interrupted, restart=when == "restarting"))
    monkeypatch.setattr(writer_module.shutil, "rmtree", rmtree)
    if interrupted.exists():  # complete; somebody removes it and scans again
        np.testing.assert_equal(disk.tables(interrupted), disk.tables(disk.undisturbed))
        rmtree(interrupted)
    out = scan(disk.request(interrupted))
    np.testing.assert_equal(disk.tables(out), disk.tables(disk.undisturbed))


@pytest.mark.parametrize("sizes", [(1, 3121), (1500, 1024, 598)])
def test_the_cut_of_a_recording_into_files_changes_nothing(disk, tmp_path, sizes):
    tokens = disk.record(tmp_path / "rec", sizes)
    out = scan(disk.request(tmp_path / "out", tokens=str(tokens)))
    np.testing.assert_equal(disk.tables(out), disk.tables(disk.undisturbed))


def test_per_token_files_are_put_beside_equal_tables(disk, tmp_path):
    out = scan(disk.request(tmp_path / "out", per_token=True))
    np.testing.assert_equal(disk.tables(out), disk.tables(disk.undisturbed))
    assert sorted(p.name for p in (out / "tokens").iterdir()) == [
        "text.0.parquet",
        "text.1.parquet",
    ]
