"""Oracle: ``RouterRecorder`` on the same model of transformers, one whole request at a time."""

from __future__ import annotations

import importlib
import json
import random
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.core.errors import RecordingError, UsageError
from moegeom.pipeline import ScanRequest, scan
from moegeom.recorder import RouterRecorder
from moegeom.recorder.engines import sglang, vllm
from moegeom.tokens.open import open_tokens
from tests.unit.capture.engines.stand_ins import (
    Engine,
    GateLinear,
    GPUModelRunner,
    GPUModelRunnerV2,
    PackedGate,
    Piece,
    Request,
    Scheduler,
    ServedByVLLM,
    SGLangScheduler,
    exact_model,
    some_requests,
)
from tests.unit.capture.test_fold import assert_same_results


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("engines") / "checkpoint"
    exact_model("eager").float().save_pretrained(path)
    return str(path)


@dataclass
class Served:
    """An engine with requests, and how a person begins and ends a recording of it."""

    engine: Engine
    start: Callable[..., Any]
    stop: Callable[[], Any]
    run: Callable[[Sequence[Piece]], Any]
    dummy: Callable[[], Any]
    blocks: list[Any]
    settings: Any
    scheduler: Scheduler = field(init=False)

    @torch.inference_mode()
    def serve(self, seed: int) -> list[Any]:
        """Runs all requests in passes of a random scheduler; a dummy pass before each fifth."""
        self.scheduler = Scheduler(
            list(self.engine.requests.values()), random.Random(seed), self.engine.attention.caches
        )
        results = []
        for number, pieces in enumerate(self.scheduler.passes()):
            if number % 5 == 0:
                self.dummy()
            results.append(self.run(pieces))
        return results


def worker_of(runner: Any, **parallel: Any) -> Any:
    """vLLM's worker, with the extension as one of its bases."""

    class WorkerBase:
        def __init__(self) -> None:
            self.model_runner, self.rank = runner, parallel.pop("rank", 0)
            self.parallel_config = SimpleNamespace(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                prefill_context_parallel_size=1,
                data_parallel_size=1,
                data_parallel_rank=0,
                use_sequence_parallel_moe=False,
                use_ubatching=False,
            )
            vars(self.parallel_config).update(parallel)
            self.vllm_config = SimpleNamespace(
                parallel_config=self.parallel_config,
                model_config=SimpleNamespace(enforce_eager=True, model="nowhere"),
                speculative_config=None,
            )

    class Worker(WorkerBase):
        pass

    Worker.__bases__ = (*Worker.__bases__, vllm.RecorderExtension)
    return Worker()


def on_vllm(
    requests: Sequence[Request],
    runner: type = GPUModelRunner,
    gate: type[GateLinear] = GateLinear,
    padded_to: int = 1,
) -> Served:
    model = ServedByVLLM(gate)
    engine = Engine(
        model.language_model, padded_to=padded_to, requests={r.name: r for r in requests}
    )
    model.engine.append(engine)
    made = runner(model, engine)
    worker = worker_of(made)

    def run(pieces: Sequence[Piece]) -> Any:
        counts = {p.request: p.num_tokens for p in pieces}
        return made.execute_model(SimpleNamespace(num_scheduled_tokens=counts, pieces=pieces))

    return Served(
        engine,
        worker.moegeom_start,
        worker.moegeom_stop,
        run,
        lambda: made._dummy_run(3),
        [layer.mlp for layer in model.language_model.model.layers],
        worker,
    )


def on_sglang(requests: Sequence[Request], padded_to: int = 1) -> Served:
    engine = Engine(None, padded_to=padded_to, requests={r.name: r for r in requests})
    arguments = SimpleNamespace(
        model_path="nowhere",
        speculative_algorithm=None,
        pp_size=1,
        dp_size=1,
        attn_cp_size=1,
        enable_dp_attention=False,
        enable_two_batch_overlap=False,
        enable_pdmux=False,
        enable_eplb=False,
        ep_num_redundant_experts=0,
        init_expert_location="trivial",
    )
    scheduler = SGLangScheduler(engine, arguments)
    idle = SimpleNamespace(is_idle=lambda: True)
    sglang._equip(None, scheduler)
    return Served(
        engine,
        scheduler.moegeom_start,
        scheduler.moegeom_stop,
        lambda pieces: scheduler.run_batch(scheduler.batch_of(pieces)),
        lambda: scheduler.tp_worker.model_runner.forward(SimpleNamespace(forward_mode=idle)),
        [layer.mlp for layer in engine.model.model.layers],
        scheduler,
    )


ENGINES: dict[str, Callable[..., Served]] = {
    "vllm": on_vllm,
    "vllm-v2": lambda requests, **named: on_vllm(requests, GPUModelRunnerV2, **named),
    "sglang": on_sglang,
}


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang says of the ranks of this process."""
    parallel = SimpleNamespace(tp_rank=0)
    context = SimpleNamespace(get_parallel=lambda: parallel)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    return parallel


def documents_of(out: Path) -> dict[str, int]:
    report = json.loads(out.with_name(f"{out.name}.requests.json").read_text())
    return {one["request"]: one["document"] for one in report["requests"]}


@torch.no_grad()
def record_whole(requests: Sequence[Request], out: Path, checkpoint: str, keep: str) -> None:
    """Each request in one pass of transformers."""
    model = exact_model("eager")
    with RouterRecorder(model, out, checkpoint=checkpoint, keep=keep) as recorder:
        for number, request in enumerate(requests):
            ids = torch.tensor([request.tokens])
            recorder.tokens(ids, documents=[number])
            model(input_ids=ids, use_cache=False)


def rows_of(out: Path, names: dict[int, str]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Everything that is recorded of a token, by request and position."""
    tokens = open_tokens(out)
    total, facts = tokens.facts.num_tokens, tokens.facts
    columns = tokens.read_columns(0, total)
    arrays = [columns.token_id]
    for router in facts.routers:
        chosen = tokens.read_chosen(router, 0, total)
        assert chosen is not None
        arrays += [tokens.read_values(router, 0, total), chosen]
    keys = [
        (names[number], place)
        for number, place in zip(columns.document.tolist(), columns.position.tolist(), strict=True)
    ]
    assert len(set(keys)) == total
    return {key: tuple(array[row].tobytes() for array in arrays) for row, key in enumerate(keys)}


@pytest.mark.parametrize("keep", ["hidden", "logits"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_recording_of_an_engine_is_that_of_whole_requests_however_they_are_scheduled(
    engine: str, keep: str, checkpoint: str, tmp_path: Path
) -> None:
    """Inputs, logits, choices and their order bit for bit, for every token that was run."""
    requests = some_requests(random.Random(1), 9)
    served = ENGINES[engine](requests, padded_to=4)
    served.start(str(tmp_path / "rec"), checkpoint, keep=keep)
    served.serve(seed=len(engine))
    served.stop()
    record_whole(requests, tmp_path / "whole", checkpoint, keep)
    documents = documents_of(tmp_path / "rec")
    mine = rows_of(tmp_path / "rec", {number: name for name, number in documents.items()})
    theirs = rows_of(tmp_path / "whole", {n: r.name for n, r in enumerate(requests)})
    assert mine == {key: theirs[key] for key in served.scheduler.ran}
    assert served.scheduler.num_again, "the schedule has nothing that runs twice"
    assert len(mine) < len(theirs), "the schedule has no cached prefix"


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_of_prompts_and_generated_ones_are_two_populations(
    engine: str, checkpoint: str, tmp_path: Path
) -> None:
    requests = some_requests(random.Random(2), 4)
    served = ENGINES[engine](requests)
    served.start(str(tmp_path / "rec"), checkpoint, keep="ids")
    served.serve(seed=2)
    served.stop()
    tokens = open_tokens(tmp_path / "rec")
    columns = tokens.read_columns(0, tokens.facts.num_tokens)
    assert tokens.facts.domains == ("prefill", "decode")
    prompts = {documents_of(tmp_path / "rec")[r.name]: r.num_prompt for r in requests}
    lengths = np.array([prompts[number] for number in columns.document.tolist()])
    np.testing.assert_array_equal(columns.domain, columns.position >= lengths)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_left_out_is_counted(engine: str, checkpoint: str, tmp_path: Path) -> None:
    served = ENGINES[engine](some_requests(random.Random(1), 9), padded_to=4)
    served.start(str(tmp_path / "rec"), checkpoint)
    results = served.serve(seed=3)
    served.stop()
    report = json.loads((tmp_path / "rec.requests.json").read_text())
    lengths = {r.name: len(r.tokens) for r in served.engine.requests.values()}
    num_rows = sum(len(getattr(result, "logits_output", result)) for result in results)
    assert report["num_tokens"] == len(served.scheduler.ran)
    assert report["num_run_again"] == served.scheduler.num_again
    assert report["num_positions_not_run"] == sum(lengths.values()) - len(served.scheduler.ran)
    assert report["num_padding"] == num_rows - report["num_tokens"] - report["num_run_again"]
    assert report["num_passes"] == len(results)
    assert report["num_passes_of_no_request"] == -(-len(results) // 5)


@pytest.mark.parametrize("engine", ENGINES)
def test_folding_in_an_engine_is_a_scan_of_its_recording(
    engine: str, checkpoint: str, tmp_path: Path
) -> None:
    """Of the first tokens that come: those behind are left out of both."""
    for name, options in (("rec", {"keep": "hidden"}), ("folded", {"fold": True})):
        served = ENGINES[engine](some_requests(random.Random(1), 6))
        served.start(str(tmp_path / name), checkpoint, num_tokens=40, **options)
        served.serve(seed=4)
        served.stop()
    report = json.loads((tmp_path / "rec.requests.json").read_text())
    assert report["num_tokens"] == 40
    assert report["has_all_tokens"]
    assert len(served.scheduler.ran) > 40
    scan(ScanRequest(checkpoint=checkpoint, tokens=str(tmp_path / "rec"), out=tmp_path / "scanned"))
    assert_same_results(tmp_path / "folded", tmp_path / "scanned")


def outputs_of(results: Sequence[Any]) -> list[torch.Tensor]:
    return [getattr(result, "logits_output", result) for result in results]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_goes_on_as_if_nothing_were_there_when_its_recording_fails(
    engine: str, checkpoint: str, tmp_path: Path
) -> None:
    """One block runs its tokens in two parts, which no recording can follow."""
    bare, served = (ENGINES[engine](some_requests(random.Random(1), 3)) for _ in range(2))
    for one in (bare, served):
        one.blocks[1].num_parts = 2
    served.start(str(tmp_path / "rec"), checkpoint)
    pairs = zip(outputs_of(served.serve(seed=5)), outputs_of(bare.serve(seed=5)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    with pytest.raises(RecordingError, match="token"):
        served.stop()
    assert not list(tmp_path.iterdir())
    assert not any(block.gate._forward_hooks for block in served.blocks)
    served.blocks[1].num_parts = 1
    served.start(str(tmp_path / "rec"), checkpoint)
    served.serve(seed=5)
    served.stop()
    assert (tmp_path / "rec").is_dir()


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_are_updated_end_a_recording(
    engine: str, checkpoint: str, tmp_path: Path
) -> None:
    """In place, or by another parameter in the place of the first, as weight syncs do."""
    for swap in (False, True):
        served = ENGINES[engine](some_requests(random.Random(1), 3))
        served.start(str(tmp_path / "rec"), checkpoint)
        served.serve(seed=6)
        gate = served.blocks[0].gate
        if swap:
            gate.weight = torch.nn.Parameter(gate.weight + 1, requires_grad=False)
        else:
            gate.weight += 1
        with pytest.raises(RecordingError, match="changed while router text/0"):
            served.stop()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_of_another_checkpoint_are_refused_before_anything_is_recorded(
    engine: str, checkpoint: str, tmp_path: Path
) -> None:
    served = ENGINES[engine](some_requests(random.Random(1), 3))
    served.blocks[1].gate.weight.data[3, 7] += 1 / 64
    with pytest.raises(RecordingError, match=r"text/1: the engine's '.*layers\.1\.mlp\.gate'"):
        served.start(str(tmp_path / "rec"), checkpoint)
    assert not list(tmp_path.iterdir())


def test_a_gate_whose_weight_is_packed_away_is_known_by_what_it_does(
    checkpoint: str, tmp_path: Path
) -> None:
    requests = some_requests(random.Random(1), 3)
    for name, gate in (("plain", GateLinear), ("packed", PackedGate)):
        served = on_vllm(requests, gate=gate)
        served.start(str(tmp_path / name), checkpoint, keep="logits")
        served.serve(seed=7)
        served.stop()
    documents = documents_of(tmp_path / "plain")
    names = {number: name for name, number in documents.items()}
    assert rows_of(tmp_path / "plain", names) == rows_of(tmp_path / "packed", names)
    served = on_vllm(requests, gate=PackedGate)
    served.blocks[1].gate._packed[3, 7] += 1 / 64
    with pytest.raises(RecordingError, match="text/1"):
        served.start(str(tmp_path / "other"), checkpoint)


def test_choices_made_inside_a_kernel_are_missing_and_cannot_be_all_that_is_kept(
    checkpoint: str, tmp_path: Path
) -> None:
    def fuse(served: Served) -> None:
        for block in served.blocks:
            if hasattr(block, "topk"):
                block.topk.topk_config.output_format.name = "BYPASSED"
            else:
                block.experts.is_monolithic = True

    for engine, make in ENGINES.items():
        served = make(some_requests(random.Random(1), 3))
        fuse(served)
        served.start(str(tmp_path / engine), checkpoint, keep="logits")
        served.serve(seed=8)
        served.stop()
        assert not open_tokens(tmp_path / engine).facts.has_chosen
        served.start(str(tmp_path / f"{engine}-ids"), checkpoint, keep="ids")
        served.serve(seed=8)
        with pytest.raises(RecordingError, match="does not give its choice back"):
            served.stop()


def test_who_listened_to_a_router_of_vllm_before_still_does(
    checkpoint: str, tmp_path: Path
) -> None:
    served = on_vllm(some_requests(random.Random(1), 3))
    heard: list[torch.Tensor] = []
    router = served.blocks[0].experts.router
    router.set_capture_fn(heard.append)
    served.start(str(tmp_path / "rec"), checkpoint)
    results = served.serve(seed=9)
    served.stop()
    assert len(heard) == len(results) + -(-len(results) // 5)
    assert router.capture_fn == heard.append
    assert served.blocks[1].experts.router.capture_fn is None


VLLM_OBSTACLES = {
    "compiled code": ("model_config", "enforce_eager", False),
    "speculative": ("", "speculative_config", object()),
    "pipeline": ("parallel_config", "pipeline_parallel_size", 2),
    "spread over ranks": ("parallel_config", "prefill_context_parallel_size", 2),
    "a part of the tokens": ("parallel_config", "use_sequence_parallel_moe", True),
    "two batches": ("parallel_config", "use_ubatching", True),
}
SGLANG_OBSTACLES = {
    "speculative": ("speculative_algorithm", "EAGLE"),
    "pipeline": ("pp_size", 2),
    "replicas": ("dp_size", 2),
    "routed together": ("enable_dp_attention", True),
    "spread over ranks": ("attn_cp_size", 2),
    "cut into parts": ("enable_two_batch_overlap", True),
    "places of experts": ("enable_eplb", True),
}


@pytest.mark.parametrize("reason", VLLM_OBSTACLES)
def test_a_vllm_that_cannot_be_followed_says_why(
    reason: str, checkpoint: str, tmp_path: Path
) -> None:
    served = on_vllm(some_requests(random.Random(1), 3))
    part, name, value = VLLM_OBSTACLES[reason]
    config = served.settings.vllm_config
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(UsageError, match=reason):
        served.start(str(tmp_path / "rec"), checkpoint)


@pytest.mark.parametrize("reason", SGLANG_OBSTACLES)
def test_an_sglang_that_cannot_be_followed_says_why(
    reason: str, checkpoint: str, tmp_path: Path
) -> None:
    served = on_sglang(some_requests(random.Random(1), 3))
    setattr(served.settings.server_args, *SGLANG_OBSTACLES[reason])
    with pytest.raises(UsageError, match=reason):
        served.start(str(tmp_path / "rec"), checkpoint)


def test_a_pass_that_sglang_ran_as_a_graph_ends_the_recording(
    checkpoint: str, tmp_path: Path
) -> None:
    served = on_sglang(some_requests(random.Random(1), 3))
    served.start(str(tmp_path / "rec"), checkpoint)
    served.settings.tp_worker.model_runner.can_run_graph = True
    served.serve(seed=10)
    with pytest.raises(UsageError, match="CUDA graph"):
        served.stop()


def test_of_a_tensor_parallel_group_the_first_rank_records(
    checkpoint: str, tmp_path: Path, first_rank: SimpleNamespace
) -> None:
    first_rank.tp_rank = 1
    second = on_sglang(some_requests(random.Random(1), 3))
    second.start(str(tmp_path / "rec"), checkpoint)
    second.serve(seed=11)
    second.stop()
    worker = worker_of(None, rank=3, tensor_parallel_size=2)
    assert not worker.moegeom_start(str(tmp_path / "rec"), checkpoint)["recording"]
    assert not worker.moegeom_stop()["recording"]
    assert not list(tmp_path.iterdir())


def test_replicas_of_vllm_make_one_recording(checkpoint: str, tmp_path: Path) -> None:
    requests = some_requests(random.Random(3), 6)
    documents: dict[int, str] = {}
    for rank in range(2):
        served = on_vllm(requests[rank::2])
        parallel = served.settings.parallel_config
        parallel.data_parallel_rank, parallel.data_parallel_size = rank, 2
        served.start(str(tmp_path / "rec"), checkpoint, keep="logits")
        served.serve(seed=12)
        served.stop()
        report = json.loads((tmp_path / f"rec.0000{rank}-of-00002.requests.json").read_text())
        documents |= {one["document"]: one["request"] for one in report["requests"]}
    record_whole(requests, tmp_path / "whole", checkpoint, "logits")
    theirs = rows_of(tmp_path / "whole", dict(enumerate(r.name for r in requests)))
    mine = rows_of(tmp_path / "rec", documents)
    assert mine == {key: theirs[key] for key in mine}
    assert {name for name, _ in mine} == {r.name for r in requests}


def test_one_recording_at_a_time(checkpoint: str, tmp_path: Path) -> None:
    for engine, make in ENGINES.items():
        served = make(some_requests(random.Random(1), 3))
        served.start(str(tmp_path / engine), checkpoint)
        with pytest.raises(UsageError, match="recording already"):
            served.start(str(tmp_path / "other"), checkpoint)
        with pytest.raises(RecordingError, match="no router saw a token"):
            served.stop()


def test_outputs_of_experts_are_refused(checkpoint: str, tmp_path: Path) -> None:
    served = on_vllm(some_requests(random.Random(1), 3))
    with pytest.raises(UsageError, match="outputs of experts"):
        served.start(str(tmp_path / "rec"), checkpoint, keep="outputs")


def test_sglang_finds_the_plug_in_and_every_scheduler_gets_its_methods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the entry point, and by a hook that runs after a scheduler is made."""
    hooks: dict[str, Any] = {}
    registry = SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: hook}))
    module = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AFTER="after"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    root = Path(__file__).parents[4]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    name, _, function = declared["sglang.srt.plugins"]["moegeom"].partition(":")
    getattr(importlib.import_module(name), function)()
    scheduler = SimpleNamespace()
    assert hooks.popitem()[1](None, scheduler, "arguments", port_args="ports") is None
    assert scheduler.moegeom_start.__self__ is scheduler.moegeom_stop.__self__
