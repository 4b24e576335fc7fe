"""Claim: the 24 largest logits give the exact boundary distance of 99.9 % of the tokens or more.

For each router and number m of recorded logits, prints

- the share of tokens whose distance is exact (target: 0.999 at m = 24 for rows of like lengths),
- of the others, the median and the largest ratio of upper to lower bound,
- how many exact distances differ from the one of all float32 logits (target: 0),
- the largest difference of an exact distance from that of float64 logits, over its bound: what
  rounding the two logits of a boundary can do, divided by the row distance (target: at most 1),
- processor time over that of the distance from all logits.

Synthetic routers have rows of random direction and lengths between 0.5 and 1.5 (``random``), rows
that lean by a cosine of one half towards the others of a cluster of eight (``clusters``), or
random ones with lengths between 0.1 and 10 (``lengths``, a hard case: a long row that is not
recorded may be near); tokens are N(0, I). The samples are the affine routers of
sample_ckpts with the inputs that were recorded from them: of the share the least, the median and
the largest over routers, of the rest the worst.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from moegeom.checkpoint.open import open_checkpoint
from moegeom.engine.choice import tile_logits
from moegeom.geometry.boundary.linear import row_distances
from moegeom.geometry.rounding import logit_error_bound
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens

#: (hidden size, experts, k, tokens)
SHAPES = ((2048, 128, 8, 16384), (7168, 256, 8, 8192), (2880, 128, 4, 16384), (2048, 64, 8, 16384))
NUM_LOGITS = (24, 16, 12)
NUM_LOGITS_OF_SAMPLES = (8, 6)

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"


@dataclass(frozen=True)
class Case:
    """An affine router without biases, and router inputs."""

    name: str
    weight: np.ndarray
    values: np.ndarray
    top_k: int


def random_rows(random: np.random.Generator, experts: int, hidden: int) -> np.ndarray:
    """Random directions, lengths between 0.5 and 1.5."""
    rows = random.standard_normal((experts, hidden)) / np.sqrt(hidden)
    return random.uniform(0.5, 1.5, (experts, 1)) * rows


def clustered_rows(random: np.random.Generator, experts: int, hidden: int) -> np.ndarray:
    """Cosine of one half, about, with every row of a cluster of eight."""
    centres = random.standard_normal((experts // 8, hidden))
    rows = random.standard_normal((experts, hidden)) + np.repeat(centres, 8, axis=0)
    rows /= np.sqrt(2 * hidden)
    return random.uniform(0.5, 1.5, (experts, 1)) * rows


def rows_of_all_lengths(random: np.random.Generator, experts: int, hidden: int) -> np.ndarray:
    """Random directions, the logarithm of the length uniform."""
    rows = random.standard_normal((experts, hidden)) / np.sqrt(hidden)
    return 10.0 ** random.uniform(-1.0, 1.0, (experts, 1)) * rows


ROWS = {"random": random_rows, "clusters": clustered_rows, "lengths": rows_of_all_lengths}


def synthetic() -> Iterator[Case]:
    """Full-size routers on synthetic tokens."""
    for hidden, experts, top_k, tokens in SHAPES:
        for kind, rows in ROWS.items():
            random = np.random.default_rng(0)
            weight = rows(random, experts, hidden).astype(np.float32)
            values = random.standard_normal((tokens, hidden), dtype=np.float32)
            yield Case(f"({hidden}, {experts}, {top_k}) {kind}", weight, values, top_k)


def samples() -> Iterator[Case]:
    """Every affine router of the samples, on the inputs that were recorded with it."""
    for recording in sorted(SAMPLES.glob("*/rec/*")):
        checkpoint = recording.parents[1] / recording.name
        for router in load_routers(open_checkpoint(str(checkpoint))).routers:
            if not router.rule.is_affine or router.affine_bias is not None:
                continue
            source = open_tokens(str(recording), None, None, (router.name,))
            values = np.array(source.read_values(router.name, 0, source.facts.num_tokens))
            name = f"{checkpoint.parent.name}/{checkpoint.name} {router.name}"
            weight = router.weight.astype(np.float32)
            yield Case(name, weight, values, router.rule.top_k)


@dataclass(frozen=True)
class Found:
    """Figures of one router and one number of logits."""

    num_tokens: int
    exact_share: float
    median_ratio: float
    largest_ratio: float
    num_different: int
    over_bound: float
    over_time: float


def measured(case: Case, wanted: tuple[int, ...]) -> list[Found]:
    """One for each number of logits."""
    kernels, rows = load_kernels("cpu"), row_distances(case.weight)
    logits = tile_logits(case.values, np.ascontiguousarray(case.weight.T), None)
    chosen, margin = kernels["top_k"](logits, case.top_k)
    bare, (full, _) = timed(
        lambda: kernels["boundary_distance"](logits, chosen, margin, rows, True)
    )
    in_float64 = case.values.astype(np.float64) @ case.weight.T.astype(np.float64)
    true_choice, true_margin = kernels["top_k"](in_float64, case.top_k)
    true, true_pair = kernels["boundary_distance"](in_float64, true_choice, true_margin, rows, True)
    # logits that rounding brought into another order are on the two sides of one boundary
    same = kernels["same_set"](chosen, true_choice)
    # the bound is for two float32 engines: half of it for each of the two logits of a boundary
    longest = float(np.linalg.norm(case.weight, axis=1).max())
    norm = kernels["input_norm"](case.values)
    error = logit_error_bound(norm, case.values.shape[1], longest)
    order = np.argsort(-logits, axis=1, kind="stable").astype(np.int32)
    found = []
    for m in wanted:
        expert = np.ascontiguousarray(order[:, :m])
        top = np.take_along_axis(logits, expert, axis=1)
        arguments = (top, expert, chosen, margin, rows)
        seconds, (lower, upper, pair) = timed(
            lambda arguments=arguments: kernels["distance_bracket"](*arguments)
        )
        exact = lower == upper
        ratio = upper[~exact] / lower[~exact] if not exact.all() else np.ones(1)
        token = np.flatnonzero(exact & same & (pair[:, 0] >= 0))
        inverse = [rows.inverse[out, into] for out, into in (pair[token].T, true_pair[token].T)]
        bound = error[token] * np.maximum(*inverse)
        found.append(
            Found(
                num_tokens=len(exact),
                exact_share=float(exact.mean()),
                median_ratio=float(np.median(ratio)),
                largest_ratio=float(ratio.max()),
                num_different=int((lower[exact] != full[exact]).sum()),
                over_bound=float((np.abs(lower[token] - true[token]) / bound).max(initial=0.0)),
                over_time=seconds / bare,
            )
        )
    return found


def timed(work: Callable[[], tuple], repeats: int = 5) -> tuple[float, tuple]:
    """Least processor time of several repeats, and the result."""
    best, found = np.inf, work()
    for _ in range(repeats):
        started = time.process_time()
        found = work()
        best = min(best, time.process_time() - started)
    return best, found


def line(name: str, m: int, share: str, worst: Found) -> str:
    """One line of the output."""
    return (
        f"{name}, m = {m}: exact {share}; upper / lower of the others median "
        f"{worst.median_ratio:.3f}, largest {worst.largest_ratio:.2f}; exact ones that differ "
        f"{worst.num_different}; from float64 {worst.over_bound:.2g} of the bound; "
        f"time {worst.over_time:.2f}"
    )


def worst_of(found: list[Found]) -> Found:
    """The largest of each figure, the least share."""
    worst = {name: max(getattr(one, name) for one in found) for name in vars(found[0])}
    return Found(**worst | {"exact_share": min(one.exact_share for one in found)})


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with threadpool_limits(1, user_api="blas"):
        for case in synthetic():
            for m, found in zip(NUM_LOGITS, measured(case, NUM_LOGITS), strict=True):
                share = f"{found.exact_share:.5f} of {found.num_tokens}"
                print(line(case.name, m, share, found), flush=True)
        by_model: dict[str, list[list[Found]]] = {}
        for case in samples():
            experts, hidden = case.weight.shape
            model = f"{case.name.partition('/')[0]} ({hidden}, {experts}, {case.top_k})"
            by_model.setdefault(model, []).append(measured(case, NUM_LOGITS_OF_SAMPLES))
    for model, routers in by_model.items():
        for m, found in zip(NUM_LOGITS_OF_SAMPLES, zip(*routers, strict=True), strict=True):
            shares = np.quantile([one.exact_share for one in found], (0.0, 0.5, 1.0))
            share = " / ".join(f"{value:.4f}" for value in shares)
            name = f"{model}, {len(found)} routers"
            print(line(name, m, share, worst_of(list(found))))


if __name__ == "__main__":
    main()
