"""A worker extension of vLLM that records routers while requests are served.

Read from vLLM 0.32.0: ``v1/worker/worker_base.py`` (extensions), ``v1/worker/gpu_model_runner.py``
and ``v1/worker/gpu/model_runner.py`` (the two model runners), ``model_executor/layers/fused_moe``
(gates, ``BaseRouter.set_capture_fn``).
"""

from __future__ import annotations

import functools
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


class RecorderExtension:
    """For ``--worker-extension-cls``: three methods for ``collective_rpc``.

    vLLM makes this a base class of its worker. Names begin with ``moegeom``, for vLLM refuses an
    extension that has a name in common with the worker.
    """

    _moegeom: _Session | None = None

    # of vLLM's worker
    model_runner: Any
    parallel_config: Any
    vllm_config: Any
    rank: int

    def moegeom_start(
        self,
        out: str,
        checkpoint: str | None = None,
        keep: str | None = None,
        fold: bool = False,
        num_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Begins a recording at ``out``, a path on the machine of the worker.

        Of the ranks of a tensor-parallel group the first one records; replicas record a part each,
        which are merged when the last one stops. ``keep`` and ``fold`` are those of
        ``RouterRecorder``; behind ``num_tokens`` tokens nothing more is recorded.

        Raises
        ------
        MoeGeomError
            When this engine cannot be recorded: the reason, and how to start it.
        """
        if self._moegeom is not None:
            raise UsageError(
                "this worker is recording already.", "Call moegeom_stop first, or moegeom_status."
            )
        parallel = self.parallel_config
        if self.rank % parallel.tensor_parallel_size:
            return {"recording": False, "reason": "the first tensor-parallel rank records"}
        _refuse_unrecordable(self.vllm_config)
        request = EngineRequest(
            out, checkpoint or self.vllm_config.model_config.model, keep, fold, num_tokens
        )
        self._moegeom = _Session(
            self.model_runner, request, parallel.data_parallel_rank, parallel.data_parallel_size
        )
        return self._moegeom.recording.status()

    def moegeom_status(self) -> dict[str, Any]:
        """What has been recorded so far, what was left out, and the error that ended it, if any."""
        return {"recording": False} if self._moegeom is None else self._moegeom.recording.status()

    def moegeom_stop(self) -> dict[str, Any]:
        """Ends the recording: it is at ``out``, and beside it ``<out>.requests.json``.

        Raises
        ------
        Exception
            What went wrong while the engine ran, if anything did; then nothing is at ``out``.
        """
        session, self._moegeom = self._moegeom, None
        return {"recording": False} if session is None else session.stop()


def _refuse_unrecordable(config: Any) -> None:
    """Raises UsageError for an engine whose passes cannot be told apart row by row."""
    parallel = config.parallel_config
    refuse_obstacles(
        Obstacle(
            not config.model_config.enforce_eager,
            "compiled code and CUDA graphs call no hooks",
            "Start vLLM with --enforce-eager.",
        ),
        Obstacle(
            config.speculative_config is not None,
            "it runs drafts that it may reject (speculative decoding)",
            "Start vLLM without --speculative-config.",
        ),
        Obstacle(
            parallel.pipeline_parallel_size > 1,
            "a pipeline stage has some of the layers only",
            "Start vLLM with --pipeline-parallel-size 1.",
        ),
        Obstacle(
            parallel.prefill_context_parallel_size > 1,
            "the tokens of a prompt are spread over ranks",
            "Start vLLM with --prefill-context-parallel-size 1.",
        ),
        Obstacle(
            parallel.use_sequence_parallel_moe,
            "each tensor-parallel rank routes a part of the tokens",
            "Start vLLM without --enable-expert-parallel, or with one replica.",
        ),
        Obstacle(
            parallel.use_ubatching,
            "its passes are cut into two batches",
            "Start vLLM without --enable-dbo.",
        ),
    )


class _Session:
    """The hooks of one recording in one worker."""

    def __init__(self, runner: Any, request: EngineRequest, rank: int, num_ranks: int) -> None:
        model = runner.get_model()
        routers = find_gates(model, request.checkpoint or "")
        self.recording = EngineRecording(
            model,
            routers,
            choices_of(
                model,
                routers,
                lambda module: hasattr(getattr(module, "router", None), "set_capture_fn"),
                lambda runner: (
                    None if runner.is_monolithic else functools.partial(_listen, runner.router)
                ),
            ),
            request,
            engine=engine_text("vllm", model),
            rank=rank,
            num_ranks=num_ranks,
        )
        self._runner = runner
        self._scheduled: Any = None
        self._prepared: Any = None
        self._stack = ExitStack()
        self._stack.callback(wrap(runner, "execute_model", self._execute))
        # the runner that has no batch of its own makes one for each pass
        self._has_own_batch = hasattr(runner, "input_batch")
        if not self._has_own_batch:
            self._stack.callback(wrap(runner, "prepare_inputs", self._prepare))
        hook = model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._stack.callback(hook.remove)

    def stop(self) -> dict[str, Any]:
        self._stack.close()
        return self.recording.stop()

    def _execute(
        self, original: Callable[..., Any], scheduled: Any, *rest: Any, **named: Any
    ) -> Any:
        # dummy passes keep replicas in step; they have requests of no one
        self._scheduled = None if named.get("dummy_run") else scheduled
        try:
            return original(scheduled, *rest, **named)
        finally:
            self._scheduled = self._prepared = None
            self.recording.end()

    def _prepare(self, original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        self._prepared = original(*rest, **named)
        return self._prepared

    def _before(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._scheduled is not None:
            self.recording.begin(lambda: self._batch(named))

    def _batch(self, named: dict[str, Any]) -> EnginePass:
        token_id = named.get("input_ids")
        num_rows = len(named["inputs_embeds"] if token_id is None else token_id)
        if self._has_own_batch:
            slices, ids = self._slices_of_runner(), self._runner.input_ids.gpu
        else:
            slices, ids = self._slices_of_pass(), self._prepared.input_ids
        return EnginePass(slices, ids if token_id is None else token_id, lambda: num_rows)

    def _slices_of_runner(self) -> list[RequestSlice]:
        batch = self._runner.input_batch
        return [
            RequestSlice(
                request,
                int(batch.num_computed_tokens_cpu[place]),
                self._scheduled.num_scheduled_tokens[request],
                int(batch.num_prompt_tokens[place]),
            )
            for place, request in enumerate(batch.req_ids[: batch.num_reqs])
        ]

    def _slices_of_pass(self) -> list[RequestSlice]:
        batch = self._prepared
        prompts = self._runner.req_states.prompt_len.np[batch.idx_mapping_np]
        return [
            RequestSlice(request, int(start), int(count), int(prompt))
            for request, start, count, prompt in zip(
                batch.req_ids,
                batch.num_computed_tokens_np,
                batch.num_scheduled_tokens,
                prompts,
                strict=True,
            )
        ]


def _listen(router: Any, heard: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Hears logical experts, before load balancing maps them; whoever heard before still does."""
    before = router.capture_fn

    def capture(experts: torch.Tensor) -> None:
        if before is not None:
            before(experts)
        heard(experts)

    router.set_capture_fn(capture)
    return lambda: router.set_capture_fn(before)
