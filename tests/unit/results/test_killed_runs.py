"""Killed at any moment, a run leaves no results or whole ones, and the same call completes it.

The runs are processes forked from one that has imported everything, so that the time is spent in
the scan and not in imports; SIGKILL runs no handler. Twelve kills in CI, fifty nightly.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from moegeom.core.tokens import TILE
from moegeom.results.reader import open_results

TOKENS = 3 * TILE + 50

#: Reads ``OUT`` from each line, forks a scan of it, prints the child's number and, once the child
#: is gone, how it ended.
FORKER = """
import os, sys
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

def scan(out):
    pipeline.scan(pipeline.ScanRequest(
        checkpoint, Path(out), tokens=tokens, unverified=True, stale_inputs=True, num_workers=2
    ))

scan(own_out)  # from here on every loop is compiled
for line in sys.stdin:
    child = os.fork()
    if not child:
        scan(line.strip())
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Forker:
    """Scans in processes of their own."""

    def __init__(self, disk, folder) -> None:
        self.tokens = disk.record(folder / "rec", (TOKENS,), has_domains=False)
        self.undisturbed = folder / "undisturbed"
        given = [disk.model, self.tokens, self.undisturbed]
        command = [sys.executable, "-c", FORKER, *map(str, given)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def begin(self, out) -> int:
        print(out, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """0, or the number of the signal that ended it."""
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def forker(disk, tmp_path):
    forker = Forker(disk, tmp_path)
    yield forker
    forker.close()


def kill_again_and_again(disk, forker, folder, num_kills: int) -> None:
    moments = random.Random(20)
    forker.begin(folder / "first")  # waits for the forker itself
    assert forker.end() == 0
    begun = time.monotonic()
    forker.begin(folder / "timed")
    assert forker.end() == 0
    usual = time.monotonic() - begun
    expected = disk.tables(forker.undisturbed)
    kills, runs, resumed = 0, 0, 0
    # on a busy machine the first kills may all come before anything is kept, or after the end
    while kills < num_kills or (not resumed and kills < 20 * num_kills):
        out = folder / f"out{runs}"
        runs += 1
        for _ in range(3):
            child = forker.begin(out)
            time.sleep(moments.uniform(0.0, 1.1 * usual))
            with contextlib.suppress(ProcessLookupError):  # it had ended and was waited for
                os.kill(child, signal.SIGKILL)
            forker.end()
            kills += 1
            if out.exists():
                break
            resumed += any(out.with_name(f"{out.name}.partial").glob("[ps]*s/*"))
        if not out.exists():
            forker.begin(out)
            assert forker.end() == 0
        assert open_results(out).run["schema"] == 1
        np.testing.assert_equal(disk.tables(out), expected)
    assert resumed > 0


def test_some_kills_leave_no_results_or_whole_ones(disk, forker, tmp_path):
    kill_again_and_again(disk, forker, tmp_path, 3)


@pytest.mark.nightly
def test_fifty_kills_leave_no_results_or_whole_ones(disk, forker, tmp_path):
    kill_again_and_again(disk, forker, tmp_path, 50)
