"""The command line in processes of its own, and a small synthetic world to point it at.

Commands run in a folder of the test, with relative paths, so that no output names a place. Most
run in children of a warm process (warm_commands.py); the scan behind ``world`` and the tests of
``--help`` start from scratch. Kernels come from Numba's cache: the first run after a change of a
kernel is slower by its compilation.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moegeom_cli.streams import COMPILING
from tests import costs
from tests.short_samples import SAMPLES, short_samples

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ran:
    """What a command left on its streams, and its exit code."""

    code: int
    out: str
    err: str

    @classmethod
    def of(cls, code: int, out: str, err: str) -> "Ran":
        """Without word of compiling: whether a kernel is in the cache is no matter of a test."""
        return cls(code, out, err.replace(f"{COMPILING[True]}\n", ""))

    @property
    def words(self) -> str:
        """What it printed, on one line."""
        return " ".join(self.out.split())

    @property
    def document(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.out)


def widest(screen: str) -> int:
    return max(map(len, screen.splitlines()))


def environment() -> dict[str, str]:
    """This environment with moegeom on the path and without what changes a screen."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])}


def run_in(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    where = {"cwd": folder, "env": environment() | variables}
    return subprocess.run(command, **where, capture_output=True, text=True, timeout=300)


def run_cold(folder: Path, *arguments: str, **variables: str) -> Ran:
    """``moegeom ARGUMENTS`` in ``folder``, started from scratch as a person does."""
    finished = run_in(folder, sys.executable, "-m", "moegeom_cli", *arguments, **variables)
    return Ran.of(finished.returncode, finished.stdout, finished.stderr)


def warm_commands(streams: Path, *modules: str) -> Iterator[Callable[..., Any]]:
    """``moegeom ARGUMENTS`` in a folder, or a script, in a child of a process that is warm.

    With ``forms``, names of renderers, standard output is one JSON document: form -> width -> text.
    With ``code`` it must end with that exit code. ``ending`` is a signal and the seconds after which
    it comes, ``largest`` the bytes that a file may have; with ``times`` a list of so many that ran at
    once. ``modules`` are loaded beside those of moegeom.
    """
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "warm_commands.py"), *modules],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(
        folder: Path,
        *arguments: str,
        forms: Collection[str] = (),
        script: str = "",
        code: int | None = None,
        ending: tuple[int, float] | None = None,
        largest: int | None = None,
        times: int | None = None,
        **variables: str,
    ) -> Any:
        places = [streams / str(number) for number in range(times or 1)]
        for place in places:
            place.mkdir(exist_ok=True)
        request = {
            "folder": str(folder),
            "arguments": arguments,
            "script": script,
            "environment": variables,
            "forms": list(forms),
            "ending": ending,
            "largest": largest,
            "streams": list(map(str, places)),
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the warm process has died"
        codes, seconds = json.loads(answer)
        costs.elsewhere[0] += float(seconds)
        ran = [
            Ran.of(number, *((place / name).read_text("utf-8") for name in ("out", "err")))
            for number, place in zip(codes, places, strict=True)
        ]
        assert code in (None, ran[0].code), (arguments, ran[0].code, ran[0].err)
        return ran if times else ran[0]

    yield run
    server.stdin.close()
    server.wait(timeout=30)
    costs.elsewhere[0] = 0.0  # the operating system counts them from here on
    server.stdout.close()


@pytest.fixture(scope="session")
def moegeom(tmp_path_factory) -> Iterator[Callable[..., Any]]:
    yield from warm_commands(tmp_path_factory.mktemp("streams"))


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="session")
def refused(moegeom) -> Callable[..., str]:
    """Runs a command that must be refused with a sentence that holds each of the words.

    Nothing is printed, nothing is written, and what is said has no traceback.
    """

    def refuse(folder: Path, arguments: Collection[str], *words: str, code: int = 3) -> str:
        before = everything_below(folder)
        ran = moegeom(folder, *arguments, code=code)
        assert ran.out == "", arguments
        error, *rest = ran.err.splitlines()
        assert error.startswith("error: "), ran.err
        assert error.endswith((".", "?", ")")), error
        assert all(line.startswith(("  hint: ", "  note: ")) for line in rest), ran.err
        assert [word for word in words if word not in ran.err] == [], ran.err
        assert everything_below(folder) == before, arguments
        return ran.err

    return refuse


#: A healthy sample, and the names of its routers.
HEALTHY = "sample_ckpts/olmoe-balanced/step_1500"
GATES = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(3)]

Tensors = dict[str, np.ndarray]


def changed(folder: Path, name: str, change: Callable[[Tensors], Tensors]) -> str:
    """A copy of the healthy sample whose tensors were changed."""
    shutil.copytree(SAMPLES.parent / HEALTHY, folder / name)
    file = folder / name / "model.safetensors"
    tensors = change(load_file(file))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, file)
    return name


#: Names under which Python, a library or a tool would run a file of the working directory.
IMPORTED = "numpy moegeom typer rich json sitecustomize usercustomize conftest setup".split()


def plant_code(folder: Path) -> None:
    """Files that end whoever runs them with exit code 0, and leave ``RAN``."""
    code = "import os\nopen('RAN', 'w').close()\nos._exit(0)\n"
    for name in IMPORTED:
        (folder / f"{name}.py").write_text(code)
    (folder / "hostile.pth").write_text(f"import os; {code}".replace("\n", "; "))
    (folder / "pyproject.toml").write_text('[build-system]\nrequires = ["hostile"]\n')
    (folder / "matplotlibrc").write_text("backend: module://numpy\ntext.usetex: True\n")
    (folder / "__pycache__").mkdir()
    for ending in ("nbi", "nbc", "pyc"):
        (folder / f"__pycache__/choice._squares-18.py311.{ending}").write_bytes(b"cos\nsystem\n")


@pytest.fixture(scope="session")
def world(moegeom, tmp_path_factory) -> Path:
    """A folder with ``model`` (three layers, one with duplicate rows), ``rec`` and ``results``."""
    from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.router.load import load_routers

    folder = tmp_path_factory.mktemp("world")
    model = SyntheticModel(hidden=64, experts=16, top_k=4, layers=3, duplicate=(1,))
    write_checkpoint(folder / "model", model)
    plant_code(folder / "model")
    fingerprint = load_routers(open_checkpoint(folder / "model")).fingerprint
    write_tokens(folder / "rec", model, 1024, fingerprint)
    choices = np.argsort(np.random.default_rng(0).random((40, 3, 16)), axis=2)[:, :, :4]
    np.save(folder / "routes.npy", choices.astype(np.uint8))
    ran = run_cold(folder, "scan", "model", "--tokens", "rec", "--out", "results")
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in ran.out, "colours are for terminals"
    part = ("--layers", "1", "--part", "1/1", "--out", "part")
    assert moegeom(folder, "scan", "model", "--tokens", "rec", *part, code=0).err == ""
    return folder


@pytest.fixture
def place(world, tmp_path) -> Path:
    """An empty folder from which ``model``, ``rec`` and ``results`` can be reached, not changed.

    ``routes.npy`` is a trace of 40 tokens, ``part`` the only part of a scan; ``sample_ckpts`` are
    the samples with short recordings. Code lies there that no command runs.
    """
    plant_code(tmp_path)
    (tmp_path / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    for name in ("model", "rec", "results", "part", "routes.npy"):
        (tmp_path / name).symlink_to(world / name, target_is_directory=name != "routes.npy")
    return tmp_path
