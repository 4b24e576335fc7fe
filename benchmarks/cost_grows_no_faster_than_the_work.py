"""Claim: the cost of a scan grows no faster than tokens, experts, width or layers, and its memory
with none but the sums of experts.

Each curve varies one size and keeps the others; each point is a process of its own. Prints
processor seconds after a first scan that compiles, peak memory beside the tokens, and the slope of
log seconds over log size from the point before: 1 is in proportion, less is a share that does not
grow. Every reduction that looks at all tokens is on; layers are those of a checkpoint, with tokens.

    python benchmarks/cost_grows_no_faster_than_the_work.py            up to 10^6 tokens
    python benchmarks/cost_grows_no_faster_than_the_work.py --all      up to 10^7

Targets (docs/benchmarks.md): slopes <= 1.1; tokens, 10^6 over 10^5, memory <= 1.3.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

BUFFER_TOKENS = 8192


@dataclass(frozen=True)
class Point:
    """The sizes of one scan; without layers a router alone."""

    tokens: int = 16_384
    experts: int = 64
    hidden: int = 1024
    layers: int = 0


#: The size that a curve varies: its values, and the other sizes.
CURVES: dict[str, tuple[tuple[int, ...], Point]] = {
    "tokens": ((10**4, 10**5, 10**6, 10**7), Point(hidden=256)),
    "experts": ((8, 32, 128, 512), Point()),
    "hidden": ((1024, 2048, 4096, 8192, 16_384), Point(tokens=8192)),
    "layers": ((1, 4, 16, 64), Point(tokens=2048, hidden=128)),
}


def _scanned_router(point: Point) -> float:
    """Processor seconds of a second scan of one router."""
    import numpy as np
    from scan_costs_little_more_than_its_matmul import everything_of, gaussian_router

    from moegeom.core.tokens import TILE
    from moegeom.engine.loop import Pace, scan_router
    from moegeom.engine.plan import batch_tokens
    from moegeom.engine.prepared import prepare
    from moegeom.engine.task import Task
    from moegeom.kernels.table import load_kernels
    from tests.array_source import ArraySource

    router = gaussian_router(point.hidden, point.experts, min(8, point.experts // 2))
    shape = (BUFFER_TOKENS, point.hidden)
    values = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    kept = everything_of(router, ArraySource({router.name: values}))

    def scan(num_tokens: int) -> None:
        source = ArraySource({router.name: values}, num_tokens)
        task = Task(prepare(router), source, load_kernels("cpu"), kept, math.sqrt(point.hidden))
        scan_router(task, range(-(-num_tokens // TILE)), Pace(batch_tokens(point.hidden), 1))

    scan(TILE)
    started = time.process_time()
    scan(point.tokens)
    return time.process_time() - started


def _scanned_layers(point: Point) -> float:
    """Processor seconds of a second scan of a checkpoint."""
    from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
    from moegeom.engine.request import ScanRequest
    from moegeom.pipeline import scan

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = SyntheticModel(
            hidden=point.hidden, experts=point.experts, top_k=8, layers=point.layers
        )
        write_checkpoint(folder / "model", model)
        write_tokens(folder / "rec", model, point.tokens)
        request = ScanRequest(str(folder / "model"), tokens=str(folder / "rec"))
        scan(replace(request, layers="0", out=folder / "first"))
        started = time.process_time()
        scan(replace(request, out=folder / "out"))
        return time.process_time() - started


def _measured(point: Point) -> dict[str, float]:
    seconds = _scanned_layers(point) if point.layers else _scanned_router(point)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    held = 0.0 if point.layers else 4 * BUFFER_TOKENS * point.hidden / 2**20
    return {"seconds": seconds, "peak_mib": peak - held}


def main() -> None:
    if sys.argv[1:2] == ["point"]:
        print(json.dumps(_measured(Point(**json.loads(sys.argv[2])))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    most = 10**7 if parser.parse_args().all else 10**6
    for size, (values, others) in CURVES.items():
        print(f"{size}, others {others}")
        before: tuple[int, float] | None = None
        for value in values:
            if value > most:
                continue
            given = json.dumps(asdict(replace(others, **{size: value})))
            command = [sys.executable, __file__, "point", given]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(ran.stdout)
            slope = ""
            if before is not None:
                steepness = math.log(found["seconds"] / before[1]) / math.log(value / before[0])
                slope = f"slope {steepness:.2f}"
            before = value, found["seconds"]
            print(
                f"{value:>12,} {found['seconds']:8.2f} s {found['peak_mib']:6.0f} MiB  {slope}",
                flush=True,
            )


if __name__ == "__main__":
    main()
