"""A series of checkpoints: order, what is skipped, what is measured once, and what is compared."""

from __future__ import annotations

import csv
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import MoeGeomError, UsageError
from moegeom.report import SERIES_EXPORTS, SERIES_REPORTERS, View
from moegeom.report.sparkline import sparkline
from moegeom.studies.series import TrackRequest, track
from moegeom.studies.series_paths import find_checkpoints, recording_path

SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps of a sample, links beside an unfinished one, tracked once."""
    folder = tmp_path_factory.mktemp("run")
    for step in (100, 1000, 300):
        (folder / f"step_{step}").symlink_to(SAMPLES / f"olmoe-balanced/step_{step}")
    (folder / "step_2000").mkdir()
    (folder / "step_2000.partial").mkdir()
    half = folder / "step_1200"
    half.mkdir()
    shutil.copy(SAMPLES / "olmoe-balanced/step_600/config.json", half)
    shutil.copy(SAMPLES / "olmoe-balanced/step_600/model.safetensors.index.json", half)
    return folder, tracked(folder, "first")


def tracked(folder: Path, out: str, **asked):
    tokens = str(SAMPLES / "olmoe-balanced/rec/step_{step}")
    request = {"tokens": tokens, "layers": "0,2"} | asked
    return track(TrackRequest((str(folder / "step_*"),), folder / out, **request))


def curve(series, router, column):
    (found,) = [c for c in series.curves if (c.router, c.column) == (router, column)]
    return found


def test_steps_come_in_the_order_of_their_numbers(run):
    assert [step.step for step in run[1].steps] == [100.0, 300.0, 1000.0]


def test_what_is_unfinished_is_skipped_with_the_reason(run):
    skipped = dict(run[1].skipped)
    assert set(skipped) == {"step_2000", "step_2000.partial", "step_1200"}
    assert "empty" in skipped["step_2000"]
    assert "being written" in skipped["step_2000.partial"]
    assert "safetensors" in skipped["step_1200"]


def test_a_step_is_measured_once(run):
    folder, first = run
    again = tracked(folder, "first")
    assert [step.is_reused for step in first.steps] == [False] * 3
    assert [step.is_reused for step in again.steps] == [True] * 3
    assert again.curves == first.curves
    assert again.drivers == first.drivers


def test_results_of_other_inputs_are_not_mixed_in(run):
    with pytest.raises(UsageError, match="other inputs"):
        tracked(run[0], "first", layers="1")


def test_overlap_is_that_of_the_recorded_choices(run):
    """The samples record the choices, in float32 and of the same text."""
    from safetensors.numpy import load_file

    def chosen(step):
        file = SAMPLES / f"olmoe-balanced/rec/step_{step}/chosen-text.2-00000.safetensors"
        return next(iter(load_file(file).values()))

    def overlap(one, other):
        return np.mean([len({*a} & {*b}) / 4 for a, b in zip(one, other, strict=True)])

    found = curve(run[1], "text/2", "overlap_with_last").values
    assert found[2] is None
    expected = [overlap(chosen(step), chosen(1000)) for step in (100, 300)]
    np.testing.assert_allclose(found[:2], expected, rtol=1e-9)
    since = curve(run[1], "text/2", "coalition_churn").values
    changed = [
        np.mean([{*a} != {*b} for a, b in zip(chosen(one), chosen(other), strict=True)])
        for one, other in ((100, 300), (300, 1000))
    ]
    assert since[0] is None
    np.testing.assert_allclose(since[1:], changed, rtol=1e-9)


def test_drift_is_the_change_of_the_centred_effective_rows(run):
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.router.load import load_routers

    rows = []
    for step in (100, 300, 1000):
        path = SAMPLES / f"olmoe-balanced/step_{step}"
        router = load_routers(open_checkpoint(path)).routers[2]
        effective = router.weight.astype(np.float64) * router.gain
        rows.append(effective - effective.mean(axis=0))
    expected = [
        np.median(np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1))
        for a, b in pairwise(rows)
    ]
    found = curve(run[1], "text/2", "row_drift_median").values
    np.testing.assert_allclose(found[1:], expected, rtol=1e-6)


def test_a_recording_of_another_step_is_refused_and_labelled_when_allowed(run):
    folder = run[0]
    wrong = str(SAMPLES / "olmoe-balanced/rec/step_100")
    with pytest.raises(MoeGeomError, match="another checkpoint"):
        tracked(folder, "stale", tokens=wrong)
    allowed = tracked(folder, "stale2", tokens=wrong, stale_inputs=True, unverified=True)
    assert [step.is_stale for step in allowed.steps] == [False, True, True]
    screen = SERIES_REPORTERS["table"].render(allowed, View())
    assert "RECORDED FROM ANOTHER CHECKPOINT" in screen


def test_a_missing_recording_is_an_error_that_names_it(run):
    with pytest.raises(UsageError, match=r"step_100: there is no recording .*nowhere-100"):
        tracked(run[0], "none", tokens="nowhere-{step}")


def test_weights_alone_are_followed_without_tokens(run):
    series = tracked(run[0], "weights", tokens=None)
    columns = {c.column for c in series.curves}
    assert "row_drift_median" in columns
    assert "max_vio_global" not in columns
    assert "weights alone" in SERIES_REPORTERS["table"].render(series, View())


def test_experts_that_drive_the_load_are_those_whose_term_changed_most(run):
    folder = run[0]
    from moegeom.results.reader import open_results

    def loads(step):
        rows = open_results(folder / "first" / f"step_{step}.moegeom").rows("experts")
        wanted = ("text/0", "as_stored", "all")
        return np.array(
            [r["load"] for r in rows if (r["router"], r["variant"], r["population"]) == wanted]
        )

    change = (loads(1000) - 1) ** 2 - (loads(100) - 1) ** 2
    first = next(d for d in run[1].drivers if (d.router, d.kind) == ("text/0", "expert"))
    assert int(first.name) == np.abs(change).argmax()
    np.testing.assert_allclose(
        first.contribution, change[int(first.name)] / np.abs(change).sum(), rtol=1e-9
    )


def test_every_report_and_export_holds_every_router(run, tmp_path):
    series = run[1]
    for name in SERIES_REPORTERS.names():
        text = SERIES_REPORTERS[name].render(series, View(width=80))
        assert text.endswith("\n")
        if name == "table":
            assert max(map(len, text.splitlines())) <= 80
    document = json.loads(SERIES_REPORTERS["json"].render(series, View()))
    assert len(document["curves"]) == len(series.curves)
    SERIES_EXPORTS["csv"].write(series, tmp_path / "series.csv")
    text = (tmp_path / "series.csv").read_text("utf-8")
    lines = list(csv.DictReader(text.splitlines()))
    assert len(lines) == 3 * len(series.curves)
    SERIES_EXPORTS["picture"].write(series, tmp_path / "series.png")
    assert (tmp_path / "series.png").read_bytes()[:4] == b"\x89PNG"


def test_openmetrics_is_read_by_the_client_of_prometheus(run, tmp_path):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    file = tmp_path / "series.prom"
    SERIES_EXPORTS["openmetrics"].write(run[1], file)
    text = file.read_text("utf-8")
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {s.labels["router"]: s.value for s in families["moegeom_max_vio_global"].samples}
    assert found == {c.router: c.values[-1] for c in run[1].of_column("max_vio_global")}


def test_tensorboard_reads_what_was_written(run, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    SERIES_EXPORTS["tensorboard"].write(run[1], tmp_path / "events")
    events = reader.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = events.Scalars("max_vio_global/text/0")
    assert [event.step for event in found] == [100, 300, 1000]
    values = curve(run[1], "text/0", "max_vio_global").values
    np.testing.assert_allclose([event.value for event in found], values, rtol=1e-6)


def test_the_step_is_what_the_star_matched(tmp_path):
    for name in ("iter_000010_final", "iter_000002_final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    found, _ = find_checkpoints([str(tmp_path / "iter_*_final")])
    assert [c.step_text for c in found] == ["000002", "000010"]
    assert recording_path("rec/{step}-{name}", found[0]) == "rec/000002-iter_000002_final"


def test_patterns_that_cannot_be_meant_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="no checkpoint matches"):
        find_checkpoints([str(tmp_path / "step_*")])
    for name in ("a_7", "b_7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    with pytest.raises(UsageError, match="same step"):
        find_checkpoints([str(tmp_path / "a_7"), str(tmp_path / "b_7")])
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "x").touch()
    with pytest.raises(UsageError, match="no step number"):
        find_checkpoints([str(tmp_path / "a_7"), str(tmp_path / "last")])


def test_a_sparkline_shows_order_and_gaps():
    assert sparkline([0.0, 1.0, None, 0.5]) == "▁█ ▅"
    assert sparkline([2.0, 2.0], is_ascii=True) == "=="
    assert sparkline([None, None]) == "  "
