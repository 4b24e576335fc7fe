"""Every Python block of the documentation runs, page by page, in a folder with what it names. Of
the README and docs/start.md every command runs too, in the order in which a reader types them, and
a screen is what its command prints. Pages of metrics and of the museum follow from the code.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.metrics import METRICS
from moegeom.results.reader import open_results
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from tests.by_day import by_day
from tests.doc_scripts import script
from tests.e2e.conftest import environment
from tests.short_samples import NUM_TOKENS, SAMPLES, short_samples

ROOT = Path(__file__).resolve().parents[2]

#: What begins a command in a sentence.
PROGRAMS = ("moegeom ", "make ", "pip ", "python ", "vllm ")

#: The kind of a block of Python; that of a command is the screen below it.
PYTHON = "python"


def typed(page: str) -> Iterator[tuple[str, str]]:
    """What a reader types, in the order of the page, each with its kind."""
    text = (ROOT / page).read_text("utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$|`([^`\n]+)`", text, re.DOTALL | re.M):
        language, block, span = found.groups()
        if language == PYTHON:
            yield block, PYTHON
        elif span is not None:
            yield from [(span, "")] * span.startswith(PROGRAMS)
        elif block.startswith("$ "):
            line, _, screen = block.removeprefix("$ ").partition("\n")
            yield line, screen.rstrip("\n")
        else:
            yield from ((line, "") for line in re.sub(r" +# .*", "", block).splitlines())


def code_of(page: str) -> str:
    return "\n".join(text for text, kind in typed(page) if kind == PYTHON)


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

#: Lines that no test types, and why: of the pages whose commands a reader types from the top.
NOT_TYPED = {
    "README.md": {
        "pip install -c constraints.txt .": "installs, as test_install.py does",
        "make demo": "installs, and prints the screen that stands below",
        "make test": "runs this test",
    },
    "docs/start.md": {
        "pip install -c constraints.txt .": "installs, as test_install.py does",
        "pip install -c constraints.txt '.[capture,plots]'": "needs an index of packages",
        'pip install "git+https://github.com/OWNER/moegeom@REVISION"': "needs a published clone",
        'pip install "moegeom[hub] @ git+https://github.com/OWNER/moegeom@REVISION"': "needs a published clone",
        "moegeom --install-completion": "writes into the settings of a shell",
    },
}

#: What a reader puts for a word in capitals.
READERS = {
    "CKPT": "model",
    "EXPORT": "model",
    "FILE": "text.jsonl",
    "TRACE": "routes.npz",
    "REC": "recorded",
    "REC_B": "recorded",
    "RESULTS": "results",
}

#: The program around a block that speaks of a model.
PROGRAM = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
ids = torch.arange(512).reshape(8, 64) % 251
"""

#: Exit codes that are not 0: without a text a sign-off leaves open how it is routed.
CODES = {"moegeom signoff CKPT EXPORT": 4}


@pytest.fixture
def readers_folder(per_token, tmp_path) -> Path:
    """A checkpoint, a text, arrays, traces, steps of a training, and results."""
    short = short_samples() / "olmoe-balanced"
    links = {"model": short / "step_1500", "results": per_token}
    steps = ("step_600", "step_1000", "rec/step_600", "rec/step_1000")
    links |= {step: short / step for step in steps}
    samples = {"olmoe-balanced": short, "olmoe-collapsed": SAMPLES / "olmoe-collapsed"}
    links |= {f"sample_ckpts/{name}": folder for name, folder in samples.items()}
    for name, folder in links.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(folder, target_is_directory=True)
    lines = [json.dumps({"text": f"Token {n} goes to four experts of 16."}) for n in range(32)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    source = open_tokens(str(short / "rec/step_1500"))
    arrays = {name: {} for name in ("hidden", "before", "logits", "ids")}
    for router in load_routers(open_checkpoint(short / "step_1500")).routers:
        inputs = source.read_values(router.name, 0, NUM_TOKENS)
        chosen = source.read_chosen(router.name, 0, NUM_TOKENS)
        lengths = np.linspace(1, 3, NUM_TOKENS)[:, None]
        values = (inputs, inputs / router.gain * lengths, inputs @ router.weight.T, chosen)
        for name, array in zip(arrays, values, strict=True):
            arrays[name][router.name.replace("/", ".")] = array
    for name, by_router in arrays.items():
        np.savez(tmp_path / name, **by_router)
    requests = np.stack(list(arrays["ids"].values()), axis=1).reshape(16, -1, 3, 4)
    np.savez(tmp_path / "routes", **{f"request-{n}": ids for n, ids in enumerate(requests)})
    (tmp_path / "dump").mkdir()
    for n, ids in enumerate(requests):
        np.savez(tmp_path / f"dump/{n}", **{f"request-{n}": ids})
    return tmp_path


@pytest.mark.parametrize("page", NOT_TYPED)
def test_what_a_reader_types_runs_from_the_top_to_the_end(moegeom, readers_folder, page):
    lines = list(typed(page))
    assert set(NOT_TYPED[page]) <= {text for text, _ in lines}, "a line that is left out is gone"
    for text, kind in lines:
        if text in NOT_TYPED[page]:
            continue
        own = re.sub(r"\b[A-Z][A-Z_]+\b", lambda word: READERS[word[0]], text)
        if kind == PYTHON:
            takes_model = re.search(r"\bmodel\b", text) is not None
            moegeom(readers_folder, script=PROGRAM * takes_model + own, code=0)
            continue
        # small, and a screen as make demo prints it
        screen = {"MOEGEOM_OUT": "runs/demo.moegeom"} if kind else {"MOEGEOM_LAYERS": "0"}
        variables = {"COLUMNS": "100", "MOEGEOM_TOKENIZER": "bytes"} | screen
        program, *words = shlex.split(own)
        ran = moegeom(readers_folder, *words, code=CODES.get(text, 0), **variables)
        assert program == "moegeom"
        assert ran.out
        if kind:
            printed, screen = (re.sub(r"\b[\d.]+ m?s\b", "# s", one) for one in (ran.out, kind))
            assert printed.rstrip("\n") == screen


# --------------------------------------------------------------------------- blocks of other pages
PAGES = sorted(
    name
    for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    if code_of(name := str(page.relative_to(ROOT))) and name not in NOT_TYPED
)

#: Pages that show no more on all tokens of a sample than on its first.
OF_FEW_TOKENS = {"docs/cells.md", "docs/explain.md", "docs/whatif.md"}


@pytest.mark.parametrize("page", by_day(PAGES, [page for page in PAGES if page not in LONG]))
def test_every_python_block_runs(moegeom, documented_place, page):
    samples = short_samples() if page in OF_FEW_TOKENS else ROOT / "sample_ckpts"
    (documented_place / "sample_ckpts").symlink_to(samples, target_is_directory=True)
    moegeom(documented_place, script=code_of(page), code=0)
    if page == "docs/recordings.md":
        run = open_results(documented_place / "my_results").run
        assert run["tokens"]["num_tokens"] == 4096
        assert run["trust"]["fingerprint"] == "matches"


NOTEBOOK = ROOT / "docs/notebook.ipynb"


def test_the_notebook_is_small_and_names_no_folder_of_the_machine_that_ran_it():
    text = NOTEBOOK.read_text("utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)
    source = "".join(line for cell in cells for line in cell["source"])
    assert {"mg.scan", "mg.imbalance", "mg.explain"} <= set(re.findall(r"mg\.\w+", source))
    assert len(text) < 50_000
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", text)


@pytest.mark.nightly
def test_the_notebook_shows_what_its_cells_do():
    refresh = [sys.executable, "docs/refresh_notebook.py", "--print"]
    ran = subprocess.run(refresh, cwd=ROOT, env=environment(), capture_output=True, check=True)
    assert ran.stdout.decode() == NOTEBOOK.read_text("utf-8")


def test_links_lead_to_pages_of_the_site_and_what_it_has_none_of_is_named():
    page = SimpleNamespace(
        file=SimpleNamespace(abs_src_path=str(ROOT / "docs/capture/own_loop.md"))
    )
    links = "[museum](../../tests/museum) [rules](../../SECURITY.md) [more](../capture.md#x)"
    shown = script("site_links").on_page_markdown(links, page=page)
    assert shown == "[museum](../museum.md) rules [more](../capture.md#x)"


def test_every_table_is_documented(world):
    text = (ROOT / "docs/results.md").read_text("utf-8")
    for table in (world / "results").glob("*.parquet"):
        assert f"`{table.name}`" in text


def test_the_page_of_a_metric_explains_itself_and_the_index_leads_to_it():
    pages = script("refresh_metrics")
    index = pages.index()
    for name in METRICS.names():
        assert len(METRICS[name].page.split()) > 25, f"{name}: its docstring is the page"
        assert f"]({name}.md)" in index
        for table in METRICS[name].columns:
            assert f"## Columns of `{table}`" in pages.reference(METRICS[name])


@pytest.mark.nightly
def test_the_pages_of_metrics_are_written_with_an_example_each(tmp_path, monkeypatch):
    pages = script("refresh_metrics")
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    pages.write()
    assert {path.stem for path in tmp_path.glob("*.md")} == {*METRICS.names(), "README"}
    for name in METRICS.names():
        text = (tmp_path / f"{name}.md").read_text("utf-8")
        for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text):
            assert (tmp_path / picture).stat().st_size > 1000
        assert pages.EXAMPLE in text, name
