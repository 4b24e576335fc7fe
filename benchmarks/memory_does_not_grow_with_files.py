"""Claim: the memory of a scan of traces does not grow with the number of their files.

Writes a trace of 40 files of 50 MB (one array [tokens, layers, k] each), scans two of its layers in
a process of its own with one worker, adds files up to 400 (20 GB) and scans again. Prints the peak
resident memory of both and their ratio, that of the first pass alone, and seconds. Give a folder
with room for the files, and other numbers of files:

    python benchmarks/memory_does_not_grow_with_files.py /scratch 40 400

Target (docs/benchmarks.md): 400 files over 40 <= 1.05.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS, EXPERTS, TOP_K, HIDDEN = 48, 64, 8, 16
FILE_BYTES = 50_000_000
NUM_FILES = (40, 400)


def _write(folder: Path, first: int, last: int) -> None:
    """Files that differ everywhere and hold the same 1024 expert sets of each layer. The table of
    sets keeps each of them for every block of documents; how it fills up is measured by
    ``memory_does_not_grow_with_tokens.py``.
    """
    import numpy as np

    num_tokens = FILE_BYTES // (LAYERS * TOP_K)
    random = np.random.default_rng(0)
    few = np.argsort(random.random((1024, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8)
    ids = few[random.integers(0, len(few), num_tokens)]
    for number in range(first, last):
        moved = np.roll(ids, number, axis=0)
        moved[: number + 1] = moved[: number + 1, :, ::-1]
        np.save(folder / f"{number}.npy", moved)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _scan(checkpoint: str, folder: str) -> dict[str, float]:
    """A scan of two layers in this process: its peak memory, and seconds of its passes."""
    from moegeom.engine.session import Session
    from moegeom.pipeline import ScanRequest, scan, with_tokens

    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "results"
        request = ScanRequest(
            checkpoint=checkpoint,
            tokens=folder,
            layers="0,1",
            dialect="vllm",
            out=out,
            num_workers=1,
        )
        begun = time.perf_counter()
        opened = with_tokens(request, Session.of(checkpoint, request, with_varying=True))
        read, peak = time.perf_counter(), _peak()
        scan(request, opened=opened)
        scanned = time.perf_counter()
    return {
        "first_mib": peak,
        "peak_mib": _peak(),
        "first_pass": read - begun,
        "router": (scanned - read) / 2,
    }


def main() -> None:
    if sys.argv[1:2] == ["scan"]:
        print(json.dumps(_scan(*sys.argv[2:])))
        return
    from benchmarks.synthetic import SyntheticModel, write_checkpoint

    where = sys.argv[1] if len(sys.argv) > 1 else None
    numbers = tuple(map(int, sys.argv[2:])) or NUM_FILES
    with tempfile.TemporaryDirectory(dir=where) as work:
        model, files, written, first = Path(work) / "model", Path(work) / "files", 0, 0.0
        write_checkpoint(model, SyntheticModel("qwen3_moe", HIDDEN, EXPERTS, TOP_K, LAYERS))
        files.mkdir()
        for number in numbers:
            _write(files, written, number)
            written = number
            command = [sys.executable, __file__, "scan", str(model), str(files)]
            finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(finished.stdout)
            first = first or found["peak_mib"]
            print(
                f"{number:>4} files, {number * FILE_BYTES / 1e9:4.1f} GB: peak "
                f"{found['peak_mib']:5.0f} MiB, ratio {found['peak_mib'] / first:.2f}   (first "
                f"pass {found['first_mib']:.0f} MiB and {found['first_pass']:.0f} s; each router "
                f"{found['router']:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
