"""Claim: on a GPU a scan runs near the floor that memory, the bus and cuBLAS set.

For each shape and for 10^7 tokens of bfloat16 inputs, by cycling a buffer larger than any cache:

- ``resident``: inputs that are on the device already, through ``DeviceFold``; over the larger of
  reading them once at the measured copy bandwidth and the bare cuBLAS product of that shape.
- ``streamed``: inputs in host memory, through ``scan_on_devices``; over the measured time of
  copying them to the device and nothing else.
- plain torch and plain CuPy, which make the same counts of chosen experts and histograms of margin
  and distance from the same inputs; with the product and without it.

Targets: at least 0.85 of the floor resident, within 1.15 of the copy streamed, at least 3 times
plain torch, at least 10 times plain CuPy without the product. Needs a GPU, torch, and CuPy with the
headers of CUDA (``cupy-cuda13x[ctk]``), which plain CuPy compiles its own kernels with.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gpu_results import FOLDER, device_facts, write_results

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.core.tokens import TILE
from moegeom.engine.devices.cuda import scan_on_devices
from moegeom.engine.devices.device_router import device_router, start_counters
from moegeom.engine.devices.resident import DeviceFold
from moegeom.engine.loop import Pace
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.geometry.boundary.linear import row_distances
from moegeom.kernels.cuda.cupy_device import open_device
from moegeom.kernels.cuda.route import RouteCounters, RouteOutputs, launch_route
from moegeom.kernels.table import load_kernels
from tests.array_source import ArraySource

SHAPES = ((2048, 64, 8), (7168, 256, 8), (2880, 128, 4))
COUNTED = ("token_counts", "expert_counts", "margin_histogram", "distance_histogram")

#: Inputs that are cycled: far more than the cache of any GPU.
BUFFER_BYTES = 2 * 2**30

#: Tokens of one tensor of a running model, and of one product.
PIECES = (2**15, 2**16, 2**17, 2**18)


def _router(hidden: int, experts: int, top_k: int, is_exact: bool) -> Router:
    weight = np.random.default_rng(0).standard_normal((experts, hidden), dtype=np.float32)
    weight /= np.float32(np.sqrt(hidden))
    if is_exact:
        weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    origin = Provenance("synthetic", (), "", "BF16" if is_exact else "F32")
    return Router("text/0", "text", 0, weight, Rule(top_k, "softmax", Weights("scores")), origin)


def _task(router: Router, source: ArraySource) -> Task:
    return Task(prepare(router), source, load_kernels("reference"), COUNTED)


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """Least seconds of several runs; ``work`` waits for the device."""
    work()
    best = np.inf
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def _parts(rows: Any, piece: int, tokens: int) -> Iterator[Any]:
    """``piece`` rows at a time, in turn, as often as whole pieces make up ``tokens``."""
    held = len(rows) // piece
    for number in range(tokens // piece):
        first = number % held * piece
        yield rows[first : first + piece]


def _held_bytes(made: Callable[..., Callable[[], object]], *arguments: object) -> int:
    """Bytes of CuPy's pool that were taken beside what was held before; cuBLAS has its own."""
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    made(*arguments)()
    return pool.total_bytes() - before


def _copy_bandwidth() -> float:
    """Bytes read and written each second by a copy on the device."""
    import cupy

    source = cupy.zeros(BUFFER_BYTES, cupy.uint8)
    to = cupy.empty_like(source)

    def copy() -> None:
        for _ in range(4):
            cupy.cuda.runtime.memcpyAsync(to.data.ptr, source.data.ptr, source.nbytes, 3, 0)
        cupy.cuda.runtime.deviceSynchronize()

    return 4 * 2 * BUFFER_BYTES / _seconds(copy, 5)


def _upload_seconds(device: Any, pinned: np.ndarray, repeats: int) -> float:
    """Seconds of copying an array from pinned memory to the device."""
    to, queue = device.empty(pinned.shape, pinned.dtype), device.queue()

    def copy() -> None:
        queue.upload(to, pinned)
        queue.finish()

    return _seconds(copy, repeats)


def _resident(task: Task, device: Any, buffer: Any, piece: int, tokens: int) -> Callable[[], None]:
    fold = DeviceFold(task, device)

    def run() -> None:
        for part in _parts(buffer, piece, tokens):
            fold.take(part)
        fold.wait()

    return run


def _bare_product(
    task: Task, device: Any, buffer: Any, piece: int, tokens: int
) -> Callable[[], None]:
    router, queue = device_router(task, device, "bfloat16"), device.queue()
    out = device.empty((piece, router.logit_columns), np.dtype(np.float32))

    def run() -> None:
        for part in _parts(buffer, piece, tokens):
            queue.product(out, part, router.rows)
        queue.finish()

    return run


def _only_routing(
    task: Task, device: Any, logits: Any, piece: int, tokens: int
) -> Callable[[], None]:
    router, queue = device_router(task, device, "float32"), device.queue()
    counters = RouteCounters(**start_counters(task, device, COUNTED))

    def run() -> None:
        for part in _parts(logits, piece, tokens):
            tables, outputs = router.tables, RouteOutputs()
            launch_route(queue, router.rule, piece, part, tables, None, None, outputs, counters)
        queue.finish()

    return run


def _torch_route(logits: Any, k: int, table: Any) -> tuple[Any, Any, Any]:
    """Chosen experts, margin and distance as somebody would write them in torch."""
    import torch

    best, chosen = torch.topk(logits, k + 1, dim=1)
    best, chosen = best.double(), chosen[:, :k]
    quotients = (best[:, :k, None] - logits[:, None, :].double()) * table[chosen]
    quotients.scatter_(2, chosen[:, None, :].expand(-1, k, -1), torch.inf)
    return chosen, best[:, k - 1] - best[:, k], quotients.amin(dim=(1, 2))


def _cupy_route(logits: Any, k: int, table: Any) -> tuple[Any, Any, Any]:
    """The same in CuPy, an expert at a time: all of them together do not fit."""
    import cupy

    order = cupy.argsort(-logits, axis=1)[:, : k + 1]
    best, chosen = cupy.take_along_axis(logits, order, axis=1).astype(cupy.float64), order[:, :k]
    row, distance = cupy.arange(len(logits))[:, None], cupy.full(len(logits), cupy.inf)
    for rank in range(k):
        quotients = (best[:, rank, None] - logits) * table[chosen[:, rank]]
        quotients[row, chosen] = cupy.inf
        distance = cupy.minimum(distance, quotients.min(axis=1))
    return chosen, best[:, k - 1] - best[:, k], distance


def _check_peers(router: Router) -> None:
    """Peers give what the reference gives, so that equal things are compared."""
    import cupy
    import torch

    k, rows, kernels = router.rule.top_k, row_distances(router.weight), load_kernels("reference")
    shape = (256, router.num_experts)
    logits = np.random.default_rng(4).standard_normal(shape, dtype=np.float32)
    chosen, margin = kernels["top_k"](logits, k)
    distance, _ = kernels["boundary_distance"](logits, chosen, margin, rows, False)
    on_torch = [torch.tensor(array, device="cuda") for array in (logits, rows.inverse)]
    on_cupy = [cupy.asarray(array) for array in (logits, rows.inverse)]
    for found in (
        [np.asarray(v.cpu()) for v in _torch_route(on_torch[0], k, on_torch[1])],
        [cupy.asnumpy(v) for v in _cupy_route(on_cupy[0], k, on_cupy[1])],
    ):
        np.testing.assert_array_equal(found[0], chosen)
        np.testing.assert_allclose(found[1], margin, rtol=1e-12)
        np.testing.assert_allclose(found[2], distance, rtol=1e-12)


def _plain_torch(
    router: Router, buffer: Any, is_exact: bool, piece: int, tokens: int, with_product: bool
) -> Callable[[], None]:
    """``is_exact`` rows are multiplied in bfloat16, others in float32, as ours are."""
    import torch

    dtype = torch.bfloat16 if is_exact else torch.float32
    rows = torch.tensor(router.weight, device="cuda", dtype=dtype)
    table = torch.tensor(row_distances(router.weight).inverse, device="cuda")
    inputs = torch.as_tensor(buffer, device="cuda").view(torch.bfloat16)
    counts = torch.zeros(router.num_experts, device="cuda", dtype=torch.int64)
    bins = torch.zeros(2, 2**16, device="cuda", dtype=torch.int64)

    def product(part: Any) -> Any:
        return (part.to(dtype) @ rows.T).float()

    fixed = product(inputs[:piece])

    def run() -> None:
        for part in _parts(inputs, piece, tokens):
            logits = product(part) if with_product else fixed
            chosen, margin, distance = _torch_route(logits, router.rule.top_k, table)
            counts.add_(torch.bincount(chosen.flatten(), minlength=router.num_experts))
            for row, values in enumerate((margin, distance)):
                bins[row] += torch.bincount(values.view(torch.int64) >> 48, minlength=2**16)
        torch.cuda.synchronize()

    return run


def _plain_cupy(router: Router, logits: Any, piece: int, tokens: int) -> Callable[[], None]:
    import cupy

    table = cupy.asarray(row_distances(router.weight).inverse)
    counts = cupy.zeros(router.num_experts, cupy.int64)
    bins = cupy.zeros((2, 2**16), cupy.int64)

    def run() -> None:
        for part in _parts(logits, piece, tokens):
            chosen, margin, distance = _cupy_route(part, router.rule.top_k, table)
            counts[...] += cupy.bincount(chosen.ravel(), minlength=router.num_experts)
            for row, values in enumerate((margin, distance)):
                bins[row] += cupy.bincount(values.view(cupy.int64) >> 48, minlength=2**16)
        cupy.cuda.runtime.deviceSynchronize()

    return run


def _measure(
    shape: tuple[int, int, int], is_exact: bool, tokens: int, repeats: int, bandwidth: float
) -> dict[str, Any]:
    import cupy

    hidden, experts, top_k = shape
    router, device = _router(*shape, is_exact), open_device(0)
    rows = BUFFER_BYTES // (2 * hidden) // PIECES[-1] * PIECES[-1] or PIECES[-1]
    drawn = np.random.default_rng(1).standard_normal((2**15, hidden), dtype=np.float32)
    values = np.tile(drawn.astype(ml_dtypes.bfloat16), (rows // 2**15, 1))
    _check_peers(router)
    task = _task(router, ArraySource({router.name: values}, num_tokens=tokens))
    buffer = device.put(values.view(np.uint16))
    row: dict[str, Any] = {"hidden": hidden, "experts": experts, "top_k": top_k}
    row |= {"tokens": tokens, "bf16_exact_rows": is_exact, "copy_bytes_per_second": bandwidth}

    per_token: dict[str, float] = {"read": 2.0 * hidden / bandwidth}
    for piece in PIECES:
        whole = tokens // piece * piece
        bare = _seconds(_bare_product(task, device, buffer, piece, tokens), repeats) / whole
        ours = _seconds(_resident(task, device, buffer, piece, tokens), repeats) / whole
        per_token |= {f"product_{piece}": bare, f"resident_{piece}": ours}
    bare = min(per_token[f"product_{piece}"] for piece in PIECES)
    ours = min(per_token[f"resident_{piece}"] for piece in PIECES)
    row["resident_over_floor"] = max(bare, per_token["read"]) / ours

    piece = PIECES[1]
    row["resident_pool_bytes"] = _held_bytes(_resident, task, device, buffer, piece, piece)
    logits = cupy.random.default_rng(2).standard_normal((16 * piece, experts), dtype=cupy.float32)
    whole, fewer = tokens // piece * piece, max(tokens // 20, piece)
    few = fewer // piece * piece
    routing = _seconds(_only_routing(task, device, logits, piece, tokens), repeats) / whole
    per_token |= {"routing": routing}
    per_token["cupy_routing"] = _seconds(_plain_cupy(router, logits, piece // 4, fewer), 2) / (
        fewer // (piece // 4) * (piece // 4)
    )
    for name, with_product in (("torch", True), ("torch_routing", False)):
        work = _plain_torch(router, buffer, is_exact, piece // 4, fewer, with_product)
        per_token[name] = _seconds(work, 2) / (fewer // (piece // 4) * (piece // 4))
    row["torch_over_resident"] = per_token["torch"] / ours
    row["torch_routing_over_ours"] = per_token["torch_routing"] / routing
    row["cupy_routing_over_ours"] = per_token["cupy_routing"] / routing
    row["tokens_of_peers"] = few

    pinned = device.pinned((piece, hidden), np.dtype(np.uint16))
    pinned[...] = values[:piece].view(np.uint16)
    upload = _upload_seconds(device, pinned, 20) / piece
    pace = Pace(piece, 16)

    def stream() -> None:
        tiles = range(-(-tokens // TILE))
        scan_on_devices(task, tiles, pace, devices=[device], batch_tokens=piece)

    row["streamed_pool_bytes"] = _held_bytes(lambda: stream)
    per_token |= {"upload": upload, "streamed": _seconds(stream, max(repeats // 2, 1)) / tokens}
    row["streamed_over_upload"] = per_token["streamed"] / upload
    row["host_to_device_bytes_per_second"] = 2 * hidden / upload
    row["ns_per_token"] = {name: round(1e9 * value, 4) for name, value in per_token.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", required=True, help="of the sources that are measured")
    parser.add_argument("--out", type=Path, default=FOLDER / "gpu_scan_runs_near_its_floor.json")
    asked = parser.parse_args()
    bandwidth, rows = _copy_bandwidth(), []
    facts = device_facts("on a GPU a scan runs near its floor", asked.commit)
    for shape in SHAPES:
        for is_exact in (True, False):
            row = _measure(shape, is_exact, asked.tokens, asked.repeats, bandwidth)
            rows.append(row)
            write_results(asked.out, facts, rows)
            print(
                f"{shape} {'bf16' if is_exact else 'f32 '} rows: "
                f"{row['resident_over_floor']:.2f} of the floor resident, "
                f"{row['streamed_over_upload']:.2f} of the copy streamed, "
                f"torch {row['torch_over_resident']:.1f}, routing alone: "
                f"torch {row['torch_routing_over_ours']:.1f}, "
                f"CuPy {row['cupy_routing_over_ours']:.1f}   {row['ns_per_token']}"
            )


if __name__ == "__main__":
    main()
