"""Claim: a boundary report with three arithmetics costs a small multiple of the bare scan.

Prints, for each shape, the time per token of ``measure_boundary`` with three arithmetics and of
``scan`` with none, on the same tokens, their ratio, and what one arithmetic adds, over the bare
float32 product of these tokens and weights; so much is (report - scan) / 3 / product. The median
of several rounds in alternation, in processor time of one worker, after a round that compiles.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.synthetic import SyntheticModel, synthetic_inputs, write_checkpoint
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import Router
from moegeom.engine.request import ScanRequest
from moegeom.pipeline import scan
from moegeom.router.load import load_routers
from moegeom.studies.boundary.study import BoundaryRequest, measure_boundary
from tests.array_source import ArraySource

#: (hidden, experts, top_k, tokens).
SHAPES = ((2048, 64, 8, 65_536), (7168, 256, 8, 16_384))

ARITHMETICS = ("tf32", "bf16", "bf16-logits")

#: Tokens held in memory: later ones are these again.
HELD = 16_384


def _seconds(work: Callable[[], object]) -> float:
    """Processor seconds of all threads: a busy machine delays work but does not add to it."""
    started = time.process_time()
    work()
    return time.process_time() - started


def _tokens(model: SyntheticModel, router: Router, tokens: int) -> np.ndarray:
    inputs = synthetic_inputs(model, router.layer, min(tokens, HELD))
    return inputs if router.gain is None else inputs * router.gain.astype(np.float32)


def _product(values: np.ndarray, weight: np.ndarray, tokens: int) -> None:
    columns = np.ascontiguousarray(weight.T)
    for _ in range(tokens // len(values)):
        values @ columns


def _measure(shape: tuple[int, int, int, int], repeats: int, folder: Path) -> str:
    hidden, experts, top_k, tokens = shape
    model = SyntheticModel(hidden=hidden, experts=experts, top_k=top_k, layers=1)
    checkpoint = str(write_checkpoint(folder / "model", model))
    (router,) = load_routers(open_checkpoint(checkpoint)).routers
    values = _tokens(model, router, tokens)
    source = ArraySource({router.name: values}, num_tokens=tokens)
    number = iter(range(10**6))

    def bare() -> None:
        out = folder / f"out-{next(number)}"
        scan(ScanRequest(checkpoint=checkpoint, out=out, tokens=source, num_workers=1))

    def report() -> None:
        out = folder / f"out-{next(number)}"
        measure_boundary(
            BoundaryRequest(
                checkpoint=checkpoint,
                out=out,
                tokens=source,
                num_workers=1,
                arithmetics=ARITHMETICS,
            )
        )

    work = {
        "scan": bare,
        "report": report,
        "product": lambda: _product(values, router.weight.astype(np.float32), tokens),
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    with threadpool_limits(1, user_api="blas"):
        for _ in range(repeats + 1):
            for name, run in work.items():
                taken[name].append(_seconds(run))
    rounds = {name: np.array(seconds[1:]) for name, seconds in taken.items()}
    scanned, reported, product = (float(np.median(rounds[name])) for name in work)
    ratios = rounds["report"] / rounds["scan"]
    return (
        f"({hidden}, {experts}, {top_k}), {tokens} tokens: "
        f"report {1e6 * reported / tokens:.2f} us/token, scan {1e6 * scanned / tokens:.2f}, "
        f"ratio {np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f}); "
        f"each arithmetic {(reported - scanned) / len(ARITHMETICS) / product:.2f} products of "
        f"{1e6 * product / tokens:.2f} us, the scan {scanned / product:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            print(_measure(shape, repeats, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
