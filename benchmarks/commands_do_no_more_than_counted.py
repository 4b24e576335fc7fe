"""Claim: commands call, hold, read and write no more than is written down.

Counts, for small inputs that are always the same: calls of functions, in all threads; bytes at the
peak of what Python and NumPy hold; bytes read from files and written to them. Unlike seconds these
are the same on a busy machine, so that the tests compare them with
benchmarks/counted_costs.json: more is a regression, less a gain to be written down.

    python benchmarks/commands_do_no_more_than_counted.py            ratios to what is written down
    python benchmarks/commands_do_no_more_than_counted.py --write    writes it down

What is compiled is one call, whatever it does: time over a bare product tells of that
(scan_costs_little_more_than_its_matmul.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.core.tokens import TILE
from moegeom.engine.request import ScanRequest
from moegeom.pipeline import scan
from moegeom.studies.boundary.record import BoundaryRequest
from moegeom.studies.boundary.study import measure_boundary
from moegeom.studies.check.study import GateRequest, gate

WRITTEN = Path(__file__).parent / "counted_costs.json"

MODEL = SyntheticModel(hidden=256, experts=32, top_k=4, layers=1)
NUM_TOKENS = 2 * TILE

#: How far a count may be from what is written down: threads meet in another order, and a table of
#: Python grows a step earlier or later.
TOLERANCE: Mapping[str, float] = {"calls": 0.02, "peak": 0.05, "read": 0.01, "written": 0.01}

Costs = dict[str, dict[str, int]]


def _commands(folder: Path) -> dict[str, Callable[[], Any]]:
    """What is counted, by name; each leaves ``folder/out`` or nothing."""
    model, tokens, out = str(folder / "model"), str(folder / "rec"), folder / "out"
    given: dict[str, Any] = {"checkpoint": model, "out": out}
    on_tokens = given | {"tokens": tokens, "num_workers": 1}
    return {
        "check": lambda: gate(GateRequest(model)),
        "scan of weights": lambda: scan(ScanRequest(**given)),
        "scan": lambda: scan(ScanRequest(**on_tokens)),
        "boundary-report": lambda: measure_boundary(
            BoundaryRequest(**on_tokens, arithmetics=("bf16",))
        ),
    }


def counted() -> Costs:
    """The costs of every command, each after a run that imported and compiled what it needs."""
    with tempfile.TemporaryDirectory(prefix="moegeom-") as name:
        folder = Path(name)
        write_checkpoint(folder / "model", MODEL)
        write_tokens(folder / "rec", MODEL, NUM_TOKENS)
        return {
            command: _costs(_anew(folder / "out", run))
            for command, run in _commands(folder).items()
        }


def _anew(out: Path, run: Callable[[], Any]) -> Callable[[], Any]:
    def work() -> None:
        shutil.rmtree(out, ignore_errors=True)
        run()

    return work


def _costs(work: Callable[[], Any]) -> dict[str, int]:
    work()
    gc.collect()
    tracemalloc.start()
    try:
        work()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    looks = _LooksAtMaps()
    before = _bytes_moved()
    calls = _num_calls(work)
    read, written = (after - start for start, after in zip(before, _bytes_moved(), strict=True))
    return {"calls": calls, "peak": peak, "read": read - looks.bytes(), "written": written}


class _LooksAtMaps:
    """How often the list of what the process has mapped was read: by threadpoolctl, to find BLAS.

    It is as long as the paths of what is imported, which is no work of a command.
    """

    _PATH = "/proc/self/maps"

    def __init__(self) -> None:
        self._times = 0
        sys.addaudithook(self._heard)  # for good: there is no way to take a hook away

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[0] == self._PATH:
            self._times += 1

    def bytes(self) -> int:
        times = self._times
        return times * len(Path(self._PATH).read_bytes())


def _num_calls(work: Callable[[], Any]) -> int:
    """Calls of functions of Python and C, in this thread and those that it begins."""
    count = [0]

    def heard(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            count[0] += 1

    before, before_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(heard)
    sys.setprofile(heard)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(before_threads)
    return count[0]


def _bytes_moved() -> tuple[int, int]:
    """Bytes that this process asked to read and to write, as Linux counts them."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"]), int(told["wchar"])


def _versions() -> dict[str, str]:
    """What counts depend on beside this code."""
    return {"python": ".".join(map(str, sys.version_info[:2])), "numpy": np.__version__}


def _ratio(count: int, known: int) -> float:
    """1 where both are nothing."""
    return count / known if known else 1.0 + count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the counts down")
    is_new = parser.parse_args().write
    versions = _versions()
    known: dict[str, Any] = {"versions": versions} if is_new else json.loads(WRITTEN.read_text())
    if known["versions"] != versions:
        print(f"counted with {known['versions']}, which these are not: {versions}")
        return 1
    found = counted()
    if is_new:
        known |= {"costs": found}
        WRITTEN.write_text(json.dumps(known, indent=1) + "\n")
    outside = 0
    for command, costs in found.items():
        for kind, count in costs.items():
            ratio = _ratio(count, known["costs"][command][kind])
            is_outside = abs(ratio - 1.0) > TOLERANCE[kind]
            outside += is_outside
            told = f"more than {TOLERANCE[kind]:.0%} away" if is_outside else ""
            print(f"{command:16} {kind:8} {ratio:.3f}  {count:>12,}  {told}".rstrip())
    return int(outside > 0)


if __name__ == "__main__":
    sys.exit(main())
