"""Claim: on a GPU each road from tokens to results costs little more than what it cannot avoid.

In one process, each figure as a ratio, roads that are compared by turns:

- ``fold`` and ``keep``: ``RouterRecorder`` at a model with OLMoE's layers and random weights in
  bfloat16; time of the passes over that of the bare ones, seconds a router from the last pass to
  the end of the block, the first fold of the process apart from the others. With an empty
  ``NUMBA_CACHE_DIR`` the first one compiles the kernels of the processor too.
- ``memory``: what such a fold takes of the device, over the inputs of one pass.
- ``typed``: ``moegeom.scan`` of what ``keep hidden`` recorded, ``--device cuda`` over ``cpu``.
- ``scan``: routers of three shapes on inputs in bfloat16 in the memory of the host, all that a scan
  measures by default. Two numbers of tokens tell what a token more costs, over copying its input
  from pinned memory to the device, and the seconds that a router costs without any.

A part that fails is a row with the reason, and the others go on. Parts end early, with fewer
rounds, when ``--seconds`` are over. ``--device cpu --quick`` tries all of it without a GPU; then
``cuda`` is the processor too, and nothing is written unless ``--out`` says where.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from gpu_results import FOLDER, device_facts, write_results
from safetensors.torch import save_file
from transformers import OlmoeConfig, OlmoeForCausalLM

import moegeom as mg
from moegeom.core.router import GroupMask, Provenance, Router, Rule, Weights
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import metrics_of_scan
from moegeom.recorder import RouterRecorder
from tests.array_source import ArraySource

CLAIM = "on a GPU each road from tokens to results costs little"
PARTS = ("fold", "memory", "typed", "scan")

#: By road, what each measured round of it took: seconds of one kind or several.
Rounds = dict[str, list[tuple[float, ...]]]


@dataclass(frozen=True)
class Size:
    """How much is run, where, and until when.

    The model sees ``tokens`` tokens in 16 passes, a scan up to 16 times as many.
    """

    device: str
    tokens: int
    layers: int
    hidden: int
    repeats: int
    deadline: float

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def wait(self) -> None:
        """Until the device has done all that was queued."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Gives memory of the device back that nothing uses."""
        gc.collect()
        if self.is_cuda:
            import cupy

            torch.cuda.empty_cache()
            cupy.get_default_memory_pool().free_all_blocks()


class Table:
    """The rows so far: each is printed and written as it comes, so that a lost process loses none.

    ``failed`` says why a road gave no figures.
    """

    def __init__(self, facts: dict[str, Any], out: Path | None) -> None:
        self._facts, self._out = facts, out
        self._started = time.perf_counter()
        self.rows: list[dict[str, Any]] = []

    def add(self, road: str, figures: dict[str, Any]) -> None:
        self.rows.append({"road": road} | figures)
        if self._out is not None:
            write_results(self._out, self._facts, self.rows)
        texts = [
            f"{name.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{value}"
            for name, value in figures.items()
            if ("_over_" in name or name.endswith("_a_router") or name == "failure")
            and not name.startswith("median_")
        ]
        print(f"[{time.perf_counter() - self._started:4.0f} s] {road}: {', '.join(texts)}")

    def fail(self, road: str, error: Exception) -> None:
        traceback.print_exception(error)
        self.add(road, {"failure": f"{type(error).__name__}: {str(error)[:300]}"})

    @contextmanager
    def part(self, road: str) -> Iterator[None]:
        """What goes wrong inside is a row, and not the end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts are worth having
            self.fail(road, error)


def by_turns(
    works: dict[str, Callable[[], tuple[float, ...]]],
    size: Size,
    table: Table,
    road: str = "",
    repeats: int = 2,
    warm: bool = True,
) -> Rounds:
    """Figures of ``repeats`` rounds of each work, but for those that fail; one once time is over.

    With ``warm`` a round before them is left out.
    """
    rounds: Rounds = {name: [] for name in works}
    for number in range(repeats + warm):
        for name in [name for name in works if name in rounds]:
            with table.part(f"{road}{name}"):
                rounds[name].append(works[name]())
                continue
            del rounds[name]  # it failed, and the other roads go on
        if number >= warm and time.monotonic() > size.deadline:
            break
    return {name: seconds[warm:] for name, seconds in rounds.items()}


# ------------------------------------------------------------------------------------ running model
def make_model(size: Size) -> Any:
    """OLMoE's layers with a small vocabulary; the weights are drawn on the device."""
    config = OlmoeConfig(
        hidden_size=size.hidden,
        intermediate_size=size.hidden // 2,
        num_hidden_layers=size.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=512,
        eos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(size.device):
            return OlmoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def passes(size: Size) -> list[torch.Tensor]:
    """The tokens of 16 passes, eight sequences each."""
    generator = torch.Generator(size.device).manual_seed(1)
    shape = (16, 8, size.tokens // 128)
    ids = torch.randint(0, 512, shape, generator=generator, device=size.device)
    return list(ids)


@torch.no_grad()
def run_passes(
    model: Any, batches: Sequence[torch.Tensor], size: Size, announce: Callable[..., None]
) -> float:
    """Seconds until the device has done them."""
    size.wait()
    started = time.perf_counter()
    for ids in batches:
        announce(ids)
        model(input_ids=ids, use_cache=False)
    size.wait()
    return time.perf_counter() - started


def bare(model: Any, batches: Sequence[torch.Tensor], size: Size) -> tuple[float, ...]:
    return (run_passes(model, batches, size, lambda ids: None),)


def recorded(
    model: Any, batches: Sequence[torch.Tensor], size: Size, out: Path, options: dict[str, Any]
) -> tuple[float, ...]:
    """Seconds before the first pass, of the passes, and from there until the block has ended."""
    began = time.perf_counter()
    with RouterRecorder(model, out, **options) as recorder:
        opened = time.perf_counter() - began
        of_passes = run_passes(model, batches, size, recorder.tokens)
        ended = time.perf_counter()
    size.wait()
    return opened, of_passes, time.perf_counter() - ended


def removed(work: Callable[[Path], tuple[float, ...]]) -> tuple[float, ...]:
    """What ``work`` tells; what it wrote is gone."""
    folder = Path(tempfile.mkdtemp())
    try:
        return work(folder / "out")
    finally:
        shutil.rmtree(folder)


def figures_of(
    seconds: Sequence[tuple[float, ...]], bare_seconds: Sequence[tuple[float, ...]], layers: int
) -> dict[str, Any]:
    """Best and median of the rounds of a recorder, over those of the bare passes."""
    opened, of_passes, end = zip(*seconds, strict=True)
    (of_bare,) = zip(*bare_seconds, strict=True)
    figures: dict[str, Any] = {"rounds": len(seconds)}
    for name, pick in (("", min), ("median_", statistics.median)):
        figures |= {
            f"{name}bare_seconds": pick(of_bare),
            f"{name}passes_over_bare": pick(of_passes) / pick(of_bare),
            f"{name}end_over_bare": pick(end) / pick(of_bare),
            f"{name}end_seconds_a_router": pick(end) / layers,
            f"{name}open_seconds_a_router": pick(opened) / layers,
        }
    return figures


def compiled_files() -> int:
    """Kernels of the processor that an earlier process compiled."""
    folder = os.environ.get("NUMBA_CACHE_DIR") or str(Path(mg.__file__).parent)
    return sum(1 for _ in Path(folder).rglob("*.nbc"))


def measure_model(model: Any, size: Size, table: Table) -> None:
    """Rows ``fold`` and ``keep``."""
    batches = passes(size)
    length = {"num_tokens": size.tokens}
    kinds: dict[str, dict[str, Any]] = {
        "fold": {"fold": True} | length,
        "fold, length not known": {"fold": True},
        "keep ids": {"keep": "ids"},
        "keep hidden": {"keep": "hidden"},
    }
    shape = {"hidden": size.hidden, "experts": 64, "top_k": 8, "routers": size.layers} | {
        "tokens": size.tokens,
        "pass_tokens": batches[0].numel(),
        "experts_implementation": str(getattr(model.config, "_experts_implementation", "")),
    }
    first_bare = [bare(model, batches, size) for _ in range(3)][1:]
    with table.part("fold, first of the process"):
        compiled = {"kernels_on_disk": compiled_files()}
        first = removed(lambda out: recorded(model, batches, size, out, kinds["fold"]))
        table.add(
            "fold, first of the process",
            shape | compiled | figures_of([first], first_bare, size.layers),
        )

    def road(options: dict[str, Any]) -> Callable[[], tuple[float, ...]]:
        return lambda: removed(lambda out: recorded(model, batches, size, out, options))

    works = {"bare": lambda: bare(model, batches, size)} | {
        name: road(options) for name, options in kinds.items()
    }
    rounds = by_turns(works, size, table, repeats=size.repeats)
    for name, seconds in rounds.items():
        if name != "bare" and seconds:
            table.add(name, shape | figures_of(seconds, rounds["bare"], size.layers))


# ------------------------------------------------------------------------------------------- memory
class Watch:
    """Most bytes of CuPy's pool and of the whole device, looked at while something runs."""

    def __init__(self) -> None:
        import cupy

        self._pool = cupy.get_default_memory_pool()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.pool = self.device = 0

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            free, total = torch.cuda.mem_get_info()
            self.pool = max(self.pool, self._pool.total_bytes())
            self.device = max(self.device, total - free)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *rest: object) -> None:
        self._ended.set()
        self._thread.join()


def peaks(work: Callable[[], object], size: Size) -> dict[str, int]:
    """Most bytes while ``work`` runs: of torch, of CuPy's pool, and of the whole device."""
    if not size.is_cuda:
        work()
        return {"torch_bytes": 0, "pool_bytes": 0, "device_bytes": 0}
    size.release()
    size.wait()
    torch.cuda.reset_peak_memory_stats()
    with Watch() as watch:
        work()
        size.wait()
    torch_bytes = torch.cuda.max_memory_allocated()
    return {"torch_bytes": torch_bytes, "pool_bytes": watch.pool, "device_bytes": watch.device}


def measure_memory(model: Any, size: Size, table: Table) -> None:
    """Row ``memory``: bytes of a fold beside those of the bare passes."""
    batches = passes(size)
    options = {"fold": True, "num_tokens": size.tokens}
    without = peaks(lambda: bare(model, batches, size), size)
    beside = peaks(lambda: removed(lambda out: recorded(model, batches, size, out, options)), size)
    inputs = batches[0].numel() * size.hidden * 2 * size.layers
    more = {f"{name}_more": beside[name] - without[name] for name in without}
    table.add(
        "memory",
        {f"bare_{name}": value for name, value in without.items()}
        | more
        | {
            "pass_input_bytes": inputs,
            "torch_more_over_pass_inputs": more["torch_bytes_more"] / inputs,
            "pool_over_pass_inputs": more["pool_bytes_more"] / inputs,
            "device_more_over_pass_inputs": more["device_bytes_more"] / inputs,
        },
    )


# -------------------------------------------------------------------------------------------- typed
def write_routers(model: Any, folder: Path) -> None:
    """A checkpoint of the routers and of the norms in front of them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str), "utf-8")
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in model.named_parameters()
        if name.endswith(("mlp.gate.weight", "post_attention_layernorm.weight"))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def measure_typed(model: Any, size: Size, table: Table, folder: Path) -> None:
    """Row ``typed``: a recording on disk, which the processor has in its memory."""
    checkpoint, recording = folder / "checkpoint", folder / "recording"
    write_routers(model, checkpoint)
    recorded(model, passes(size), size, recording, {"keep": "hidden"})

    def typed(device: str) -> Callable[[], tuple[float, ...]]:
        def work() -> tuple[float, ...]:
            out = folder / "results"
            started = time.perf_counter()
            mg.scan(checkpoint, recording, device=device, out=out, overwrite=True)
            seconds = time.perf_counter() - started
            shutil.rmtree(out)
            return (seconds,)

        return work

    works = {"cpu": typed("cpu"), "cuda": typed(size.device)}
    rounds = by_turns(works, size, table, "typed, ")
    shape = {"hidden": size.hidden, "experts": 64, "top_k": 8, "routers": size.layers}
    figures: dict[str, Any] = shape | {"tokens": size.tokens}
    table.add("typed", figures | best_of(rounds, size.layers))


def best_of(rounds: Rounds, routers: int) -> dict[str, Any]:
    """Seconds of each device, a router, and their ratio; least and median of the rounds."""
    figures: dict[str, Any] = {}
    for prefix, pick in (("", min), ("median_", statistics.median)):
        best = {name: pick(of for (of,) in found) for name, found in rounds.items() if found}
        figures |= {f"{prefix}{name}_seconds": value for name, value in best.items()}
        figures |= {f"{prefix}{name}_seconds_a_router": s / routers for name, s in best.items()}
        if "cpu" in best and "cuda" in best:
            figures[f"{prefix}cuda_over_cpu"] = best["cuda"] / best["cpu"]
    return figures


# --------------------------------------------------------------------------------------------- scan
@dataclass(frozen=True)
class Shape:
    """Routers of one shape, each with inputs of its own, at two numbers of tokens."""

    hidden: int
    experts: int
    rule: Rule
    routers: int
    tokens: tuple[int, int]

    def router(self, number: int) -> Router:
        """Rows are numbers of bfloat16, as checkpoints keep them."""
        random = np.random.default_rng(number)
        rows = random.standard_normal((self.experts, self.hidden), dtype=np.float32)
        rows /= np.float32(np.sqrt(self.hidden))
        weight = rows.astype(ml_dtypes.bfloat16).astype(np.float32)
        bias = None
        if self.rule.has_selection_bias:
            bias = 0.01 * random.standard_normal(self.experts)
        origin = Provenance("synthetic", (), "", "BF16")
        return Router(
            f"text/{number}", "text", number, weight, self.rule, origin, selection_bias=bias
        )


def shapes(tokens: int) -> list[Shape]:
    """OLMoE's router, that of Qwen3's width and number of experts, and that of DeepSeek-V3."""
    softmax = Rule(8, "softmax", Weights("scores"))
    v3 = Rule(
        8,
        "sigmoid",
        Weights("scores", renormalise=True, scale=2.5),
        has_selection_bias=True,
        groups=GroupMask(8, 4, "top2_sum", -np.inf),
    )
    return [
        Shape(2048, 64, softmax, 1, (2 * tokens, 16 * tokens)),
        Shape(2048, 128, softmax, 4, (tokens // 2, 2 * tokens)),
        Shape(7168, 256, v3, 2, (tokens // 4, tokens // 2)),
    ]


def draw_inputs(tokens: int, hidden: int, size: Size) -> np.ndarray:
    """Inputs of length about ``sqrt(hidden)`` in bfloat16, drawn on the device."""
    values = np.empty((tokens, hidden), np.int16)
    generator = torch.Generator(size.device).manual_seed(2)
    where = {"device": size.device, "dtype": torch.bfloat16, "generator": generator}
    for first in range(0, tokens, 2**15):
        part = torch.from_numpy(values[first : first + 2**15])
        part.copy_(torch.randn(part.shape, **where).view(torch.int16))
    return values.view(ml_dtypes.bfloat16)


def copy_seconds(values: np.ndarray, size: Size) -> float:
    """Least seconds of copying the input of a token from pinned memory to the device."""
    rows = values[: 2**16].view(np.int16)
    host = torch.empty(rows.shape, dtype=torch.int16, pin_memory=size.is_cuda)
    host.copy_(torch.from_numpy(rows))
    to = torch.empty(rows.shape, dtype=torch.int16, device=size.device)
    best = np.inf
    for _ in range(10):
        size.wait()
        started = time.perf_counter()
        to.copy_(host, non_blocking=True)
        size.wait()
        best = min(best, time.perf_counter() - started)
    return best / len(rows)


def measure_scan(shape: Shape, values: np.ndarray, size: Size, table: Table, road: str) -> None:
    """Rows of one shape, for each number of tokens one, and what two of them tell together."""
    devices: dict[str, tuple[Any, ...]] = {"cpu": (), "cuda": ()}
    if size.is_cuda:
        from moegeom.kernels.cuda.cupy_device import open_device

        devices["cuda"] = (open_device(0),)
    routers, metrics = [shape.router(number) for number in range(shape.routers)], metrics_of_scan()
    messages: list[str] = []

    def scan(tokens: int, where: tuple[Any, ...]) -> Callable[[], tuple[float, ...]]:
        def work() -> tuple[float, ...]:
            started = time.perf_counter()
            for number, router in enumerate(routers):
                rows = values[number * tokens :][:tokens]
                source = ArraySource({router.name: rows})
                run = RouterRun(router, source, metrics, devices=where, on_message=messages.append)
                measure_router(run)
            return (time.perf_counter() - started,)

        return work

    copied = copy_seconds(values, size)
    figures: dict[str, Any] = {
        "hidden": shape.hidden,
        "experts": shape.experts,
        "top_k": shape.rule.top_k,
        "score": shape.rule.score,
        "routers": shape.routers,
        "tokens": list(shape.tokens),
        "copy_bytes_per_second": 2 * shape.hidden / copied,
    }
    best: dict[str, list[float]] = {name: [] for name in devices}
    for tokens in shape.tokens:
        works = {name: scan(tokens, where) for name, where in devices.items()}
        rounds = by_turns(works, size, table, f"{road}, ", warm=tokens == shape.tokens[0])
        found = best_of(rounds, shape.routers)
        table.add(f"{road}, {tokens} tokens", figures | {"tokens": tokens} | found)
        for name, seconds in best.items():
            seconds.append(found.get(f"{name}_seconds_a_router", np.nan))
    few, many = shape.tokens
    for name, (of_few, of_many) in best.items():
        more = (of_many - of_few) / (many - few)
        if np.isfinite(more):
            figures[f"{name}_token_more_over_copy"] = more / copied
            figures[f"{name}_token_more_seconds"] = more
            figures[f"{name}_fixed_seconds_a_router"] = of_few - few * more
    table.add(f"{road}, a token more", figures | {"messages": sorted(set(messages))})


# ------------------------------------------------------------------------------------------- all
def facts_of(size: Size, commit: str) -> dict[str, Any]:
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    libraries["cores"] = len(os.sched_getaffinity(0))
    if size.is_cuda:
        return device_facts(CLAIM, commit) | libraries
    where = {"device": "the processor", "driver": "", "cuda_runtime": "", "cupy": ""}
    python = {"numpy": np.__version__, "python": platform.python_version()}
    return {"claim": CLAIM, **where, **python, "commit": commit} | libraries


def main() -> None:
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=2**17, help="of the running model")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the running model")
    parser.add_argument("--repeats", type=int, default=5, help="of the running model")
    parser.add_argument("--seconds", type=float, default=200.0, help="after these, fewer rounds")
    parser.add_argument(
        "--quick", action="store_true", help="4096 tokens, two narrow layers, a round"
    )
    parser.add_argument("--commit", required=True, help="of the sources that are measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.quick:
        asked.tokens, asked.hidden, asked.repeats = 4096, 128, 1
    if asked.device == "cpu":
        torch.set_num_threads(1)  # as many threads as a busy machine has cores wait for each other
    deadline = time.monotonic() + asked.seconds
    layers = 2 if asked.quick else 4
    size = Size(asked.device, asked.tokens, layers, asked.hidden, asked.repeats, deadline)
    out = asked.out
    if out is None and size.is_cuda:
        out = FOLDER / "gpu_roads_cost_little.json"
    table = Table(facts_of(size, asked.commit), out)

    folder = Path(tempfile.mkdtemp())
    try:
        with table.part("model"):
            model = make_model(size) if set(asked.parts) - {"scan"} else None
            if "fold" in asked.parts:
                with table.part("fold"):
                    measure_model(model, size, table)
            if "memory" in asked.parts:
                with table.part("memory"):
                    measure_memory(model, size, table)
            if "typed" in asked.parts:
                with table.part("typed"):
                    measure_typed(model, size, table, folder)
            del model
    finally:
        shutil.rmtree(folder)
    size.release()

    every = shapes(size.tokens) if "scan" in asked.parts else []
    values, width = np.empty((0, 0)), 0
    for shape in every:
        road = f"scan {shape.routers} x ({shape.hidden}, {shape.experts}, {shape.rule.top_k})"
        with table.part(road):
            if shape.hidden != width:
                del values  # before the next are there
                alike = [other for other in every if other.hidden == shape.hidden]
                most = max(other.routers * max(other.tokens) for other in alike)
                values, width = draw_inputs(most, shape.hidden, size), shape.hidden
            measure_scan(shape, values, size, table, road)
    failures = [row["road"] for row in table.rows if "failure" in row]
    print(f"{len(table.rows)} rows, {len(failures)} failures {failures}")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
