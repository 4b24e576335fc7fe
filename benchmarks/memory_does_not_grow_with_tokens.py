"""Claim: the memory of a scan does not grow with the number of tokens.

Scans 10^5 to 10^7 tokens with every reduction, each in a process of its own, and prints the peak
resident memory and its ratio to the first. Two streams: the same 4096 tokens over and over, and
tokens that are all new, where nearly each one brings an expert set never seen before (the hard
case: expert sets are counted exactly up to 2^20 entries, then on a hash sample, so the table fills
up once, within the first few million tokens).

Targets (docs/benchmarks.md): repeated, 10^7 over 10^5 <= 1.05; new, 10^7 over 4 x 10^6 <= 1.05.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

HIDDEN, EXPERTS, TOP_K = 64, 64, 8
NUM_TOKENS = (10**5, 10**6, 4 * 10**6, 10**7)
STREAMS = ("repeated", "new")
BUFFER_TOKENS = 8192


def _scan(stream: str, num_tokens: int) -> dict[str, float]:
    """One scan in this process; peak memory before and after it."""
    import numpy as np
    from scan_costs_little_more_than_its_matmul import everything_of, gaussian_router

    from moegeom.core.tokens import TILE
    from moegeom.engine.loop import Pace, scan_router
    from moegeom.engine.plan import batch_tokens
    from moegeom.engine.prepared import prepare
    from moegeom.engine.task import Task
    from moegeom.kernels.table import load_kernels
    from moegeom.tokens.memory import IsotropicRmsPrior
    from tests.array_source import ArraySource

    router = gaussian_router(HIDDEN, EXPERTS, TOP_K)
    kernels = load_kernels("cpu")
    if stream == "new":
        source = IsotropicRmsPrior(((router.name, None, HIDDEN),), num_tokens, 0)
    else:
        values = np.random.default_rng(1).standard_normal((BUFFER_TOKENS, HIDDEN), np.float32)
        chosen = np.argsort(-(values @ router.weight.T), axis=1, kind="stable")[:, :TOP_K]
        recorded = {router.name: chosen.astype(np.int32)}
        source = ArraySource({router.name: values}, num_tokens, chosen=recorded)
    task = Task(prepare(router), source, kernels, everything_of(router, source))
    tiles = range(-(-num_tokens // TILE))
    progress = scan_router(task, tiles, Pace(batch_tokens(HIDDEN), 1))
    return {
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "expert_sets": len(progress.states["expert_sets"]["count"]),
        "seconds": sum(os.times()[:2]),
    }


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(_scan(sys.argv[1], int(sys.argv[2]))))
        return
    print(f"({HIDDEN}, {EXPERTS}, {TOP_K}), all reductions, one worker")
    for stream in STREAMS:
        first = 0.0
        for num_tokens in NUM_TOKENS:
            command = [sys.executable, __file__, stream, str(num_tokens)]
            finished = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(finished.stdout)
            first = first or found["peak_mib"]
            print(
                f"{stream:>8} {num_tokens:>10,} tokens: peak {found['peak_mib']:6.0f} MiB, ratio "
                f"{found['peak_mib'] / first:.2f}   ({found['expert_sets']:,} expert sets held, "
                f"{found['seconds']:.0f} s of processor time)",
                flush=True,
            )


if __name__ == "__main__":
    main()
