"""Every Python block of the documentation runs, page by page, in a folder with what it names; the
first screen of the README is what its command prints; pages of metrics follow from the code: run
`python docs/refresh_metrics.py` when that fails.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moegeom.metrics import METRICS
from moegeom.results.reader import open_results
from tests.by_day import by_day
from tests.e2e.conftest import environment
from tests.short_samples import short_samples

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    if BLOCK.search(page.read_text("utf-8"))
)


@pytest.fixture(scope="module")
def per_token(world, moegeom, tmp_path_factory) -> Path:
    """Results of a scan with --per-token."""
    folder = tmp_path_factory.mktemp("per_token")
    for name in ("model", "rec"):
        (folder / name).symlink_to(world / name, target_is_directory=True)
    arguments = ("--tokens", "rec", "--out", "results", "--per-token", "--quiet")
    moegeom(folder, "scan", "model", *arguments, code=0)
    return folder / "results"


@pytest.fixture
def documented_place(world, per_token, tmp_path) -> Path:
    """``model``, ``rec`` and, made with --per-token, ``results``."""
    for name in ("model", "rec"):
        (tmp_path / name).symlink_to(world / name, target_is_directory=True)
    shutil.copytree(per_token, tmp_path / "results")
    return tmp_path


#: Pages whose blocks scan or run a model for long: at night.
LONG = {
    *("docs/capture/own_loop.md", "docs/capture/training.md", "docs/series.md"),
    *("docs/boundary.md", "docs/trainable.md", "docs/upcycling.md"),
}


#: Pages that show no more on all tokens of a sample than on its first.
OF_FEW_TOKENS = {"README.md", "docs/cells.md", "docs/explain.md", "docs/whatif.md"}


@pytest.mark.parametrize("page", by_day(PAGES, [page for page in PAGES if page not in LONG]))
def test_every_python_block_runs(moegeom, documented_place, page):
    samples = short_samples() if page in OF_FEW_TOKENS else ROOT / "sample_ckpts"
    (documented_place / "sample_ckpts").symlink_to(samples, target_is_directory=True)
    code = "\n".join(BLOCK.findall((ROOT / page).read_text("utf-8")))
    moegeom(documented_place, script=code, code=0)
    if page == "docs/recordings.md":
        run = open_results(documented_place / "my_results").run
        assert run["tokens"]["num_tokens"] == 4096
        assert run["trust"]["fingerprint"] == "matches"


def told(notebook: dict) -> list[str]:
    """What its cells show as text; times, and pages, differ from run to run."""
    shown = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    return ["".join(out.get("text") or out["data"]["text/plain"]) for out in shown]


NOTEBOOK = ROOT / "docs/notebook.ipynb"


def test_the_notebook_is_small_and_names_no_folder_of_the_machine_that_ran_it():
    text = NOTEBOOK.read_text("utf-8")
    assert len(told(json.loads(text))) > 5
    assert len(text) < 200_000
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", text)


@pytest.mark.nightly
def test_the_notebook_shows_what_its_cells_do():
    stored = json.loads(NOTEBOOK.read_text("utf-8"))
    refresh = [sys.executable, "docs/refresh_notebook.py", "--print"]
    ran = subprocess.run(refresh, cwd=ROOT, env=environment(), capture_output=True, check=True)
    again = json.loads(ran.stdout)
    assert told(again) == told(stored)
    assert [cell["source"] for cell in again["cells"]] == [c["source"] for c in stored["cells"]]


def test_every_table_is_documented(world):
    text = (ROOT / "docs/results.md").read_text("utf-8")
    for table in (world / "results").glob("*.parquet"):
        assert f"`{table.name}`" in text


def test_the_screen_of_the_readme_is_what_its_command_prints(moegeom, tmp_path):
    """But for times, and for the name of the results, which is that of the demo."""
    shown = re.search(
        r"\$ moegeom (scan [^\n]*)\n(.*?)\n```", (ROOT / "README.md").read_text(), re.S
    )
    assert shown is not None
    (tmp_path / "sample_ckpts").symlink_to(ROOT / "sample_ckpts", target_is_directory=True)
    arguments = (*shlex.split(shown[1]), "--out", "runs/demo.moegeom")
    ran = moegeom(tmp_path, *arguments, COLUMNS="100", code=0)
    printed, expected = (
        re.sub(r"\b[\d.]+ m?s\b", "# s", text.rstrip("\n")) for text in (ran.out, shown[2])
    )
    assert printed == expected


@pytest.fixture(scope="module")
def pages():
    path = ROOT / "docs/refresh_metrics.py"
    spec = importlib.util.spec_from_file_location("refresh_metrics", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_a_metric_explains_itself_and_the_index_leads_to_it(pages):
    index = pages.index()
    for name in METRICS.names():
        assert len(METRICS[name].page.split()) > 25, f"{name}: its docstring is the page"
        assert f"]({name}.md)" in index
        for table in METRICS[name].columns:
            assert f"## Columns of `{table}`" in pages.reference(METRICS[name])


@pytest.mark.nightly
def test_the_pages_of_metrics_are_written_with_an_example_each(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    pages.write()
    assert {path.stem for path in tmp_path.glob("*.md")} == {*METRICS.names(), "README"}
    for name in METRICS.names():
        text = (tmp_path / f"{name}.md").read_text("utf-8")
        for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text):
            assert (tmp_path / picture).stat().st_size > 1000
        assert pages.EXAMPLE in text, name
