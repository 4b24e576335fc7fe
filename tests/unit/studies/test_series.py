"""Which steps a series has, what is taken from an earlier run, and what is compared with what."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.core.series import Curve, Series, SeriesStep
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.studies.track.choices import Choices, agreement
from moegeom.studies.track.document import document
from moegeom.studies.track.paths import find_checkpoints, recording_path, unfinished
from moegeom.studies.track.study import TrackRequest, track, with_trends

SAMPLES = Path(__file__).resolve().parents[3] / "sample_ckpts"
COLLAPSED = SAMPLES / "olmoe-collapsed"


def request(folder: Path, **changes) -> TrackRequest:
    asked = TrackRequest(
        (str(folder / "step_*"),), folder / "out", str(folder / "rec/step_{step}"), layers="0"
    )
    return dataclasses.replace(asked, **changes)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The collapsed series, followed once at layer 0."""
    folder = tmp_path_factory.mktemp("series") / "run"
    shutil.copytree(COLLAPSED, folder)
    track(request(folder))
    return folder


@pytest.fixture
def run(measured, tmp_path) -> Path:
    """A private copy that may be damaged; times of files are kept."""
    return Path(shutil.copytree(measured, tmp_path / "run"))


def reused(series: Series) -> list[bool]:
    return [step.is_reused for step in series.steps]


def test_the_header_says_at_which_steps_the_rule_is_verified(run, tmp_path):
    """Results of three steps: verified at all of them, at two, at none."""
    pattern = str(run / "out" / "step_*.moegeom")
    said = ["verified by recorded choices at every step"]
    said.append(
        "verified by recorded choices at 2 of 3 steps, assumed from config at step_100.moegeom"
    )
    for step, expected in zip((100, 600, 1500), said, strict=False):
        series = track(TrackRequest((pattern,), tmp_path / f"before_{step}"))
        assert series.rule == f"olmoe: softmax, top 4 of 16; {expected}"
        forget_choices(run / f"out/step_{step}.moegeom")
    forget_choices(run / "out/step_1500.moegeom")
    series = track(TrackRequest((pattern,), tmp_path / "assumed"))
    assert series.rule == "olmoe: softmax, top 4 of 16; assumed from config"
    for name in (one.name for one in RENDERERS.all() if not one.of_verdicts):
        assert "assumed from config" in rendered(series, name, View(width=80))


def rendered(series: Series, name: str, view: View) -> str:
    return render(document(series, view), name, view)


def forget_choices(results: Path) -> None:
    """The results as they would be of a recording without chosen experts."""
    facts = json.loads((results / "run.json").read_text())
    facts["trust"]["share_reproduced"] = None
    (results / "run.json").write_text(json.dumps(facts))


def column(series: Series, name: str) -> Curve:
    (curve,) = series.of_column(name)
    return curve


def checkpoints(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / name / file).write_text("{}")


def test_steps_are_in_natural_order_and_stand_for_what_the_star_matched(tmp_path):
    checkpoints(tmp_path, "step_10-a", "step_2-b", "step_0100-c")
    found, skipped = find_checkpoints([str(tmp_path / "step_*")])
    assert [c.name for c in found] == ["step_2-b", "step_10-a", "step_0100-c"]
    assert skipped == []
    assert recording_path("rec/{step}/{name}", found[2]) == "rec/0100-c/step_0100-c"


def test_several_paths_are_a_series_too(tmp_path):
    checkpoints(tmp_path, "step_10", "step_2")
    found, _ = find_checkpoints([str(tmp_path / "step_10"), str(tmp_path / "step_2")])
    assert [(c.name, c.step_text) for c in found] == [("step_2", "2"), ("step_10", "10")]


def test_a_url_is_no_step_and_is_shown_without_its_key():
    with pytest.raises(UsageError, match="s3://bucket/step_1: is a URL") as refused:
        find_checkpoints(["s3://user:secret@bucket/step_1?key=secret"])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "no checkpoint"),
        (("step_x", "step_y"), "no step number"),
        (("step_1", "step_01"), "same step"),
    ],
)
def test_what_is_no_series_is_told(tmp_path, names, said):
    checkpoints(tmp_path, *names)
    with pytest.raises(UsageError, match=said):
        find_checkpoints([str(tmp_path / "step_*")])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "empty"),
        (("config.json",), "no weights"),
        (("model.safetensors",), "no config"),
        (("config.json", "model.safetensors", "x.tmp"), "x.tmp is being written"),
        (("config.json", "pytorch_model.bin"), ""),
        (("run.json",), ""),
    ],
)
def test_unfinished_directories_are_known_by_what_they_lack(tmp_path, files, said):
    for file in files:
        (tmp_path / file).write_text("{}")
    found = unfinished(tmp_path)
    assert said in found
    assert bool(found) == bool(said)


def test_an_index_that_names_a_missing_file_is_unfinished(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_text("")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names b.safetensors, which is not there (1 of 2)" in unfinished(tmp_path)


def test_a_file_that_is_cut_short_is_skipped_with_its_reason(run):
    file = run / "step_1500/model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    series = track(request(run))
    assert [step.name for step in series.steps] == ["step_100", "step_600"]
    assert series.skipped[0][0] == "step_1500"
    assert series.skipped[0][1]


def test_a_finished_checkpoint_that_cannot_be_interpreted_is_an_error(run):
    config = run / "step_600/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts": 17}))
    with pytest.raises(MoeGeomError) as found:
        track(request(run))
    assert "step step_600" in found.value.__notes__


def test_a_second_run_measures_nothing_and_says_the_same(run):
    first = json.loads((run / "out/series.json").read_text())
    series = track(request(run))
    assert reused(series) == [True] * 3
    again = json.loads((run / "out/series.json").read_text())
    assert again["curves"] == first["curves"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"layers": "1"}, marks=pytest.mark.nightly),
        {"tokens": None},
        pytest.param({"seed": 1}, marks=pytest.mark.nightly),
        pytest.param({"exclude_first": 2}, marks=pytest.mark.nightly),
    ],
)
def test_other_options_are_measured_again(run, changes):
    assert reused(track(request(run, **changes))) == [False] * 3
    assert not list((run / "out").glob("*.old"))
    assert not list((run / "out").glob("*.new*"))


def test_another_recording_is_noticed_though_its_size_is_the_same(run):
    file = run / "rec/step_600/recording.json"
    file.write_bytes(file.read_bytes())
    assert reused(track(request(run))) == [True, False, True]


def test_kept_results_need_no_recording_and_say_so(run):
    before = column(track(request(run)), "overlap_with_last")
    shutil.rmtree(run / "rec/step_100")
    series = track(request(run))
    assert column(series, "overlap_with_last") == before
    assert any("step_100 are gone" in note for note in series.notes)


def test_a_missing_recording_stops_before_anything_is_measured(run):
    shutil.rmtree(run / "rec/step_1500")
    with pytest.raises(UsageError, match=r"step_1500: there is no recording .*step_1500"):
        track(request(run, out=run / "other"))
    assert not (run / "other").exists()


@pytest.mark.nightly
def test_stale_results_are_refused_again_without_the_option(run):
    one = str(run / "rec/step_1500")
    asked = request(run, tokens=one, out=run / "stale")
    with pytest.raises(RecordingError, match="another checkpoint"):
        track(asked)
    with pytest.raises(RecordingError, match="RMS"):
        track(dataclasses.replace(asked, stale_inputs=True))
    series = track(dataclasses.replace(asked, stale_inputs=True, unverified=True))
    assert [step.is_stale for step in series.steps] == [True, True, False]
    assert any("NOT TRUSTED" in n and "step_100, step_600." in n for n in series.notes)
    with pytest.raises(RecordingError, match="RMS"):
        track(dataclasses.replace(asked, stale_inputs=True))
    with pytest.raises(RecordingError, match="another checkpoint"):
        track(asked)


def test_results_directories_give_the_same_figures_and_an_approximate_drift(run):
    exact = track(request(run))
    kept = track(request(run, patterns=(str(run / "out/step_*.moegeom"),), out=run / "b"))
    for name in ("max_vio_global", "margin_p50"):
        assert column(kept, name).values == column(exact, name).values
    one, other = column(exact, "row_drift_median"), column(kept, "row_drift_median")
    assert one.values[0] is None
    assert_allclose(other.values[1:], one.values[1:], rtol=0.25)
    assert any("32 projections" in note for note in kept.notes)
    assert kept.of_column("overlap_with_last") == ()
    assert any("results directories keep none" in note for note in kept.notes)


def test_drift_is_the_change_of_the_centred_effective_rows(run):
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.router.load import load_routers

    rows = []
    for step in (100, 600):
        router = load_routers(open_checkpoint(run / f"step_{step}")).routers[0]
        effective = router.weight.astype(np.float64) * router.gain
        rows.append(effective - effective.mean(axis=0))
    change = np.linalg.norm(rows[1] - rows[0], axis=1) / np.linalg.norm(rows[0], axis=1)
    series = track(request(run))
    assert_allclose(column(series, "row_drift_median").values[1], np.median(change), rtol=1e-9)
    assert_allclose(column(series, "row_drift_max").values[1], change.max(), rtol=1e-9)


def test_overlap_is_that_of_the_recorded_choices(run):
    from safetensors.numpy import load_file

    chosen = [
        np.concatenate([*load_file(run / f"rec/step_{s}/chosen-text.0-00000.safetensors").values()])
        for s in (100, 600, 1500)
    ]

    def shared(a, b):
        return np.mean([len(set(x) & set(y)) / len(x) for x, y in zip(a, b, strict=True)])

    series = track(request(run))
    overlap = column(series, "overlap_with_last")
    # the engine's arithmetic may break a tie in another way
    assert_allclose(overlap.values[0], shared(chosen[0], chosen[2]), atol=2e-3)
    assert_allclose(overlap.values[1], shared(chosen[1], chosen[2]), atol=2e-3)
    assert overlap.values[2] is None
    changed = np.mean([set(a) != set(b) for a, b in zip(chosen[0], chosen[1], strict=True)])
    assert_allclose(column(series, "expert_set_churn").values[1], changed, atol=2e-3)
    assert column(series, "overlap_by_chance").values == (0.25,) * 3


def test_sets_of_tokens_that_nobody_identified_are_not_compared():
    block = np.arange(6, dtype=np.int16)
    sets = {"text/0": np.tile(np.arange(2, dtype=np.int16), (6, 1))}
    known = Choices("a", block, sets)
    found = agreement(known, known, "text/0")
    assert found is not None
    assert_allclose([found.overlap, found.changed, found.overlap_error], [1.0, 0.0, 0.0])
    assert agreement(known, Choices("b", block, sets), "text/0") is None
    assert agreement(Choices("", block, sets), Choices("", block, sets), "text/0") is None


def test_weights_alone_give_drift_and_no_load(run):
    series = track(request(run, tokens=None, out=run / "weights"))
    columns = {curve.column for curve in series.curves}
    assert {"row_drift_median", "gram_score_centred"} <= columns
    assert not columns & {"max_vio_global", "overlap_with_last"}
    assert not any("Overlap" in note for note in series.notes)


def curves(jumping: int, still: int) -> list[Curve]:
    generator = np.random.default_rng(0)
    found = []
    for index in range(jumping + still):
        values = 1.0 + 0.01 * generator.standard_normal(6)
        values[3:] += 0.5 * (index < jumping)
        found.append(Curve(f"text/{index}", "max_vio_global", tuple(values), (0.01,) * 6))
    return found


def test_onsets_are_those_of_the_routers_that_jump():
    steps = [100, 200, 300, 400, 500, 600]
    found = with_trends(curves(2, 10), steps)
    assert [curve.onset for curve in found] == [400.0, 400.0, *[None] * 10]
    assert [c.onset for c in with_trends(curves(2, 0)[:2], steps)] == [400.0, 400.0]


def test_more_routers_ask_for_a_clearer_jump():
    """A jump of p = 0.006 over 5 looks: enough for one router, not among ten that stand still."""
    still = [Curve(f"text/{r}", "x", (1.0,) * 6, (0.01,) * 6) for r in range(1, 10)]
    height = 0.01 * np.sqrt(2.0) * stats.t.isf(0.003, 15)
    jump = Curve("text/0", "x", (1.0,) * 3 + (1.0 + height,) * 3, (0.01,) * 6)
    steps = [100, 200, 300, 400, 500, 600]
    assert with_trends([jump], steps)[0].onset == 400.0
    assert with_trends([jump, *still], steps)[0].onset is None


def long_series(number: int, routers: int) -> Series:
    steps = tuple(SeriesStep(f"step_{i}", i, f"out/{i}", 4096) for i in range(1, number + 1))
    values = tuple(float(i) for i in range(number))
    found = [
        Curve(f"text/{r}", name, values, (None,) * number)
        for r in range(routers)
        for name in ("max_vio_global", "overlap_with_previous", "overlap_by_chance")
    ]
    return Series("a\x1b[2Jname", steps, tuple(found))


@pytest.mark.parametrize("width", [76, 80, 120])
@pytest.mark.parametrize("number", [1, 2, 12, 13, 200])
def test_no_line_is_wider_than_the_screen_and_names_cannot_command_it(width, number):
    text = rendered(long_series(number, 30), "table", View(width, is_ascii=True))
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert text.isascii()
    assert "and 18 more: --detail" in text
    whole = rendered(long_series(number, 30), "table", View(width, detail=True))
    assert "more: --detail" not in whole


@pytest.mark.parametrize("name", [one.name for one in RENDERERS.all() if not one.of_verdicts])
def test_where_no_block_can_be_shown_no_format_holds_one(name):
    series = dataclasses.replace(long_series(12, 2), name="plain")
    assert not rendered(series, name, View()).isascii() or name == "json"
    assert rendered(series, name, View(is_ascii=True)).isascii()
