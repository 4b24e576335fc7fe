"""Claim: a GPU changes how fast an answer comes, and not what it means.

Runs on a device, without pytest, what the tests run on the emulated one:

- every kernel of the table that has a ``cuda`` backend against the reference, over ties, zeros of
  both signs, equal rows, huge and denormal values, non-contiguous arrays, k = E and one token;
- whole scans against the processor's: recorded inputs in float32 and bfloat16, rows in one term and
  in three, straight, curved and grouped rules, non-finite tokens, batches cut at other places.

A kernel must keep its stated tolerance. Of a scan every token must choose the same experts, unless
its margin is within the float bound; such tokens are counted. Needs a GPU, CuPy and pytest. The
processor's kernels need Numba; ``--kernels reference`` does without it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gpu_results import FOLDER, device_facts, write_results

from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.engine.devices.cuda import scan_on_devices
from moegeom.engine.devices.device_router import kept_on_device
from moegeom.engine.loop import Hooks, Pace, Progress, scan_router
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.cuda.cupy_device import open_device
from moegeom.kernels.table import KERNELS, load_kernels
from tests.array_source import ArraySource
from tests.parity.test_kernels import ARGUMENTS, KINDS, SHAPES, Case, assert_agree, run

COUNTED = (
    "token_counts",
    "expert_counts",
    "expert_pairs",
    "margin_histogram",
    "effective_margin_histogram",
    "ambiguity",
)
OF_A_TOKEN = ("chosen", "margin", "group_margin", "float_bound")
OF_BOUNDARIES = ("distance_histogram", "relative_distance_histogram", "noise_sigmas_histogram")


def _kernel_row(kernel: Any) -> dict[str, Any]:
    """One kernel over every kind of values; the first difference beyond its tolerance is named."""
    cases, wrong = 0, ""
    for values in KINDS:
        for shape in SHAPES:
            for arguments in ARGUMENTS[kernel.name](Case(*shape, values)):
                found = run("cuda", kernel.name, arguments)
                expected = run("reference", kernel.name, arguments)
                scale = np.abs(arguments[2]).max() if kernel.name == "selection_scores" else 0.0
                cases += 1
                try:
                    for ours, theirs in zip(found, expected, strict=True):
                        assert_agree(ours, theirs, kernel.rtol, max(float(scale), 1e-290))
                except AssertionError as error:
                    wrong = wrong or f"{values} {shape}: {str(error)[:500]}"
    return {"kernel": kernel.name, "rtol": kernel.rtol, "cases": cases, "difference": wrong}


def _router(experts: int, top_k: int, score: str, biased: bool, groups: GroupMask | None) -> Router:
    random = np.random.default_rng([experts, top_k])
    weight = (random.standard_normal((experts, 512)) / 16.0).astype(np.float32)
    bias = 0.1 * random.standard_normal(experts) if biased else None
    rule = Rule(top_k, score, Weights("scores"), biased, groups=groups)
    origin = Provenance("synthetic", (), "", "F32")
    return Router("text/0", "text", 0, weight, rule, origin, selection_bias=bias)


def _scans() -> list[tuple[str, Router, type]]:
    """Name, router and dtype of the inputs."""
    v3, v2 = GroupMask(8, 4, "top2_sum", -np.inf), GroupMask(8, 3, "max", 0.0)
    routers = {
        "softmax 64/8": _router(64, 8, "softmax", False, None),
        "softmax 60/4": _router(60, 4, "softmax", False, None),
        "softmax 16/16": _router(16, 16, "softmax", False, None),
        "sigmoid + bias 256/8": _router(256, 8, "sigmoid", True, None),
        "sigmoid + bias, groups 256/8": _router(256, 8, "sigmoid", True, v3),
        "softmax, groups 160/6": _router(160, 6, "softmax", False, v2),
    }
    found = [
        (f"{name}, {np.dtype(dtype).name} inputs", router, dtype)
        for name, router in routers.items()
        for dtype in (np.float32, ml_dtypes.bfloat16)
    ]
    exact = routers["softmax 64/8"]
    rows = exact.weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    return [*found, ("bfloat16 rows", replace(exact, weight=rows), ml_dtypes.bfloat16)]


def _scan_row(name: str, router: Router, dtype: type, kernels: str) -> dict[str, Any]:
    """Both engines on the same inputs: tokens that chose otherwise, and how ambiguous they were."""
    tokens = 50_000
    values = np.random.default_rng(3).standard_normal((tokens, router.hidden_size)).astype(dtype)
    values[[5, 777, 40_000], 3] = [np.nan, np.inf, -np.inf]
    values[100:200] = values[100]  # equal tokens, which must choose equally
    values[300] = 0
    source = ArraySource({router.name: values})
    names = COUNTED + (OF_BOUNDARIES if router.rule.is_affine else ())
    root = float(np.sqrt(router.hidden_size))
    task = Task(prepare(router), source, load_kernels(kernels), names, root)
    tiles, device = range(-(-tokens // 1024)), open_device(0)

    def kept(rows: list[dict[str, Any]]) -> Hooks:
        return Hooks(rows=lambda b: {n: getattr(b, n) for n in OF_A_TOKEN}, written=rows.append)

    def joined(rows: list[dict[str, Any]], column: str) -> np.ndarray:
        return np.concatenate([row[column] for row in rows])

    theirs: list[dict[str, Any]] = []
    ours: list[dict[str, Any]] = []
    expected = scan_router(task, tiles, Pace(8192, 8), True, kept(theirs))
    pace, on = Pace(8192, 8), {"devices": [device], "batch_tokens": 8192}
    found = scan_on_devices(task, tiles, pace, True, kept(ours), **on)
    again = scan_on_devices(task, tiles, pace, True, **on)
    chosen = [np.sort(joined(rows, "chosen"), axis=1) for rows in (theirs, ours)]
    differs = (chosen[0] != chosen[1]).any(axis=1)
    margin = np.minimum(joined(theirs, "margin"), joined(ours, "margin"))
    effective_margin = margin
    if router.rule.groups is not None:
        effective_margin = np.minimum(margin, joined(theirs, "group_margin") / 2.0)
    bound = joined(theirs, "float_bound")
    return {
        "scan": name,
        "tokens": tokens,
        "on_device": kept_on_device(task),
        "differ": int(differs.sum()),
        "differ_beyond_bound": int((differs & (effective_margin > bound)).sum()),
        "ambiguous": int((effective_margin <= bound).sum()),
        "largest_margin_difference_over_bound": float(
            (np.abs(joined(theirs, "margin") - joined(ours, "margin")) / bound)[~differs].max()
        )
        if router.rule.top_k < router.num_experts
        else 0.0,
        "lost_equal": bool(expected.non_finite == found.non_finite),
        "repeat_equal": _equal(found, again),
    }


def _equal(first: Progress, second: Progress) -> bool:
    """Every counter of two scans, bit for bit."""
    return all(
        np.array_equal(first.states[name][key], second.states[name][key])
        for name in first.states
        for key in first.states[name]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True, help="of the sources that are run")
    parser.add_argument("--out", type=Path, default=FOLDER / "gpu_means_the_same.json")
    parser.add_argument("--kernels", default="cpu", choices=("cpu", "reference"))
    asked = parser.parse_args()
    facts = device_facts("a GPU changes speed and never meaning", asked.commit)
    rows: list[dict[str, Any]] = []
    for kernel in KERNELS:
        if kernel.on_device:
            rows.append(_kernel_row(kernel))
            print(rows[-1])
    for name, router, dtype in _scans():
        rows.append(_scan_row(name, router, dtype, asked.kernels))
        print(rows[-1])
    write_results(asked.out, facts, rows)
    bad = [row for row in rows if row.get("difference") or row.get("differ_beyond_bound")]
    bad += [
        row for row in rows if not row.get("repeat_equal", True) or not row.get("lost_equal", True)
    ]
    print(f"{len(rows)} rows, {len(bad)} with a difference in meaning")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
