"""Claim: a token that is proved to keep its experts under an arithmetic never flips.

Prints, for each shape, the trials (a token under one arithmetic, added up in an order drawn anew
for each tile), how many tokens were proved to stay, and how many of those flipped: 0, or a bound
is wrong. Tokens are normal, some of them sinks of a thousand times the length; rules are softmax,
sigmoid with selection bias, and the same in groups. Then, per kind of disturbance, the share that
is proved (targets: order of summation >= 99 %, input rounding at 1 - 1e-6 >= 50 %).
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE
from moegeom.engine.flipping import ReferenceChoice, flip_of
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.rounding import UNIT_BFLOAT16, rounding_sigmas
from moegeom.geometry.selection import route
from moegeom.kernels.table import load_kernels
from moegeom.metrics.flips import sigmas_needed
from moegeom.variants.emulated import Emulated, arithmetic, arithmetic_names, emulate

#: (hidden, experts, top_k, share of the trials).
SHAPES = ((64, 16, 4, 0.97), (2048, 64, 8, 0.028), (7168, 256, 8, 0.002))

#: Orders whose proved share is printed by itself.
ORDERS = ("float32-blocks", "float32-pairwise", "float32-sequential", "float32-any-order")


def _rules(experts: int, top_k: int) -> tuple[Rule, ...]:
    groups = GroupMask(max(experts // 8, 2), max(experts // 16, 1), "top2_sum", -np.inf)
    weights = Weights("scores", True)
    return (
        Rule(top_k, "softmax", weights),
        Rule(top_k, "sigmoid", weights, has_selection_bias=True),
        Rule(top_k, "sigmoid", weights, has_selection_bias=True, groups=groups),
    )


def _router(hidden: int, experts: int, rule: Rule) -> Router:
    random = np.random.default_rng(0)
    rows = random.standard_normal((experts, hidden)) / np.sqrt(hidden)
    bias = (0.1 * random.standard_normal(experts)).astype(np.float32)
    origin = Provenance("synthetic", (), "", "F32")
    return Router(
        "text/0",
        "text",
        0,
        rows.astype(np.float32),
        rule,
        origin,
        selection_bias=bias if rule.has_selection_bias else None,
    )


def _in_another_order(
    emulated: Emulated, values: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Chosen experts when blocks of 16 products are added in an order drawn at random."""
    kernels, rule = load_kernels("cpu"), emulated.router.rule
    inputs, width = emulated.inputs(values), values.shape[1]
    order = random.permutation(width)
    logits = np.zeros((len(values), emulated.router.num_experts), np.float32)
    step = max(16, width // 64)  # runs of blocks at once, so that large shapes end
    for start in range(0, width, step):
        block = order[start : start + step]
        logits += inputs[:, block] @ emulated.columns[block]
    compared = emulated.compared(logits)
    if rule.groups is not None:
        compared, _ = kernels["group_mask"](compared, rule.groups)
    return kernels["top_k"](compared, rule.top_k)[0]


def _trials(
    hidden: int, experts: int, top_k: int, wanted: int, seed: int
) -> tuple[int, int, int, dict[str, list[int]]]:
    """Trials, proved tokens, proved tokens that flipped, and (proved, tokens) by arithmetic."""
    kernels, random = load_kernels("cpu"), np.random.default_rng(seed)
    done = proved = flipped = 0
    by_name: dict[str, list[int]] = {}
    routers = [_router(hidden, experts, rule) for rule in _rules(experts, top_k)]
    emulations = [
        (router, name, emulate(router, arithmetic(name)))
        for router in routers
        for name in arithmetic_names()
    ]
    with threadpool_limits(1):
        while done < wanted:
            values = random.standard_normal((TILE, hidden), dtype=np.float32)
            values[::101] *= 1000.0
            for router, name, emulated in emulations:
                logits = values @ router.weight.T
                found = route(logits, router.rule, router.selection_bias)
                reference = ReferenceChoice(
                    values, logits, found.chosen, found.margin, found.weights, None
                )
                certain = flip_of(emulated, reference, kernels).proved
                chosen = _in_another_order(emulated, values[certain], random)
                differs = (np.sort(chosen) != np.sort(found.chosen[certain])).any(axis=1)
                done += TILE
                proved += int(certain.sum())
                flipped += int(differs.sum())
                if router.rule.is_affine:
                    counts = by_name.setdefault(name, [0, 0])
                    counts[0] += int(certain.sum())
                    counts[1] += TILE
    return done, proved, flipped, by_name


def _input_rounding(hidden: int, experts: int, top_k: int) -> tuple[float, float]:
    """Shares that rounding the input cannot flip: but for 1e-6, and in the worst case."""
    router = _router(hidden, experts, _rules(experts, top_k)[0])
    values = np.random.default_rng(5).standard_normal((TILE, hidden), dtype=np.float32)
    logits = values @ router.weight.T
    chosen = route(logits, router.rule).chosen
    sigmas = rounding_sigmas(values, logits, chosen, router.weight)
    kernels = load_kernels("cpu")
    margin = kernels["top_k"](logits, top_k)[1]
    rows = row_distances(router.weight)
    distance, _ = kernels["boundary_distance"](logits, chosen, margin, rows, False)
    worst = distance > UNIT_BFLOAT16 * np.linalg.norm(values, axis=1)
    return float((sigmas > sigmas_needed(experts, top_k)).mean()), float(worst.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=float, default=1e8)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes) as pool:
        for hidden, experts, top_k, share in SHAPES:
            started = time.perf_counter()
            each = int(arguments.trials * share / arguments.processes)
            jobs = [
                pool.submit(_trials, hidden, experts, top_k, each, seed)
                for seed in range(arguments.processes)
            ]
            found = [job.result() for job in jobs]
            done, proved, flipped = (sum(part[i] for part in found) for i in range(3))
            print(
                f"({hidden}, {experts}, {top_k}): {done:.3g} trials, {proved:.3g} proved to stay, "
                f"{flipped} of them flipped ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
            for name in ORDERS:
                stay, tokens = (sum(part[3][name][i] for part in found) for i in (0, 1))
                print(f"  {name}: {100 * stay / tokens:.3f} % proved")
            likely, worst = _input_rounding(hidden, experts, top_k)
            print(
                f"  input rounded to bfloat16: {100 * likely:.1f} % stay with probability "
                f"1 - 1e-6, {100 * worst:.1f} % in the worst case",
                flush=True,
            )


if __name__ == "__main__":
    main()
