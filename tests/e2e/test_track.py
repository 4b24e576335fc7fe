"""`moegeom track` as it is typed: screens, exports, exit codes."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from moegeom.core.extras import install_command
from tests.by_day import by_day
from tests.short_samples import short_samples

ROOT = Path(__file__).resolve().parents[2]
SERIES = "sample_ckpts/olmoe-collapsed"
ARGUMENTS = ("track", f"{SERIES}/step_*", "--tokens", f"{SERIES}/rec/step_{{step}}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder for the module: the first command measures, the others go on from it."""
    made = tmp_path_factory.mktemp("track")
    (made / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    return made


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [80, 120])
def test_the_screen_shows_the_series(moegeom, folder, columns):
    ran = moegeom(folder, *ARGUMENTS, COLUMNS=str(columns))
    assert (ran.code, ran.err) == (0, "")
    assert all(len(line) <= columns for line in ran.out.splitlines())
    said = words(ran.out)
    assert "olmoe-collapsed 3 checkpoints, steps 100 to 1500" in said
    assert "driven by expert" in said
    assert "chance 0.25" in said
    assert "no onset" in said
    assert (folder / "runs/olmoe-collapsed.track/series.parquet").exists()


def test_a_second_run_measures_nothing(moegeom, folder):
    moegeom(folder, *ARGUMENTS, "--quiet")
    assert "0 measured now, 3 before" in moegeom(folder, *ARGUMENTS).out


def test_json_is_the_file_beside_the_results(moegeom, folder):
    ran = moegeom(folder, *ARGUMENTS, "--format", "json")
    document = json.loads(ran.out)
    assert document == json.loads((folder / "runs/olmoe-collapsed.track/series.json").read_text())
    assert {"max_vio_global", "row_drift_max"} <= {c["name"] for c in document["columns"]}


def test_the_long_table_holds_every_value(moegeom, folder):
    import pyarrow.parquet as pq

    ran = moegeom(folder, *ARGUMENTS, "--format", "json", "--export", "csv:s.csv")
    curves = json.loads(ran.out)["curves"]
    rows = pq.read_table(folder / "runs/olmoe-collapsed.track/series.parquet").to_pylist()
    assert len(rows) == 3 * len(curves)
    with (folder / "s.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["figure"] for line in lines] == [row["column"] for row in rows]
    assert [line["value"] for line in lines] == [
        "" if row["value"] is None else repr(row["value"]) for row in rows
    ]


def test_openmetrics_passes_the_parser_of_others(moegeom, folder):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    ran = moegeom(folder, *ARGUMENTS, "--quiet", "--export", "openmetrics:s.om")
    assert ran.code == 0, ran.err
    text = (folder / "s.om").read_text()
    assert text.endswith("# EOF\n")
    families = {f.name: f for f in parser.text_string_to_metric_families(text)}
    samples = families["moegeom_max_vio_global"].samples
    assert {s.labels["router"] for s in samples} == {"text/0", "text/1", "text/2"}
    assert {s.labels["step"] for s in samples} == {"1500"}


def test_tensorboard_reads_what_was_written_or_the_extra_is_named(moegeom, folder):
    ran = moegeom(folder, *ARGUMENTS, "--quiet", "--export", "tensorboard:tb")
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        assert ran.code == 2
        assert install_command("tensorboard") in ran.err
        return
    assert ran.code == 0, ran.err
    events = [e for file in (folder / "tb").iterdir() for e in EventFileLoader(str(file)).Load()]
    assert {event.step for event in events} >= {100, 600, 1500}


@pytest.mark.parametrize("kind", by_day(["svg", "png", "pdf"], ["svg"]))
def test_a_picture_is_drawn(moegeom, folder, kind):
    ran = moegeom(folder, *ARGUMENTS, "--quiet", "--plot", f"p.{kind}")
    assert ran.code == 0, ran.err
    assert (folder / f"p.{kind}").stat().st_size > 5000


def test_one_expert_is_followed(moegeom, folder):
    ran = moegeom(folder, *ARGUMENTS, "--expert", "7", "--layers", "1", "--out", "one")
    assert ran.code == 0, ran.err
    assert "load of expert 7" in ran.out


def test_markdown_is_for_a_summary(moegeom, folder):
    ran = moegeom(folder, *ARGUMENTS, "--format", "md")
    assert ran.out.startswith("## moegeom track: olmoe-collapsed")


def test_an_unfinished_checkpoint_is_skipped_with_its_reason(moegeom, tmp_path):
    for name in ("step_100", "step_600"):
        shutil.copytree(ROOT / SERIES / name, tmp_path / name)
    (tmp_path / "step_700").mkdir()
    ran = moegeom(tmp_path, "track", "step_*")
    assert ran.code == 0, ran.err
    assert "skipped step_700: it is empty" in words(ran.out)
    assert "none: weights alone" in ran.out
    plain = moegeom(tmp_path, "track", "step_*", "--ascii")
    assert plain.out.isascii()


def test_an_earlier_state_fails_the_gate_and_every_report_says_so(moegeom, tmp_path):
    for name, step in (("step_100", 100), ("step_600", 600), ("step_700", 100)):
        shutil.copytree(ROOT / SERIES / f"step_{step}", tmp_path / name)
    reports = [f"--report={kind}=out.{kind}" for kind in ("junit", "github", "md", "html")]
    for columns in (80, 140):
        ran = moegeom(tmp_path, "track", "step_*", *reports, COLUMNS=str(columns))
        assert ran.code == 1, ran.err
        assert max(map(len, ran.out.splitlines())) <= columns
        assert "step 700 holds the rows of step 100 again, bit for bit" in words(ran.out)
        assert "VERDICT FAILED: 1 error" in words(ran.out)
    junit = (tmp_path / "out.junit").read_text()
    assert 'failures="1"' in junit
    assert (tmp_path / "out.github").read_text().startswith("::error title=MGT101")
    for kind in ("md", "html"):
        assert "MGT101" in (tmp_path / f"out.{kind}").read_text()
    told = json.loads(moegeom(tmp_path, "track", "step_*", "--format", "json").out)
    assert (told["verdict"], told["exit_code"]) == ("FAILED", 1)


def test_a_bias_that_is_reset_is_found_in_checkpoints_and_in_their_results(moegeom, tmp_path):
    from safetensors.torch import load_file, save_file

    for step in (1, 2):
        shutil.copytree(ROOT / "sample_ckpts/deepseek-tiny/step_1500", tmp_path / f"step_{step}")
    assert moegeom(tmp_path, "track", "step_*", "--out", "same").code == 0
    file = tmp_path / "step_2/model.safetensors"
    tensors = load_file(file)
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    for name in biases:
        tensors[name] *= 0.0
    save_file(tensors, file)
    for pattern in ("step_*", "out/step_*.moegeom"):
        ran = moegeom(tmp_path, "track", pattern, "--out", "out")
        assert ran.code == 1, ran.err
        assert "at step 2 every selection bias is 0 again" in words(ran.out)
    assert biases


@pytest.mark.parametrize("level", ["warning", "error"])
def test_a_warning_fails_where_it_is_asked_to(moegeom, tmp_path, level):
    from safetensors.torch import load_file, save_file

    for step in (100, 600, 1500):
        shutil.copytree(ROOT / SERIES / f"step_{step}", tmp_path / f"step_{step}")
    first, last = (tmp_path / f"step_{s}/model.safetensors" for s in (600, 1500))
    still = "model.layers.1.mlp.gate.weight"
    save_file(load_file(last) | {still: load_file(first)[still]}, last)
    ran = moegeom(tmp_path, "track", "step_*", "--fail-on", level)
    assert "MGT104 layer 1: from step 600 on its rows stand still" in words(ran.out)
    assert ran.code == (level == "warning")


def test_a_single_checkpoint_is_inconclusive(moegeom, tmp_path):
    shutil.copytree(ROOT / SERIES / "step_100", tmp_path / "step_100")
    ran = moegeom(tmp_path, "track", "step_*")
    assert ran.code == 4
    assert "1 step, and it takes 2" in words(ran.out)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("nothing_*", "The current folder holds a, b, other.txt."),
        ("none/step_*", "There is no folder none."),
        ("a/step_*", "a holds step."),
        ("*/nothing_*", "The current folder holds a, b, other.txt."),
        ("nothing_1", "The current folder holds a, b, other.txt."),
    ],
)
def test_a_pattern_without_a_match_is_answered_with_what_is_there(moegeom, tmp_path, pattern, said):
    (tmp_path / "a/step").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "other.txt").write_text("")
    ran = moegeom(tmp_path, "track", pattern)
    assert ran.code == 2
    assert ran.err.startswith(f"error: {pattern}: no checkpoint matches.\n  hint: {said}")
    assert "uote" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nowhere_*",), 2, "no checkpoint matches"),
        ((f"{SERIES}/step_*", "--tokens", "rec/{step}"), 2, "there is no recording"),
        ((f"{SERIES}/step_*", "--tokens", f"{SERIES}/rec/step_100", "--out", "x"), 3, "stale"),
        ((f"{SERIES}/step_*", "--expert", "3", "--out", "y"), 2, "weights alone"),
        ((f"{SERIES}/step_*", "--export", "xml:f"), 2, "Unknown export"),
        ((f"{SERIES}/step_*", "--export", "csv"), 2, "csv:PATH"),
        ((f"{SERIES}/step_*", "--plot", "p.gif"), 2, ".svg"),
    ],
)
def test_what_cannot_be_meant_is_told(moegeom, folder, arguments, code, said):
    ran = moegeom(folder, "track", *arguments)
    assert ran.code == code, ran.out + ran.err
    assert ran.out == ""
    assert said in ran.err
