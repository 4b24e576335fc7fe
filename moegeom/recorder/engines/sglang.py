"""A plug-in of SGLang that records routers while requests are served.

Read from SGLang 0.5.23: ``srt/plugins`` (plug-ins, hooks), ``srt/managers/scheduler.py``
(``handle_rpc_request``, ``run_batch``), ``srt/model_executor/model_runner.py`` and
``forward_batch_info.py`` (passes), ``srt/layers/moe/topk.py`` (choices).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from moegeom.core.errors import UsageError
from moegeom.recorder.engines._recording import (
    EnginePass,
    EngineRecording,
    EngineRequest,
    Obstacle,
    RequestSlice,
    choices_of,
    engine_text,
    find_gates,
    refuse_obstacles,
    wrap,
)


def plugin() -> None:
    """The entry point of group ``sglang.srt.plugins``: gives every scheduler the methods below.

    ``Engine.collective_rpc`` then calls ``moegeom_start`` and ``moegeom_stop``.
    """
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.__init__", _equip, hooks.HookType.AFTER
    )


def _equip(result: Any, scheduler: Any, *ignored: Any, **named: Any) -> None:
    methods = SchedulerMethods(scheduler)
    scheduler.moegeom_start, scheduler.moegeom_stop = methods.start, methods.stop


class SchedulerMethods:
    """What one scheduler can be asked to do."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._session: _Session | None = None

    def start(
        self,
        out: str,
        checkpoint: str | None = None,
        keep: str | None = None,
        fold: bool = False,
        num_tokens: int | None = None,
    ) -> None:
        """Begins a recording at ``out``, a path on the machine of the scheduler.

        Of the ranks of a tensor-parallel group the first one records. ``keep`` and ``fold`` are
        those of ``RouterRecorder``; behind ``num_tokens`` tokens nothing more is recorded.

        Raises
        ------
        MoeGeomError
            When this engine cannot be recorded: the reason, and how to start it.
        """
        if self._session is not None:
            raise UsageError("this engine is recording already.", "Call moegeom_stop first.")
        arguments = self._scheduler.server_args
        context = importlib.import_module("sglang.srt.runtime_context")
        if context.get_parallel().tp_rank:
            return
        _refuse_unrecordable(arguments)
        request = EngineRequest(out, checkpoint or arguments.model_path, keep, fold, num_tokens)
        self._session = _Session(self._scheduler, request)

    def stop(self) -> None:
        """Ends the recording: it is at ``out``, and beside it ``<out>.requests.json``.

        Raises
        ------
        Exception
            What went wrong while the engine ran, if anything did; then nothing is at ``out``.
        """
        session, self._session = self._session, None
        if session is not None:
            session.stop()


def _refuse_unrecordable(arguments: Any) -> None:
    """Raises UsageError for an engine whose passes cannot be told apart row by row."""
    refuse_obstacles(
        Obstacle(
            arguments.speculative_algorithm is not None,
            "it runs drafts that it may reject (speculative decoding)",
            "Start SGLang without --speculative-algorithm.",
        ),
        Obstacle(
            arguments.pp_size > 1,
            "a pipeline stage has some of the layers only",
            "Start SGLang with --pp-size 1.",
        ),
        Obstacle(
            arguments.dp_size > 1 or arguments.enable_dp_attention,
            "the tokens of several replicas are routed together",
            "Start SGLang with --dp-size 1 and without --enable-dp-attention.",
        ),
        Obstacle(
            arguments.attn_cp_size > 1,
            "the tokens of a prompt are spread over ranks",
            "Start SGLang with --attn-cp-size 1.",
        ),
        Obstacle(
            arguments.enable_two_batch_overlap or arguments.enable_pdmux,
            "its passes are cut into parts",
            "Start SGLang without --enable-two-batch-overlap and --enable-pdmux.",
        ),
        Obstacle(
            arguments.enable_eplb
            or arguments.ep_num_redundant_experts > 0
            or arguments.init_expert_location != "trivial",
            "its choices are places of experts, not experts (load balancing)",
            "Start SGLang without --enable-eplb, --init-expert-location and "
            "--ep-num-redundant-experts.",
        ),
    )


class _Session:
    """The hooks of one recording in one scheduler."""

    def __init__(self, scheduler: Any, request: EngineRequest) -> None:
        runner = scheduler.tp_worker.model_runner
        routers = find_gates(runner.model, request.checkpoint or "")
        self._recording = EngineRecording(
            runner.model,
            routers,
            choices_of(
                runner.model,
                routers,
                lambda module: hasattr(module, "topk_config") and hasattr(module, "layer_id"),
                lambda selection: (
                    functools.partial(_listen, selection)
                    if _is_visible(selection.topk_config.output_format)
                    else None
                ),
            ),
            request,
            engine=engine_text("sglang", runner.model),
        )
        self._prompts: dict[str, int] = {}
        self._stack = ExitStack()
        self._stack.callback(wrap(scheduler, "run_batch", self._run_batch))
        self._stack.callback(wrap(runner, "forward", self._forward))

    def stop(self) -> None:
        self._stack.close()
        self._recording.stop()

    def _run_batch(self, original: Callable[..., Any], batch: Any, *rest: Any, **named: Any) -> Any:
        self._prompts = {request.rid: len(request.origin_input_ids) for request in batch.reqs}
        return original(batch, *rest, **named)

    def _forward(self, original: Callable[..., Any], batch: Any, *rest: Any, **named: Any) -> Any:
        if not batch.forward_mode.is_idle():
            self._recording.begin(lambda: self._batch(batch))
        try:
            result = original(batch, *rest, **named)
        finally:
            self._recording.end()
        if result.can_run_graph:
            self._recording.fail(
                UsageError(
                    "a pass ran as a CUDA graph, which calls no hooks.",
                    "Start SGLang with --cuda-graph-backend-decode disabled and "
                    "--cuda-graph-backend-prefill disabled.",
                )
            )
        return result

    def _batch(self, batch: Any) -> EnginePass:
        if batch.forward_mode.is_decode():
            lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            starts = [int(length) - 1 for length in lengths]
            counts = [1] * len(starts)
        else:
            starts, counts = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        slices = [
            RequestSlice(request, int(start), int(count), self._prompts[request])
            for request, start, count in zip(batch.rids, starts, counts, strict=True)
        ]
        # padding is added to the batch after this
        return EnginePass(slices, batch.input_ids, lambda: len(batch.input_ids))


def _is_visible(output_format: Any) -> bool:
    """Whether the choice is given back; unset where the processor chooses."""
    return output_format is None or output_format.name == "STANDARD"


def _listen(
    selection: torch.nn.Module, heard: Callable[[torch.Tensor], None]
) -> Callable[[], None]:
    hook = selection.register_forward_hook(lambda module, inputs, result: heard(result.topk_ids))
    return hook.remove
