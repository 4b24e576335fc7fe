"""Oracle: ``RouterRecorder`` on the same model of transformers, one whole request at a time."""

import importlib
import json
import operator
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
from tests.by_day import by_day
from tests.unit.capture.engines import stand_ins
from tests.unit.capture.test_two_ranks import assert_same_results


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("engines") / "checkpoint"
    stand_ins.exact_model().float().save_pretrained(path)
    return str(path)


@dataclass
class Served:
    engine: stand_ins.Engine
    start: Callable[..., Any]
    stop: Callable[[], Any]
    run: Callable[[Sequence[stand_ins.Piece]], Any]
    dummy: Callable[[], Any]
    blocks: list[Any]
    settings: Any
    scheduler: stand_ins.Scheduler = field(init=False)

    @torch.inference_mode()
    def serve(self, seed: int) -> list[torch.Tensor]:
        """Runs all requests in passes of a random scheduler; a dummy pass before each fifth."""
        self.scheduler = stand_ins.Scheduler([*self.engine.requests.values()], random.Random(seed))
        results = []
        for number, pieces in enumerate(self.scheduler.passes()):
            if number % 5 == 0:
                self.dummy()
            result = self.run(pieces)
            results.append(getattr(result, "logits_output", result))
        return results

    def record(self, out: Path, checkpoint: str, seed: int, **options: Any) -> list[torch.Tensor]:
        self.start(str(out), checkpoint, **options)
        results = self.serve(seed)
        self.stop()
        return results


def worker_of(runner: Any, **parallel: Any) -> Any:
    class WorkerBase:
        def __init__(self) -> None:
            self.model_runner, self.rank = runner, parallel.pop("rank", 0)
            kinds = ("tensor", "pipeline", "prefill_context", "data")
            usual = {f"{kind}_parallel_size": 1 for kind in kinds} | {"data_parallel_rank": 0}
            usual |= {"use_sequence_parallel_moe": False, "use_ubatching": False}
            self.parallel_config = SimpleNamespace(**usual | parallel)
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
    requests, runner=stand_ins.GPUModelRunner, gate=stand_ins.GateLinear, padded_to: int = 1
) -> Served:
    model = stand_ins.ServedByVLLM(gate)
    engine = stand_ins.Engine(model.language_model, {r.name: r for r in requests}, padded_to)
    model.engine.append(engine)
    made = runner(model, engine)
    worker = worker_of(made)

    def run(pieces: Sequence[stand_ins.Piece]) -> Any:
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


def on_sglang(requests: Sequence[stand_ins.Request], padded_to: int = 1) -> Served:
    engine = stand_ins.Engine(None, {r.name: r for r in requests}, padded_to)
    arguments = {
        **dict.fromkeys(("pp_size", "dp_size", "attn_cp_size"), 1),
        **dict.fromkeys(("enable_dp_attention", "enable_two_batch_overlap"), False),
        **dict.fromkeys(("enable_pdmux", "enable_eplb", "ep_num_redundant_experts"), False),
        "model_path": "nowhere",
        "speculative_algorithm": None,
        "init_expert_location": "trivial",
    }
    scheduler = stand_ins.SGLangScheduler(engine, SimpleNamespace(**arguments))
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
    "vllm-v2": lambda requests, **named: on_vllm(requests, stand_ins.GPUModelRunnerV2, **named),
    "sglang": on_sglang,
}


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang says of the ranks of this process."""
    parallel = SimpleNamespace(tp_rank=0)
    context = SimpleNamespace(get_parallel=lambda: parallel)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    return parallel


def report_of(out: Path) -> dict[str, Any]:
    return json.loads(out.with_name(f"{out.name}.requests.json").read_text())


def names_of(out: Path) -> dict[int, str]:
    return {one["document"]: one["request"] for one in report_of(out)["requests"]}


def some(number: int = 3, seed: int = 1) -> list[stand_ins.Request]:
    return stand_ins.some_requests(random.Random(seed), number)


@torch.no_grad()
def record_whole(
    requests: Sequence[stand_ins.Request], out: Path, checkpoint: str, keep: str
) -> None:
    model = stand_ins.exact_model()
    with RouterRecorder(model, out, checkpoint=checkpoint, keep=keep) as recorder:
        for number, request in enumerate(requests):
            ids = torch.tensor([request.tokens])
            recorder.tokens(ids, documents=[number])
            model(input_ids=ids, use_cache=False)


def rows_of(out: Path, names: dict[int, str]) -> dict[tuple[str, int], tuple[Any, ...]]:
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
def test_a_recording_of_an_engine_is_that_of_whole_requests(engine, keep, checkpoint, tmp_path):
    """Inputs, logits, choices and their order bit for bit, for every token that was run; what is
    left out is counted, and tokens of prompts and generated ones are two populations.
    """
    requests = some(9)
    served = ENGINES[engine](requests, padded_to=4)
    results = served.record(tmp_path / "rec", checkpoint, seed=len(engine), keep=keep)
    record_whole(requests, tmp_path / "whole", checkpoint, keep)
    names = names_of(tmp_path / "rec")
    mine = rows_of(tmp_path / "rec", names)
    theirs = rows_of(tmp_path / "whole", {n: r.name for n, r in enumerate(requests)})
    ran, num_again = served.scheduler.ran, served.scheduler.num_again
    assert mine == {key: theirs[key] for key in ran}
    assert num_again, "the schedule has nothing that runs twice"
    assert len(mine) < len(theirs), "the schedule has no cached prefix"
    report, num_rows = report_of(tmp_path / "rec"), sum(map(len, results))
    assert report["num_tokens"] == len(ran)
    assert report["num_run_again"] == num_again
    assert report["num_positions_not_run"] == len(theirs) - len(ran)
    assert report["num_padding"] == num_rows - len(ran) - num_again
    assert report["num_passes"] == len(results)
    assert report["num_passes_of_no_request"] == -(-len(results) // 5)
    tokens = open_tokens(tmp_path / "rec")
    columns = tokens.read_columns(0, tokens.facts.num_tokens)
    assert tokens.facts.domains == ("prefill", "decode")
    prompts = {r.name: r.num_prompt for r in requests}
    lengths = np.array([prompts[names[number]] for number in columns.document.tolist()])
    np.testing.assert_array_equal(columns.domain, columns.position >= lengths)


@pytest.mark.parametrize("engine", by_day(ENGINES, ("vllm", "sglang")))
def test_folding_in_an_engine_is_a_scan_of_its_recording(engine, checkpoint, tmp_path):
    """Of the first tokens that come: those behind are left out of both."""
    for name, options in (("rec", {"keep": "hidden"}), ("folded", {"fold": True})):
        served = ENGINES[engine](some(6))
        served.record(tmp_path / name, checkpoint, seed=4, num_tokens=40, **options)
    report = report_of(tmp_path / "rec")
    assert report["num_tokens"] == 40
    assert report["has_all_tokens"]
    assert len(served.scheduler.ran) > 40
    scan(ScanRequest(checkpoint=checkpoint, tokens=str(tmp_path / "rec"), out=tmp_path / "scanned"))
    assert_same_results(tmp_path / "folded", tmp_path / "scanned")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_goes_on_when_its_recording_fails(engine, checkpoint, tmp_path):
    """One block runs its tokens in two parts, which no recording can follow."""
    bare, served = (ENGINES[engine](some()) for _ in range(2))
    for one in (bare, served):
        one.blocks[1].num_parts = 2
    served.start(str(tmp_path / "rec"), checkpoint)
    torch.testing.assert_close(served.serve(seed=5), bare.serve(seed=5), rtol=0, atol=0)
    with pytest.raises(RecordingError, match="token"):
        served.stop()
    assert not list(tmp_path.iterdir())
    assert not any(block.gate._forward_hooks for block in served.blocks)
    served.blocks[1].num_parts = 1
    served.record(tmp_path / "rec", checkpoint, seed=5)
    assert (tmp_path / "rec").is_dir()


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_change_end_a_recording_and_others_begin_none(engine, checkpoint, tmp_path):
    """In place, or by another parameter in the place of the first, as weight syncs do."""
    for is_swapped in (False, True):
        served = ENGINES[engine](some())
        served.start(str(tmp_path / "rec"), checkpoint)
        served.serve(seed=6)
        gate = served.blocks[0].gate
        if is_swapped:
            gate.weight = torch.nn.Parameter(gate.weight + 1, requires_grad=False)
        else:
            gate.weight += 1
        with pytest.raises(RecordingError, match="changed while router text/0"):
            served.stop()
    served = ENGINES[engine](some())
    served.blocks[1].gate.weight.data[3, 7] += 1 / 64
    with pytest.raises(RecordingError, match=r"text/1: the engine's '.*layers\.1\.mlp\.gate'"):
        served.start(str(tmp_path / "rec"), checkpoint)
    assert not list(tmp_path.iterdir())


def test_a_gate_whose_weight_is_packed_away_is_known_by_what_it_does(checkpoint, tmp_path):
    for name, gate in (("plain", stand_ins.GateLinear), ("packed", stand_ins.PackedGate)):
        on_vllm(some(), gate=gate).record(tmp_path / name, checkpoint, seed=7, keep="logits")
    names = names_of(tmp_path / "plain")
    assert rows_of(tmp_path / "plain", names) == rows_of(tmp_path / "packed", names)
    served = on_vllm(some(), gate=stand_ins.PackedGate)
    served.blocks[1].gate._packed[3, 7] += 1 / 64
    with pytest.raises(RecordingError, match="text/1"):
        served.start(str(tmp_path / "other"), checkpoint)


@pytest.mark.parametrize("engine", ENGINES)
def test_choices_made_inside_a_kernel_cannot_be_recorded(engine, checkpoint, tmp_path):
    served = ENGINES[engine](some())
    for block in served.blocks:
        if hasattr(block, "topk"):
            block.topk.topk_config.output_format.name = "BYPASSED"
        else:
            block.experts.is_monolithic = True
    served.record(tmp_path / "rec", checkpoint, seed=8, keep="logits")
    assert not open_tokens(tmp_path / "rec").facts.has_chosen
    with pytest.raises(RecordingError, match="does not give its choice back"):
        served.record(tmp_path / "ids", checkpoint, seed=8, keep="ids")


def test_who_listened_to_a_router_of_vllm_before_still_does(checkpoint, tmp_path):
    served = on_vllm(some())
    heard: list[torch.Tensor] = []
    router = served.blocks[0].experts.router
    router.set_capture_fn(heard.append)
    results = served.record(tmp_path / "rec", checkpoint, seed=9)
    assert len(heard) == len(results) + -(-len(results) // 5)
    assert router.capture_fn == heard.append
    assert served.blocks[1].experts.router.capture_fn is None


#: What no recording can follow: an engine, its setting, and words of the reason.
OBSTACLES = [
    (on_vllm, "vllm_config.model_config.enforce_eager", False, "compiled code"),
    (on_vllm, "vllm_config.speculative_config", object(), "speculative"),
    (on_vllm, "parallel_config.pipeline_parallel_size", 2, "pipeline"),
    (on_vllm, "parallel_config.prefill_context_parallel_size", 2, "spread over ranks"),
    (on_vllm, "parallel_config.use_sequence_parallel_moe", True, "a part of the tokens"),
    (on_vllm, "parallel_config.use_ubatching", True, "two batches"),
    (on_sglang, "server_args.speculative_algorithm", "EAGLE", "speculative"),
    (on_sglang, "server_args.pp_size", 2, "pipeline"),
    (on_sglang, "server_args.dp_size", 2, "replicas"),
    (on_sglang, "server_args.enable_dp_attention", True, "routed together"),
    (on_sglang, "server_args.attn_cp_size", 2, "spread over ranks"),
    (on_sglang, "server_args.enable_two_batch_overlap", True, "cut into parts"),
    (on_sglang, "server_args.enable_eplb", True, "places of experts"),
]


def test_an_engine_that_cannot_be_followed_says_why(checkpoint, tmp_path):
    for make, setting, value, reason in OBSTACLES:
        served = make(some(1))
        part, _, name = setting.rpartition(".")
        setattr(operator.attrgetter(part)(served.settings), name, value)
        with pytest.raises(UsageError, match=reason):
            served.start(str(tmp_path / "rec"), checkpoint)
    # nor a pass that SGLang ran as a graph
    served = on_sglang(some())
    served.settings.tp_worker.model_runner.can_run_graph = True
    with pytest.raises(UsageError, match="CUDA graph"):
        served.record(tmp_path / "graph", checkpoint, seed=10)


def test_of_a_tensor_parallel_group_the_first_rank_records(checkpoint, tmp_path, first_rank):
    first_rank.tp_rank = 1
    on_sglang(some()).record(tmp_path / "rec", checkpoint, seed=11)
    worker = worker_of(None, rank=3, tensor_parallel_size=2)
    assert not worker.moegeom_start(str(tmp_path / "rec"), checkpoint)["recording"]
    assert not worker.moegeom_stop()["recording"]
    assert not list(tmp_path.iterdir())


def test_replicas_of_vllm_make_one_recording(checkpoint, tmp_path):
    requests = some(6, seed=3)
    names: dict[int, str] = {}
    for rank in range(2):
        served = on_vllm(requests[rank::2])
        parallel = served.settings.parallel_config
        parallel.data_parallel_rank, parallel.data_parallel_size = rank, 2
        served.record(tmp_path / "rec", checkpoint, seed=12, keep="logits")
        names |= names_of(tmp_path / f"rec.0000{rank}-of-00002")
    record_whole(requests, tmp_path / "whole", checkpoint, "logits")
    theirs = rows_of(tmp_path / "whole", dict(enumerate(r.name for r in requests)))
    mine = rows_of(tmp_path / "rec", names)
    assert mine == {key: theirs[key] for key in mine}
    assert {name for name, _ in mine} == {r.name for r in requests}


@pytest.mark.parametrize("engine", ENGINES)
def test_one_recording_at_a_time_and_none_of_outputs(engine, checkpoint, tmp_path):
    served = ENGINES[engine](some())
    with pytest.raises(UsageError, match="outputs of experts"):
        served.start(str(tmp_path / "rec"), checkpoint, keep="outputs")
    served.start(str(tmp_path / engine), checkpoint)
    with pytest.raises(UsageError, match="recording already"):
        served.start(str(tmp_path / "other"), checkpoint)
    with pytest.raises(RecordingError, match="no router saw a token"):
        served.stop()


def test_sglang_finds_the_plug_in_and_every_scheduler_gets_its_methods(monkeypatch):
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
