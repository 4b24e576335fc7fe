"""The first screen, letter by letter, at three widths; and the report that repeats it.

`python tests/e2e/refresh_golden.py` writes the expected screens anew; review the difference. Times
and sizes of files vary from machine to machine: they are fixed in `run.json` before the screen is
rendered. Everything else is what a scan printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from moegeom.testing.synthetic import SyntheticModel, write_checkpoint, write_tokens

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (80, 100, 120)
MODEL = SyntheticModel(
    hidden=64, experts=16, top_k=4, layers=4, duplicate=(1,), zero=(2,), long=(3,)
)
SCANS = {"with_tokens": ("--tokens", "rec"), "weights_only": ()}


@pytest.fixture(scope="module")
def scanned(moegeom, tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """Folder and printed screen of each scan, by name."""
    folder = tmp_path_factory.mktemp("screen")
    write_checkpoint(folder / "model", MODEL)
    write_tokens(folder / "rec", MODEL, 2048, lean=0.3)
    made = {}
    for name, tokens in SCANS.items():
        ran = moegeom(folder, "scan", "model", *tokens, "--out", f"runs/{name}.moegeom")
        assert (ran.code, ran.err) == (0, "")
        made[name] = (folder / f"runs/{name}.moegeom", ran.out)
    return made


def fix_what_varies(results: Path) -> None:
    file = results / "run.json"
    run = json.loads(file.read_text("utf-8"))
    run["checkpoint"]["seconds"] = 0.012
    run["seconds"] = 3.45
    if run["tokens"]:
        run["tokens"]["size_bytes"] = 2_100_000
    file.write_text(json.dumps(run), "utf-8")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCANS)
def test_the_screen_is_the_golden_one(moegeom, scanned, tmp_path, name, width):
    results, _ = scanned[name]
    copy = tmp_path / "runs" / results.name
    shutil.copytree(results, copy)
    fix_what_varies(copy)
    ran = moegeom(tmp_path, "report", f"runs/{results.name}", COLUMNS=str(width))
    assert (ran.code, ran.err) == (0, "")
    for line in ran.out.splitlines():
        assert len(line) <= width or line.lstrip().startswith("next:"), line
        assert line == line.rstrip()
    golden = GOLDEN / f"{name}_{width}.txt"
    if os.environ.get("MOEGEOM_REFRESH_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(ran.out, "utf-8")
    assert ran.out == golden.read_text("utf-8"), "python tests/e2e/refresh_golden.py"


@pytest.mark.parametrize("name", SCANS)
def test_a_report_from_copied_results_equals_what_the_scan_printed(
    moegeom, scanned, tmp_path, name
):
    results, screen = scanned[name]
    shutil.copytree(results, tmp_path / "runs" / results.name)
    ran = moegeom(tmp_path, "report", f"runs/{results.name}")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == screen


def test_findings_come_worst_first_and_each_names_its_next_command(scanned):
    _, screen = scanned["with_tokens"]
    words = re.findall(r"^(ERROR|WARN ) (MG[A-Z]\d{3})  layers? ", screen, re.MULTILINE)
    severities = [word.strip() for word, _ in words]
    assert severities == sorted(severities)
    assert {"MGI104", "MGI103", "MGB203"} <= {code for _, code in words}
    assert len(re.findall(r"^ +next: moegeom \w", screen, re.MULTILINE)) == len(words)


def test_a_command_that_is_named_next_exists(moegeom, scanned, tmp_path):
    screens = "".join(screen for _, screen in scanned.values())
    known = moegeom(tmp_path, "--help").out
    for command in set(re.findall(r"next: moegeom (\w+)", screens)):
        assert f"\n  {command} " in known
