"""`moegeom track` as it is typed: screens, exports, exit codes."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import GATES, widest
from tests.short_samples import SAMPLES, short_samples

EARLY = "olmoe-collapsed/step_100"
SERIES = "sample_ckpts/olmoe-collapsed"
ARGUMENTS = ("track", f"{SERIES}/step_*", "--tokens", f"{SERIES}/rec/step_{{step}}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder for the module: the first command measures, the others go on from it."""
    made = tmp_path_factory.mktemp("track")
    (made / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    return made


def test_every_form_shows_the_series_that_lies_beside_the_results(moegeom, folder):
    ran = moegeom(folder, *ARGUMENTS, forms=["table", "json", "md"], code=0)
    assert ran.err == ""
    forms = ran.document
    screen = " ".join(forms["table"]["80"].split())
    assert "olmoe-collapsed 3 checkpoints, steps 100 to 1500" in screen
    for words in ("driven by expert", "chance 0.25", "no onset"):
        assert words in screen
    document = json.loads(forms["json"]["80"])
    assert document == json.loads((folder / "runs/olmoe-collapsed.track/series.json").read_text())
    assert {"max_vio_global", "row_drift_max"} <= {c["name"] for c in document["columns"]}
    assert forms["md"]["80"].startswith("## moegeom track: olmoe-collapsed")


def test_exports_a_picture_and_one_expert_come_from_a_run_that_measures_nothing(moegeom, folder):
    files = ("--export", "csv:s.csv", "--export", "openmetrics:s.om", "--plot", "p.svg")
    second = moegeom(folder, *ARGUMENTS, "--expert", "7", *files, code=0)
    assert "0 measured now, 3 before" in second.out
    assert "load of expert 7" in second.out
    rows = pq.read_table(folder / "runs/olmoe-collapsed.track/series.parquet").to_pylist()
    with (folder / "s.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["figure"], line["value"]) for line in lines] == [
        (row["column"], "" if row["value"] is None else repr(row["value"])) for row in rows
    ]
    assert (folder / "s.om").read_text().endswith("# EOF\n")
    assert (folder / "p.svg").stat().st_size > 5000


def series(folder: Path, **steps: str) -> None:
    """Copies of samples under the names of steps."""
    for name, sample in steps.items():
        shutil.copytree(SAMPLES / sample, folder / name)


def test_an_unfinished_checkpoint_is_skipped_with_its_reason(moegeom, tmp_path):
    series(tmp_path, step_100=EARLY)
    (tmp_path / "step_700").mkdir()
    ran = moegeom(tmp_path, "track", "step_*", "--ascii", code=4)
    assert "skipped step_700: it is empty" in ran.words
    assert "none: weights alone" in ran.out
    assert "1 step, and it takes 2" in ran.words
    assert ran.out.isascii()


def test_an_earlier_state_fails_the_gate_and_every_report_says_so(moegeom, tmp_path):
    series(tmp_path, step_100=EARLY, step_600="olmoe-collapsed/step_600", step_700=EARLY)
    reports = [f"--report={kind}=out.{kind}" for kind in ("junit", "github", "md", "html")]
    forms = moegeom(tmp_path, "track", "step_*", *reports, forms=["table", "json"], code=1).document
    for columns, screen in forms["table"].items():
        assert widest(screen) <= int(columns)
        words = " ".join(screen.split())
        assert "step 700 holds the rows of step 100 again, bit for bit" in words
        assert "VERDICT FAILED: 1 error" in words
    for kind in ("junit", "github", "md", "html"):
        assert "MGT101" in (tmp_path / f"out.{kind}").read_text()
    document = json.loads(forms["json"]["80"])
    assert (document["verdict"], document["exit_code"]) == ("FAILED", 1)


def test_a_warning_fails_where_it_is_asked_to(moegeom, tmp_path):
    series(tmp_path, **{f"step_{n}": f"olmoe-collapsed/step_{n}" for n in (100, 600, 1500)})
    first, last = (tmp_path / f"step_{step}/model.safetensors" for step in (600, 1500))
    still = GATES[1]
    save_file(load_file(last) | {still: load_file(first)[still]}, last)
    for level, code in (("warning", 1), ("error", 0)):
        ran = moegeom(tmp_path, "track", "step_*", "--fail-on", level, code=code)
        assert "MGT104 layer 1: from step 600 on its rows stand still" in ran.words


#: Patterns that match nothing, and what is there instead.
UNMATCHED = {
    "nothing_*": "The current folder holds a, b, other.txt.",
    "none/step_*": "There is no folder none.",
    "a/step_*": "a holds step.",
    "*/nothing_*": "The current folder holds a, b, other.txt.",
    "nothing_1": "The current folder holds a, b, other.txt.",
}


def test_a_pattern_without_a_match_is_answered_with_what_is_there(refused, tmp_path):
    (tmp_path / "a/step").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "other.txt").write_text("")
    for pattern, hint in UNMATCHED.items():
        refusal = refused(tmp_path, ("track", pattern), code=2)
        assert refusal.startswith(f"error: {pattern}: no checkpoint matches.\n  hint: {hint}")
        assert "uote" not in refusal


STEPS = f"{SERIES}/step_*"

#: What is typed, the exit code, and words of the refusal.
REFUSED = [
    ((STEPS, "--tokens", "rec/{step}"), 2, "there is no recording"),
    ((STEPS, "--expert", "3", "--out", "y"), 2, "weights alone"),
    ((STEPS, "--export", "xml:f"), 2, "Unknown export"),
    ((STEPS, "--export", "csv"), 2, "csv:PATH"),
    ((STEPS, "--plot", "p.gif"), 2, ".svg"),
]


def test_what_cannot_be_meant_is_told(moegeom, folder):
    for arguments, code, words in REFUSED:
        ran = moegeom(folder, "track", *arguments, code=code)
        assert ran.out == ""
        assert words in ran.err
    recorded = ("--tokens", f"{SERIES}/rec/step_100", "--layers", "0", "--out", "x")
    assert "stale" in moegeom(folder, "track", STEPS, *recorded, code=3).err
