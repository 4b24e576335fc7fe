"""The first screen, letter by letter, at three widths; and the report that repeats it.

`python tests/e2e/refresh_golden.py` writes the expected screens anew; review the difference. Times
and sizes of files vary from machine to machine: they are fixed in `run.json` before the screen is
rendered. Everything else is what a scan printed.
"""

import json
import os
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


@pytest.mark.parametrize("name", SCANS)
def test_the_screen_is_the_golden_one_and_a_report_of_copied_results_repeats_it(
    moegeom, scanned, tmp_path, name
):
    results, screen = scanned[name]
    copy = shutil.copytree(results, tmp_path / "runs" / results.name)
    report = (tmp_path, "report", f"runs/{results.name}")
    assert moegeom(*report, code=0).out == screen
    fix_what_varies(copy)
    for width in WIDTHS:
        ran = moegeom(*report, COLUMNS=str(width), code=0)
        assert ran.err == ""
        for line in ran.out.splitlines():
            assert len(line) <= width or line.lstrip().startswith("next:"), line
            assert line == line.rstrip()
        golden = GOLDEN / f"{name}_{width}.txt"
        if os.environ.get("MOEGEOM_REFRESH_GOLDEN"):
            golden.write_text(ran.out, "utf-8")
        assert ran.out == golden.read_text("utf-8"), "python tests/e2e/refresh_golden.py"
