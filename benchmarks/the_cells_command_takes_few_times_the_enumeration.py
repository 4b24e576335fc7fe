"""Claim: `research cells` takes few times as long as the enumeration of the cells within it.

Routers are z = W x + b with standard normal numbers, written (E, k, d), or z = W x. For each, in
one process, on one thread, in processor time, the enumeration and the whole command by turns,
without and with ``--out`` (two tables, the distance of every facet among them): seconds of the
enumeration, and how many times that the command takes, for each repeat. What is compiled has been
before.

Targets (docs/benchmarks.md): 4 without ``--out`` and with it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import moegeom as mg
from moegeom.routing_cells.walk.enumeration import Enumeration, enumerate_cells

#: (E, k, d), and whether the router has a bias.
ROUTERS = (((64, 8, 3), True), ((64, 6, 4), True), ((64, 4, 6), True), ((64, 4, 6), False))


def seconds(work: Callable[[], Any]) -> float:
    """Processor time, that of threads included."""
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(folder: Path, shape: tuple[int, int, int], has_bias: bool, repeats: int) -> None:
    experts, k, dims = shape
    random = np.random.default_rng(0)
    weight, drawn = random.standard_normal((experts, dims)), random.standard_normal(experts)
    arrays = {"weight": weight, "bias": drawn} if has_bias else {"weight": weight}
    np.savez(folder / "router.npz", **arrays)
    bias = arrays.get("bias")

    def command(out: Path | None) -> None:
        mg.cells(
            weights=folder / "router.npz",
            top_k=k,
            out=out,
            overwrite=out is not None,
            num_workers=1,
        )

    found = enumerate_cells(weight, bias, k)
    assert isinstance(found, Enumeration)
    command(folder / "out")
    name = f"({experts}, {k}, {dims}){'' if has_bias else ' without bias'}"
    print(f"{name}: {len(found.expert_set):,} cells, {len(found.facets):,} facets")
    for _ in range(repeats):
        own = seconds(lambda: enumerate_cells(weight, bias, k))
        screen, tables = seconds(lambda: command(None)), seconds(lambda: command(folder / "out"))
        print(
            f"  enumeration {own:.3f} s; command {screen / own:.2f} times that, "
            f"with --out {tables / own:.2f} times"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with threadpool_limits(1), tempfile.TemporaryDirectory() as folder:
        for shape, has_bias in ROUTERS:
            measure(Path(folder), shape, has_bias, repeats)


if __name__ == "__main__":
    main()
