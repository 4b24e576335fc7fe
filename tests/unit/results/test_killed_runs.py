"""Killed at any moment, a run leaves no results or whole ones, and the same call completes it.

One kill of each kind, at its moment; tests/e2e/test_interrupted.py kills at random ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from moegeom.results.reader import open_results

#: Forks a child for each line and prints, once the child is gone, how it ended.
LOOP = """
import os, sys
for line in sys.stdin:
    child = os.fork()
    if not child:
        work(*line.split())
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Forker:
    """``code`` defines ``work``, which a child of its own does with the words of each line.

    Children are forked from one that has imported everything, so that the time is spent in the work.
    SIGKILL runs no handler.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code + LOOP, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def run(self, *words: object) -> int:
        """0, or how the child ended."""
        print(*words, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


#: A scan into ``out`` that is killed at a moment. This is a word of a path, and the kill comes
#: before the first touch of the file system that names it.
SCAN = """
import os, signal, sys
from pathlib import Path
from moegeom import pipeline
from moegeom.core.tokens import TILE
from moegeom.kernels.table import load_kernels
from moegeom.metrics import METRICS
from moegeom.measure import passes as _measure
from moegeom.engine.loop import Pace

METRICS.all(), load_kernels("cpu")
_measure.pace_of = lambda run: Pace(TILE, run.options.num_workers, snapshot_seconds=-1.0)  # after each tile
checkpoint, tokens, own_out = sys.argv[1:]

def work(out, moment=None):
    def look(event, arguments):
        if event == "open" or event.startswith(("os.", "shutil.")) and event != "os.kill":
            is_named = any(moment in str(argument) for argument in arguments)
            if os.path.exists(out) if moment == "moved" else is_named:
                os.kill(os.getpid(), signal.SIGKILL)
    if moment:
        sys.addaudithook(look)
    pipeline.scan(pipeline.ScanRequest(
        checkpoint, Path(out), tokens=tokens, unverified=True, stale_inputs=True, num_workers=2
    ))

work(own_out)  # from here on every loop is compiled
"""


@pytest.fixture
def forker(disk, tmp_path):
    forker = Forker(SCAN, disk.model, disk.tokens, tmp_path / "imports")
    yield forker
    forker.close()


def test_a_kill_of_each_kind_leaves_no_results_or_whole_ones(disk, forker, tmp_path):
    """One run, killed again and again; each time it goes on with what was kept."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    for moment, pattern in {
        "snapshots": "plan.json",
        "new.text.0/facts.json": "snapshots/text.0.*.npz",
        "new.text.1": "parts/text.0/digest",
        "whole/run.json": "whole/layers.parquet",
        "moved": "parts/text.1/digest",
    }.items():
        assert forker.run(out, moment) == signal.SIGKILL, moment
        assert list(partial.glob(pattern)), moment
        assert out.exists() == (moment == "moved")
    assert open_results(out).run["schema"] == 1
    disk.assert_undisturbed(out)
