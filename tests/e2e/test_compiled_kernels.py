"""What an image compiles when it is built is what its commands need, and commands do no more work
than is written down: counted, not timed. With ``--no-cache`` what is asked for comes from the server,
and nothing is kept of it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.by_day import by_day
from tests.short_samples import short_samples
from tests.unit.checkpoint.remote_server import Log, Site, serve

#: Signatures of kernels that commands need beyond those compiled before, in a new process.
SCRIPT = """
import json, sys
from pathlib import Path
import moegeom
from moegeom.kernels.cpu.compilation import kernels
from moegeom.testing.compile_kernels import compile_kernels

def there():
    return {(kernel.__name__, str(s)) for kernel in kernels() for s in kernel.signatures}

samples, out, *commands = sys.argv[1:]
for command in commands:
    before = there()
    if command == "compile":
        compile_kernels()
    elif command == "cells":
        sample = f"{samples}/olmoe-balanced/step_1500"
        moegeom.cells(sample, layers=1, subspace="random:3", out=out)
    else:
        sample = f"{samples}/{command}"
        moegeom.boundary_report(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=1)
    print(json.dumps([command, sorted(name for name, _ in there() - before)]))
"""


def test_commands_find_their_kernels_compiled(tmp_path):
    commands = ("compile", "olmoe-balanced", "deepseek-tiny", "cells")
    arguments = [str(short_samples()), str(tmp_path / "out"), *commands]
    ran = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    #: By command the names of kernels that it needed beyond those of the commands before.
    needed = dict(json.loads(line) for line in ran.stdout.splitlines())
    compiled = needed.pop("compile")
    assert len(compiled) > 30
    assert "advance" in compiled
    assert not any(needed.values()), needed


# ------------------------------------------------------------------------------------ counted costs
BENCHMARK = "benchmarks/commands_do_no_more_than_counted.py"
PYTHON = json.loads(Path("benchmarks/counted_costs.json").read_text())["versions"]["python"]


@pytest.mark.skipif(
    ".".join(map(str, sys.version_info[:2])) != PYTHON,
    reason=f"calls were counted with Python {PYTHON}; others make other calls",
)
def test_commands_call_hold_read_and_write_what_is_written_down() -> None:
    """In a process of its own: here shapes are looked at, which are calls too."""
    ran = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (
        f"{ran.stdout}{ran.stderr}\nLess work, or work that is meant: python {BENCHMARK} --write"
    )


# --------------------------------------------------------------------- without a folder for kernels
#: How each command that takes a URL is called; results go to folders of the test.
CALLS = {
    "routers": ("list", "routers", "URL"),
    "scan": ("scan", "URL", "--out", "scanned"),
    "scan --tokens": ("scan", "URL", "--tokens", "rec", "--out", "measured"),
    "check": ("check", "URL"),
    "check --tokens": ("check", "URL", "--tokens", "rec"),
    "diff": ("diff", "URL", "URL"),
    "diff --tokens": ("diff", "URL", "model", "--tokens", "rec"),
    "imbalance": ("imbalance", "URL", "--tokens", "rec"),
    "perturb": ("research", "perturb", "URL", "--tokens", "rec", "--at", "0,5"),
    "capacity": ("research", "capacity", "--from", "URL", "--width", "64"),
}


@pytest.fixture
def site(world) -> Iterator[Site]:
    with serve() as running:
        running.add_folder(world / "model", "/model")
        yield running


@pytest.fixture
def ask(moegeom, place, site, tmp_path):
    """Runs a command on the served model and returns the paths that the server was asked for."""

    def run(call: tuple[str, ...], *options: str) -> list[str]:
        site.log = Log()
        arguments = [f"{site.url}/model/" if word == "URL" else word for word in call]
        variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
        ran = moegeom(place, *arguments, *options, **variables)
        # check finds the duplicate rows and exits 1
        assert ran.code == (call[0] == "check"), ran.err
        return site.log.requests

    return run


def kept(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


#: Each way to a checkpoint: opened, scanned, judged, as a second side, as sizes.
BY_DAY = ("routers", "scan --tokens", "check", "diff", "capacity")


@pytest.mark.parametrize("name", by_day(CALLS, BY_DAY))
def test_without_a_cache_the_server_is_asked_again_and_nothing_is_kept(name, ask, tmp_path):
    first = ask(CALLS[name], "--no-cache")
    assert first
    assert kept(tmp_path / "cache") == {}
    ask(("list", "routers", "URL"))
    before = kept(tmp_path / "cache")
    assert before
    call = tuple("again" if word in ("scanned", "measured") else word for word in CALLS[name])
    again = ask(call, "--no-cache")
    assert sorted(again) == sorted(first)
    assert kept(tmp_path / "cache") == before
