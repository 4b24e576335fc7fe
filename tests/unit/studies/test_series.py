"""Which steps a series has, what is taken from an earlier run, and what is compared and said:
drift, drivers, reports.
"""

import dataclasses
import functools
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from safetensors.numpy import load_file, save_file
from scipy import stats

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.core.finding import Verdict
from moegeom.core.series import Curve, Series, SeriesStep
from moegeom.document.render import RENDERERS
from moegeom.document.sparkline import sparkline
from moegeom.results.reader import open_results
from moegeom.router.load import load_routers
from moegeom.studies.track.document import document
from moegeom.studies.track.steps import Choices, agreement, find_checkpoints
from moegeom.studies.track.study import TrackRequest, track, with_trends
from tests.by_day import by_day
from tests.unit.studies.samples import BALANCED, COLLAPSED, few_tokens, widest, worded

shown = functools.partial(worded, document)

#: Formats of a series.
FORMATS = [one.name for one in RENDERERS.all() if not one.of_verdicts]


def follow(folder: Path, **changes) -> Series:
    tokens = str(folder / "rec/step_{step}")
    request = TrackRequest((str(folder / "step_*"),), out=folder / "out", tokens=tokens, layers="0")
    return track(dataclasses.replace(request, **changes))


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, Series]:
    folder = tmp_path_factory.mktemp("series") / "run"
    shutil.copytree(COLLAPSED, folder)
    return folder, follow(folder)


@pytest.fixture(scope="module")
def series(measured) -> Series:
    return measured[1]


@pytest.fixture
def run(measured, tmp_path) -> Path:
    """A private copy that may be damaged; times of files are kept."""
    return Path(shutil.copytree(measured[0], tmp_path / "run"))


def reused(series: Series) -> list[bool]:
    return [step.is_reused for step in series.steps]


def forget_choices(results: Path) -> None:
    """The results as they would be of a recording without chosen experts."""
    facts = json.loads((results / "run.json").read_text())
    facts["trust"]["share_reproduced"] = None
    (results / "run.json").write_text(json.dumps(facts))


def column(series: Series, name: str) -> Curve:
    (curve,) = series.of_column(name)
    return curve


def test_the_header_says_at_which_steps_the_rule_is_verified(run, tmp_path):
    """Results of three steps: verified at all of them, at two, at none."""
    pattern = str(run / "out" / "step_*.moegeom")
    at_two = "at 2 of 3 steps, assumed from config at step_100.moegeom"
    trust = [
        ((), "verified by recorded choices at every step"),
        ((100,), f"verified by recorded choices {at_two}"),
        ((600, 1500), "assumed from config"),
    ]
    for number, (steps, words) in enumerate(trust):
        for step in steps:
            forget_choices(run / f"out/step_{step}.moegeom")
        record = track(TrackRequest((pattern,), out=tmp_path / f"out_{number}"))
        assert record.rule == f"olmoe: softmax, top 4 of 16; {words}"
    assert all("assumed from config" in shown(record, name, width=80) for name in FORMATS)


def checkpoints(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / name / file).write_text("{}")
    return str(folder / "step_*")


def test_steps_are_in_natural_order_and_stand_for_what_the_star_matched(tmp_path):
    steps, skipped = find_checkpoints(
        [checkpoints(tmp_path, "step_10-a", "step_2-b", "step_0100-c")]
    )
    assert [step.name for step in steps] == ["step_2-b", "step_10-a", "step_0100-c"]
    assert skipped == []
    assert steps[2].recording("rec/{step}/{name}") == "rec/0100-c/step_0100-c"
    several, _ = find_checkpoints([str(tmp_path / name) for name in ("step_10-a", "step_2-b")])
    assert [step.name for step in several] == ["step_2-b", "step_10-a"]


def test_what_is_no_series_is_told_a_url_without_its_key(tmp_path):
    for number, (names, message) in enumerate(
        (
            ((), "no checkpoint"),
            (("step_x", "step_y"), "no step number"),
            (("step_1", "step_01"), "same step"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(UsageError, match=message):
            find_checkpoints([checkpoints(tmp_path / str(number), *names)])
    with pytest.raises(UsageError, match="s3://bucket/step_1: is a URL") as refusal:
        find_checkpoints(["s3://user:secret@bucket/step_1?key=secret"])
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((), "empty"),
        (("config.json",), "no weights"),
        (("model.safetensors",), "no config"),
        (("config.json", "model.safetensors", "x.tmp"), "x.tmp is being written"),
        (
            ("config.json", "a.safetensors", "model.safetensors.index.json"),
            "names b.safetensors, which is not there (1 of 2)",
        ),
        (("config.json", "pytorch_model.bin"), ""),
        (("run.json",), ""),
    ],
)
def test_unfinished_directories_are_known_by_what_they_lack(tmp_path, files, reason):
    for file in files:
        (tmp_path / file).write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    _, left = find_checkpoints([str(tmp_path)])
    assert len(left) == bool(reason)
    for one in left:
        assert reason in one.reason
        assert one.is_being_written == ("being written" in reason)


@pytest.mark.parametrize("damage", ["cut short", "no safetensors", "empty", "being written"])
def test_a_step_that_cannot_be_read_makes_a_series_inconclusive(damage, run):
    file = run / "step_1500/model.safetensors"
    if damage == "empty":
        shutil.rmtree(file.parent)
        file.parent.mkdir()
    elif damage == "being written":
        file.rename(file.with_suffix(".tmp"))
    else:
        file.write_bytes(file.read_bytes()[:5000] if damage == "cut short" else bytes(500))
    record = follow(run)
    assert [step.name for step in record.steps] == ["step_100", "step_600"]
    assert record.skipped[0][0] == "step_1500"
    is_open = damage != "being written"
    assert [o.code for o in record.verdict.open] == ["MGT106"] * is_open
    assert record.verdict.exit_code == 4 * is_open


def test_a_step_with_rows_that_are_not_finite_fails_a_series(run):
    file = run / "step_600/model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("mlp.gate.weight"))
    save_file(tensors | {name: np.full_like(tensors[name], np.nan)}, file)
    record = track(TrackRequest((str(run / "step_*"),), out=run / "out_of_weights"))
    assert record.verdict.exit_code == 1
    (finding,) = (f for f in record.verdict.findings if f.code == "MGT107")
    assert finding.title.startswith("step_600 is broken: MGI101")
    assert finding.next_command == f"moegeom check {run / 'step_600'}"


def test_a_step_whose_config_makes_no_sense_is_an_error(run):
    config = run / "step_600/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts": 17}))
    with pytest.raises(MoeGeomError) as refusal:
        follow(run)
    assert "step step_600" in refusal.value.__notes__


def test_a_second_run_measures_what_is_new_alone_and_says_the_same(run):
    first = json.loads((run / "out/series.json").read_text())
    assert reused(follow(run)) == [True] * 3
    assert json.loads((run / "out/series.json").read_text())["curves"] == first["curves"]
    file = run / "rec/step_600/recording.json"
    file.write_bytes(file.read_bytes())
    assert reused(follow(run)) == [True, False, True]


OPTIONS = [{"layers": "1"}, {"tokens": None}, {"seed": 1}, {"exclude_first": 2}]


@pytest.mark.parametrize("changes", by_day(OPTIONS, {"any option": {"tokens": None}}))
def test_other_options_are_measured_again(run, changes):
    record = follow(run, **changes)
    assert reused(record) == [False] * 3
    assert not list((run / "out").glob("*.old"))
    assert not list((run / "out").glob("*.new*"))
    if "tokens" in changes:  # weights alone give drift and no load
        columns = {curve.column for curve in record.curves}
        assert {"row_drift_median", "gram_score_centred"} <= columns
        assert not columns & {"max_vio_global", "overlap_with_last"}
        assert not any("Overlap" in note for note in record.notes)


def test_kept_results_need_no_recording_and_say_so(run, series):
    shutil.rmtree(run / "rec/step_100")
    record = follow(run)
    assert column(record, "overlap_with_last") == column(series, "overlap_with_last")
    assert any("step_100 are gone" in note for note in record.notes)
    shutil.rmtree(run / "rec/step_1500")
    with pytest.raises(UsageError, match=r"step_100: there is no recording .*step_100"):
        follow(run, out=run / "other")
    assert not (run / "other").exists(), "nothing is measured before"


@pytest.mark.nightly
def test_stale_results_are_refused_again_without_the_option(run):
    options = {"tokens": str(run / "rec/step_1500"), "out": run / "stale"}
    with pytest.raises(RecordingError, match="another checkpoint"):
        follow(run, **options)
    with pytest.raises(RecordingError, match="RMS"):
        follow(run, **options, stale_inputs=True)
    record = follow(run, **options, stale_inputs=True, unverified=True)
    assert [step.is_stale for step in record.steps] == [True, True, False]
    assert any("NOT TRUSTED" in n and "step_100, step_600." in n for n in record.notes)
    with pytest.raises(RecordingError, match="RMS"):
        follow(run, **options, stale_inputs=True)
    with pytest.raises(RecordingError, match="another checkpoint"):
        follow(run, **options)


def test_results_directories_give_the_same_figures_and_an_approximate_drift(run, series):
    record = follow(run, patterns=(str(run / "out/step_*.moegeom"),), out=run / "b")
    for name in ("max_vio_global", "margin_p50"):
        assert column(record, name).values == column(series, name).values
    one, other = column(series, "row_drift_median"), column(record, "row_drift_median")
    assert one.values[0] is None
    assert_allclose(other.values[1:], one.values[1:], rtol=0.25)
    assert any("32 projections" in note for note in record.notes)
    assert record.of_column("overlap_with_last") == ()
    assert any("results directories keep none" in note for note in record.notes)


def test_drift_is_that_of_centred_effective_rows_and_overlap_that_of_recorded_choices(series):
    rows = []
    for step in (100, 600, 1500):
        router = load_routers(open_checkpoint(COLLAPSED / f"step_{step}")).routers[0]
        effective = router.weight.astype(np.float64) * router.gain
        rows.append(effective - effective.mean(axis=0))
    for number, (old, new) in enumerate(itertools.pairwise(rows), start=1):
        change = np.linalg.norm(new - old, axis=1) / np.linalg.norm(old, axis=1)
        for name, expected in (("median", np.median(change)), ("max", change.max())):
            values = column(series, f"row_drift_{name}").values
            assert_allclose(values[number], expected, rtol=1e-9)
    name = "chosen-text.0-00000.safetensors"
    chosen = [
        np.concatenate([*load_file(COLLAPSED / f"rec/step_{step}" / name).values()])
        for step in (100, 600, 1500)
    ]

    def shared(a, b):
        return np.mean([len(set(x) & set(y)) / len(x) for x, y in zip(a, b, strict=True)])

    overlap = column(series, "overlap_with_last")
    # the engine's arithmetic may break a tie in another way
    assert_allclose(overlap.values[0], shared(chosen[0], chosen[2]), atol=2e-3)
    assert_allclose(overlap.values[1], shared(chosen[1], chosen[2]), atol=2e-3)
    assert overlap.values[2] is None
    changed = np.mean([set(a) != set(b) for a, b in zip(chosen[0], chosen[1], strict=True)])
    assert_allclose(column(series, "expert_set_churn").values[1], changed, atol=2e-3)
    assert column(series, "overlap_by_chance").values == (0.25,) * 3


def test_sets_of_unknown_tokens_are_not_compared_and_onsets_are_those_of_routers_that_jump():
    block = np.arange(6, dtype=np.int16)
    sets = {"text/0": np.tile(np.arange(2, dtype=np.int16), (6, 1))}
    first, other, nameless = (Choices(name, block, sets) for name in ("a", "b", ""))
    equal = agreement(first, first, "text/0")
    assert equal is not None
    assert_allclose([equal.overlap, equal.changed], [(1.0, 0.0), (0.0, 0.0)])
    assert agreement(first, other, "text/0") is None
    assert agreement(nameless, nameless, "text/0") is None
    onsets = [curve.onset for curve in with_trends(curves(2, 10), STEPS)]
    assert onsets == [400.0, 400.0, *[None] * 10]
    assert [curve.onset for curve in with_trends(curves(2, 0), STEPS)] == [400.0, 400.0]
    # A jump of p = 0.006 over 5 looks: enough for one router, not among ten that stand still.
    still = [Curve(f"text/{r}", "x", (1.0,) * 6, (0.01,) * 6) for r in range(1, 10)]
    height = 0.01 * np.sqrt(2.0) * stats.t.isf(0.003, 15)
    jump = Curve("text/0", "x", (1.0,) * 3 + (1.0 + height,) * 3, (0.01,) * 6)
    assert with_trends([jump], STEPS)[0].onset == 400.0
    assert with_trends([jump, *still], STEPS)[0].onset is None


STEPS = [100, 200, 300, 400, 500, 600]


def curves(jumping: int, still: int) -> list[Curve]:
    generator = np.random.default_rng(0)
    every = []
    for index in range(jumping + still):
        values = 1.0 + 0.01 * generator.standard_normal(6)
        values[3:] += 0.5 * (index < jumping)
        every.append(Curve(f"text/{index}", "max_vio_global", tuple(values), (0.01,) * 6))
    return every


def long_series(number: int, routers: int) -> Series:
    steps = tuple(SeriesStep(f"step_{i}", i, f"out/{i}", 4096) for i in range(1, number + 1))
    values = tuple(float(i) for i in range(number))
    every = [
        Curve(f"text/{r}", figure, values, (None,) * number)
        for r in range(routers)
        for figure in ("max_vio_global", "overlap_with_previous", "overlap_by_chance")
    ]
    return Series("plain", steps, tuple(every), verdict=Verdict(()))


def test_no_line_is_wider_than_the_screen_and_no_format_needs_blocks():
    for number in (1, 2, 12, 13, 200):
        record = long_series(number, 30)
        for width in (76, 120):
            text = shown(record, width=width, is_ascii=True)
            assert widest(text) <= width
            assert "and 18 more: --detail" in text
        assert "more: --detail" not in shown(record, detail=True)
    record = long_series(12, 2)
    for name in FORMATS:
        assert not shown(record, name).isascii() or name == "json"
        assert shown(record, name, is_ascii=True).isascii()


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in (100, 1000, 300):
        (folder / f"step_{step}").symlink_to(BALANCED / f"step_{step}")
        (folder / f"rec_{step}").symlink_to(few_tokens(BALANCED.name, step))
    steps, tokens = (str(folder / "step_*"),), str(folder / "rec_{step}")
    return folder, track(TrackRequest(steps, out=folder / "first", tokens=tokens, layers="0,2"))


def curve(series, router, column):
    (found,) = [c for c in series.curves if (c.router, c.column) == (router, column)]
    return found


def test_experts_that_drive_the_load_are_those_whose_term_changed_most(tracked):
    def loads(step):
        rows = open_results(tracked[0] / "first" / f"step_{step}.moegeom").rows("experts")
        place = ("text/0", "as_stored", "all")
        own = (r for r in rows if (r["router"], r["variant"], r["population"]) == place)
        return np.array([r["load"] for r in own])

    change = (loads(1000) - 1) ** 2 - (loads(100) - 1) ** 2
    first = next(d for d in tracked[1].drivers if (d.router, d.kind) == ("text/0", "expert"))
    assert int(first.name) == np.abs(change).argmax()
    usage = [
        load for router, step, _, load in tracked[1].usage if (router, step) == ("text/0", 100)
    ]
    np.testing.assert_array_equal(usage, loads(100))
    share = change[int(first.name)] / np.abs(change).sum()
    np.testing.assert_allclose(first.contribution, share, rtol=1e-9)


def test_the_document_holds_every_router(tracked):
    series = tracked[1]
    assert len(json.loads(worded(document, series, "json"))["curves"]) == len(series.curves)


def test_a_sparkline_shows_gaps():
    assert sparkline([0.0, 1.0, None, 0.5]) == "▁█ ▅"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([None, None]) == "  "
