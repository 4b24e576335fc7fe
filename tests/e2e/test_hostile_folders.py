"""Nothing that lies in a checkout runs: neither by the action, nor by a command typed there.

What commands do in a folder with hostile files once they have started: every test of this folder,
through ``run_nothing_of`` of warm_commands.py.
"""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from tests.by_day import by_day
from tests.e2e.conftest import ROOT, changed, environment, plant_code
from tests.e2e.test_commands import CALLS

STEPS = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"]

#: Ways to start a check of ``broken`` in the checkout, with the action's own first.
WAYS = {
    "action": ["bash", "-eu", "-c", STEPS[1]["run"]],
    "python -m": [sys.executable, "-m", "moegeom_cli", "check", "broken"],
}


@pytest.mark.parametrize("way", WAYS)
def test_code_in_the_checkout_does_not_answer_for_the_gate(way, tmp_path):
    changed(tmp_path, "broken", lambda held: {k: np.full_like(v, np.nan) for k, v in held.items()})
    plant_code(tmp_path)
    plant_code(tmp_path / "broken")
    inputs = dict.fromkeys(STEPS[1]["env"], "") | {
        "PYTHON": sys.executable,
        "CHECKPOINT": "broken",
        "JUNIT": "junit.xml",
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    ran = subprocess.run(
        WAYS[way], cwd=tmp_path, env=environment() | inputs, capture_output=True, text=True
    )
    assert "MGI101" in ran.stdout, ran.stderr
    assert ran.returncode == 1
    assert not (tmp_path / "RAN").exists()


def test_what_a_command_decides_is_its_exit_code_whoever_listens(tmp_path):
    changed(tmp_path, "broken", lambda held: {k: np.full_like(v, np.nan) for k, v in held.items()})
    (tmp_path / "good").symlink_to(ROOT / "sample_ckpts/olmoe-balanced/step_1500")
    command = f"{sys.executable} -m moegeom_cli check"
    streams = (">&-", "2>&-", ">&- 2>&- <&-", "| true", "2>&1 >&- | true")
    cases = [("broken", stream, 1) for stream in streams]
    cases += [("good", streams[2], 0), ("nowhere", streams[4], 3), ("good", "&>/dev/full", 2)]
    offenders = []
    # no stream, no reader, a verdict and an error that nobody hears, no room
    for target, stream, code in by_day(cases, [*cases[2:4], *cases[5:]]):
        script = f"{command} {target} {stream}; exit ${{PIPESTATUS[0]}}"
        ran = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True
        )
        if ran.returncode != code:
            offenders.append((target, stream, ran.returncode))
    assert offenders == []


@pytest.mark.parametrize("place", ["model/kernels", "kernels", "rec"])
def test_kernels_that_a_working_tree_holds_are_refused(place, world, tmp_path):
    for name in ("model", "rec"):
        (tmp_path / name).symlink_to(world / name, target_is_directory=True)
    (tmp_path / ".git").mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "moegeom_cli", "check", "model", "--tokens", "rec"],
        cwd=tmp_path,
        env=environment() | {"NUMBA_CACHE_DIR": str(tmp_path / place)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "which is judged" in ran.stderr
    assert "Set NUMBA_CACHE_DIR to a folder outside of it." in ran.stderr
    assert not (tmp_path / "kernels").exists()


# ----------------------------------------------------------------------- names, and what they name
#: What may stand where a file or a folder is expected, and who makes it.
ODD = {
    "an empty file": lambda path: path.touch(),
    "an empty folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a circle of links": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "other bytes": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "lines and\n\x1b[31mcolours": lambda path: path.mkdir(),
    "x" * 300: None,
    "y/" * 3000: None,
}

#: Calls with the place of an input, which an odd thing takes.
INPUTS = [
    (name, place)
    for name, call in CALLS.items()
    for place, word in enumerate(call)
    if name != "capture" and (word in ("model", "rec", "results", "part", "routes.npy"))
]


@pytest.mark.parametrize(
    ("call", "odd"),
    by_day(
        [*itertools.product(INPUTS, ODD)],
        [(call, odd) for call, odd in zip(itertools.cycle(INPUTS[1:]), [*ODD, *ODD])],
    ),
)
def test_whatever_stands_in_place_of_an_input_is_refused_in_a_sentence(call, odd, moegeom, place):
    if ODD[odd]:
        ODD[odd](place / odd)
    name, number = call
    ran = moegeom(place, *CALLS[name][:number], odd, *CALLS[name][number + 1 :])
    assert ran.code in (2, 3, 4), ran
    assert ran.err.startswith(("error: ", "Usage: ")) or name == "check", ran
    assert "\x1b" not in ran.out + ran.err


def test_names_that_are_no_utf_8_are_read_and_written(moegeom, place):
    model, rec, out, step = (os.fsdecode(b"\xff\xfe" + name) for name in (b"m", b"r", b"o", b"_1"))
    for name, link in (("model", model), ("rec", rec), ("model", step)):
        (place / link).symlink_to(place / name, target_is_directory=True)
    scan = ("scan", model, "--tokens", rec, "--layers", "1", "--out", out)
    assert moegeom(place, *scan, code=0).out
    pages = (f"--html={out}.html", f"--report=junit={out}.xml", f"--report=json={out}.json")
    assert moegeom(place, "check", out, *pages, code=1).out
    assert (place / f"{out}.xml").read_text("utf-8")
    exports = ("--export", f"csv:{out}.csv", "--export", f"openmetrics:{out}.om")
    moegeom(place, "track", step, "--out", f"{out}t", *exports, code=1)
    assert "\\udcff\\udcfe_1" in (place / f"{out}.csv").read_text("utf-8")
