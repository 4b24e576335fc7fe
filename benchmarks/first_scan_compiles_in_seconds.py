"""Claim: the first scan on a machine pays for compiling the kernels, in seconds and only once.

Scans a small synthetic checkpoint twice in processes of their own that share a kernel cache, empty
before the first. Prints the seconds of the first less those of the second: processor time, which a
busy machine does not stretch, and wall time, which it does.

Target (docs/benchmarks.md): less than 6 s of processor time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens


def _scan(folder: Path, name: str) -> tuple[float, float]:
    """Processor and boundary seconds of one scan in a process of its own."""
    command = [sys.executable, "-m", "moegeom_cli", "scan", str(folder / "model"), "--quiet"]
    command += ["--tokens", str(folder / "rec"), "--out", str(folder / name)]
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root / "cli"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}
    before, started = os.times(), time.perf_counter()
    subprocess.run(command, env=environment, check=True)
    after = os.times()
    used = after.children_user + after.children_system
    return used - before.children_user - before.children_system, time.perf_counter() - started


def _difference(family: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = SyntheticModel(family, hidden=64, experts=64, top_k=8, layers=1)
        write_checkpoint(folder / "model", model)
        write_tokens(folder / "rec", model, 1024, num_sinks=0)
        first, second = _scan(folder, "first"), _scan(folder, "second")
    return first[0] - second[0], first[1] - second[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    for family in ("qwen3_moe", "deepseek_v3"):
        found = [_difference(family) for _ in range(repeats)]
        processor, elapsed = (min(column) for column in zip(*found, strict=True))
        print(
            f"{family}: compiling takes {processor:.1f} s of processor time, {elapsed:.1f} s in all"
        )


if __name__ == "__main__":
    main()
