"""Claim: a scan on the CPU costs little more than the matrix product that it cannot avoid.

Prints, for each shape, the time of a scan over that of the bare float32 product of the same tokens
and weights, both on one thread in this process, in alternation. The yardstick is the faster of
NumPy's and (if installed) torch's product, in one call over all tokens.

Targets (docs/benchmarks.md): load + margin + distance <= 1.15 and everything <= 1.5 at
(2048, 64, 8); <= 1.08 and 1.2 at (7168, 256, 8); everything <= 1.3 at (2880, 128, 4). "Everything"
is what looks at every token: reductions that a sample of 4096 tokens is enough for are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.loop import Pace, scan_router
from moegeom.engine.plan import batch_tokens
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.task import Task
from moegeom.kernels.reduction import REDUCTIONS
from moegeom.kernels.table import load_kernels
from tests.array_source import ArraySource

SHAPES = ((2048, 64, 8, 16384), (7168, 256, 8, 4096), (2880, 128, 4, 8192))
FIRST = ("token_counts", "expert_counts", "margin_histogram", "distance_histogram")


def gaussian_router(hidden: int, experts: int, top_k: int) -> Router:
    """A router with softmax whose logits of inputs of rms 1 have about unit size."""
    weight = np.random.default_rng(0).standard_normal((experts, hidden), dtype=np.float32)
    rule = Rule(top_k, "softmax", Weights("scores"))
    origin = Provenance("synthetic", (), "", "F32")
    return Router("text/0", "text", 0, weight / np.float32(np.sqrt(hidden)), rule, origin)


def everything_of(router: Router, source: TokenSource) -> tuple[str, ...]:
    """Reductions that look at every token, but for those of what the source does not give."""
    # what another choice changes, or nobody recorded, is not of the scan
    not_there = {"flip", "noise", "jumps", *unavailable(router, source.facts)}
    return tuple(
        reduction.name
        for reduction in REDUCTIONS.all()
        if not reduction.use.is_sampled and not not_there & set(reduction.needs)
    )


def _products(values: np.ndarray, weight: np.ndarray) -> dict[str, Callable[[], object]]:
    products: dict[str, Callable[[], object]] = {"numpy": lambda: values @ weight.T}
    try:
        import torch
    except ImportError:
        return products
    torch.set_num_threads(1)
    left, right = torch.from_numpy(values), torch.from_numpy(weight.T.copy())
    return products | {"torch": lambda: left @ right}


def _seconds(work: Callable[[], object]) -> float:
    """Processor seconds of all threads: a busy machine delays work but does not add to it."""
    started = time.process_time()
    work()
    return time.process_time() - started


def _measure(hidden: int, experts: int, top_k: int, tokens: int, repeats: int) -> str:
    router = gaussian_router(hidden, experts, top_k)
    values = np.random.default_rng(1).standard_normal((tokens, hidden), dtype=np.float32)
    source = ArraySource({router.name: values})
    kernels, pace = load_kernels("cpu"), Pace(batch_tokens(hidden), 1)

    def scan(reductions: tuple[str, ...]) -> Callable[[], object]:
        # outlier tokens are told by the lengths of inputs, which only some figures need
        needs_norm = any("input_norm" in REDUCTIONS[name].needs for name in reductions)
        typical = float(np.sqrt(hidden)) if needs_norm else None
        task = Task(prepare(router), source, kernels, reductions, typical)
        return lambda: scan_router(task, range(tokens // TILE), pace)

    work = _products(values, router.weight) | {
        "load + margin + distance": scan(FIRST),
        "everything": scan(everything_of(router, source)),
    }
    best = dict.fromkeys(work, np.inf)
    with threadpool_limits(1, user_api="blas"):
        for _ in range(repeats):
            for name, run in work.items():
                best[name] = min(best[name], _seconds(run))
    bare = min(best["numpy"], best.get("torch", np.inf))
    rate = 2e-9 * tokens * hidden * experts / bare
    ratios = ", ".join(f"{name} {best[name] / bare:.3f}" for name in list(work)[-2:])
    return (
        f"({hidden}, {experts}, {top_k}): {ratios}   bare {1e9 * bare / tokens:.0f} ns/token, "
        f"{rate:.1f} GFLOP/s (numpy {best['numpy'] / bare:.2f}, "
        f"torch {best.get('torch', np.nan) / bare:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    blas = [f"{lib['internal_api']} {lib.get('architecture')}" for lib in threadpool_info()]
    print(f"libraries: {', '.join(blas)}")
    for hidden, experts, top_k, tokens in SHAPES:
        print(_measure(hidden, experts, top_k, tokens, repeats))


if __name__ == "__main__":
    main()
