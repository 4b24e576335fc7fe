"""The command line in processes of its own, and a small synthetic world to point it at.

Commands run in a folder of the test, with relative paths, so that no output names a place. Most
run in children of a warm process (warm_commands.py); the scan behind ``world`` and the tests of
``--help`` start from scratch. Kernels come from Numba's cache: the first run after a change of a
kernel is slower by its compilation.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests import costs
from tests.short_samples import short_samples

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ran:
    """What a command left on its streams, and its exit code."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """This environment with moegeom on the path and without what changes a screen."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])}


def run_cold(folder: Path, *arguments: str) -> Ran:
    """``moegeom ARGUMENTS`` in ``folder``, started from scratch as a person does."""
    finished = subprocess.run(
        [sys.executable, "-m", "moegeom_cli", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Ran(finished.returncode, finished.stdout, finished.stderr)


@pytest.fixture(scope="session")
def moegeom_cold() -> Callable[..., Ran]:
    return run_cold


@pytest.fixture(scope="session")
def moegeom(tmp_path_factory) -> Iterator[Callable[..., Ran]]:
    """``moegeom ARGUMENTS`` in a folder, or a script, in a child of a process that is warm.

    With ``forms``, names of renderers, standard output is one JSON document: form -> width -> text.
    """
    streams = tmp_path_factory.mktemp("streams")
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "warm_commands.py")],
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
        **variables: str,
    ) -> Ran:
        out, err = streams / "out", streams / "err"
        request = {
            "folder": str(folder),
            "arguments": arguments,
            "script": script,
            "environment": variables,
            "forms": list(forms),
            "out": str(out),
            "err": str(err),
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the warm process has died"
        code, seconds = answer.split()
        costs.elsewhere[0] += float(seconds)
        return Ran(int(code), out.read_text("utf-8"), err.read_text("utf-8"))

    yield run
    server.stdin.close()
    server.wait(timeout=30)
    costs.elsewhere[0] = 0.0  # the operating system counts them from here on
    server.stdout.close()


@dataclass(frozen=True)
class World:
    """A folder with ``model`` (three layers, one with duplicate rows), ``rec`` and ``results``.

    ``screen`` is what the scan that made ``results`` printed.
    """

    folder: Path
    screen: str

    def copy_to(self, folder: Path, *names: str) -> Path:
        """Private copies of ``names``, for a test that damages them."""
        for name in names:
            shutil.copytree(self.folder / name, folder / name)
        return folder


@pytest.fixture(scope="session")
def world(moegeom, tmp_path_factory) -> World:
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.router.load import load_routers
    from moegeom.testing.synthetic import SyntheticModel, write_checkpoint, write_tokens

    folder = tmp_path_factory.mktemp("world")
    model = SyntheticModel(hidden=64, experts=16, top_k=4, layers=3, duplicate=(1,))
    write_checkpoint(folder / "model", model)
    fingerprint = load_routers(open_checkpoint(folder / "model")).fingerprint
    write_tokens(folder / "rec", model, 1024, fingerprint)
    choices = np.argsort(np.random.default_rng(0).random((40, 3, 16)), axis=2)[:, :, :4]
    np.save(folder / "routes.npy", choices.astype(np.uint8))
    ran = run_cold(folder, "scan", "model", "--tokens", "rec", "--out", "results")
    assert ran.code == 0, ran.err
    assert ran.err == ""
    part = moegeom(folder, "scan", "model", "--tokens", "rec", "--part", "1/1", "--out", "part")
    assert (part.code, part.err) == (0, "")
    return World(folder, ran.out)


@pytest.fixture
def place(world, tmp_path) -> Path:
    """An empty folder from which ``model``, ``rec`` and ``results`` can be reached, not changed.

    ``routes.npy`` is a trace of 40 tokens, ``part`` the only part of a scan; ``sample_ckpts`` are
    the samples with short recordings.
    """
    (tmp_path / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    for name in ("model", "rec", "results", "part", "routes.npy"):
        (tmp_path / name).symlink_to(world.folder / name, target_is_directory=name != "routes.npy")
    return tmp_path
