"""Engines in small: the classes and attributes of vLLM and SGLang that a recording touches.

Each is named as in the sources of vLLM 0.32.0 and SGLang 0.5.23. The mathematics is that of
transformers: a scheduler cuts requests into passes as it likes, and blocks of experts, laid out as
each engine lays them out, read what the same model reads of whole requests.

All arithmetic is such that no order of addition shows: router inputs are rounded to sixteenths and
gates to sixty-fourths, so that logits are exact, and everything else runs in float64.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tests.unit.capture.trained import tiny_model


# ------------------------------------------------------------------------------------- the model
def exact_model() -> Any:
    model = tiny_model(5, experts_implementation="eager").double().eval()
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.mul_(10).mul_(64).round_().div_(64)
        layer.post_attention_layernorm.register_forward_hook(
            lambda module, given, result: (result * 16).round() / 16
        )
    return model


@torch.no_grad()
def router_inputs(requests: Sequence["Request"]) -> dict[str, list[torch.Tensor]]:
    model, read = exact_model(), []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0][0]))
    for request in requests:
        model(input_ids=torch.tensor([request.tokens]), use_cache=False)
    return {request.name: [read.pop(0), read.pop(0)] for request in requests}


@dataclass(frozen=True)
class Piece:
    request: str
    start: int
    num_tokens: int


# ------------------------------------------------------------------------------------- requests
@dataclass(frozen=True)
class Request:
    name: str
    tokens: tuple[int, ...]
    num_prompt: int


def some_requests(rng: random.Random, number: int) -> list[Request]:
    """Requests of a few tokens; every third begins as the one before it does."""
    made: list[Request] = []
    for place in range(number):
        tokens = [rng.randrange(64) for _ in range(rng.randrange(4, 20))]
        if place % 3 == 2:
            tokens[:3] = made[-1].tokens[:3]
        made.append(Request(f"r{place}", tuple(tokens), rng.randrange(3, len(tokens))))
    return made


class Scheduler:
    """Cuts requests into passes at random: chunks of prompts, single generated tokens.

    Now and then a request loses its cache and starts anew, or finds the beginning of another one
    in the cache and skips it.
    """

    def __init__(self, requests: Sequence[Request], rng: random.Random) -> None:
        self.requests = {request.name: request for request in requests}
        self._rng = rng
        self.done = dict.fromkeys(self.requests, 0)
        self.ran: set[tuple[str, int]] = set()
        self.num_again = 0

    def passes(self) -> Iterator[list[Piece]]:
        while open_ones := [r for r in self.requests.values() if self.done[r.name] < len(r.tokens)]:
            count = self._rng.randint(1, min(4, len(open_ones)))
            pieces = [self._piece(r) for r in self._rng.sample(open_ones, count)]
            yield pieces
            for piece in pieces:
                end = piece.start + piece.num_tokens
                places = {(piece.request, place) for place in range(piece.start, end)}
                self.num_again += len(places & self.ran)
                self.ran |= places
                self.done[piece.request] = end

    def _piece(self, request: Request) -> Piece:
        done = self.done[request.name]
        if done and self._rng.random() < 0.1:
            done = 0
        elif not done:
            done = 3 * self._is_begun(request)
        left = max(request.num_prompt - done, 1)
        return Piece(request.name, done, self._rng.randint(1, left))

    def _is_begun(self, request: Request) -> bool:
        """Whether the keys of another request that begins with the same three tokens are there."""
        return any(
            other.tokens[:3] == request.tokens[:3] and self.done[other.name] >= 3
            for other in self.requests.values()
        )


# ------------------------------------------------------------------------------- vLLM's modules
class GateLinear(nn.Module):
    """``model_executor/layers/fused_moe/router/gate_linear.py``: logits, and a bias or None."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.output_size, self.input_size = weight.shape

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden @ self.weight.T, None


class PackedGate(GateLinear):
    """A gate of the processor's back end: the weight is repacked, and its place is empty."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self._packed = weight.clone()
        self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden @ self._packed.T, None


def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(logits.softmax(-1, dtype=torch.float), 2, dim=-1)


class BaseRouter:
    """``router/base_router.py``: not a module; who wants to hear the choice sets a function."""

    def __init__(self) -> None:
        self.capture_fn: Any = None

    def set_capture_fn(self, capture_fn: Any) -> None:
        self.capture_fn = capture_fn

    def select_experts(self, hidden: Any, logits: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = choose(logits)
        if self.capture_fn is not None:
            self.capture_fn(chosen)
        return weights, chosen.int()


class MoERunner(nn.Module):
    """``runner/moe_runner.py``: chooses by its router, or inside a fused kernel (monolithic)."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = BaseRouter()
        self.routed_experts = experts
        self.is_monolithic = False

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        chosen = (
            choose(logits) if self.is_monolithic else self.router.select_experts(hidden, logits)
        )
        return self.routed_experts(hidden, chosen[1].long(), chosen[0].to(hidden.dtype))


class Block(nn.Module):
    num_parts = 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        parts = [self.route(part) for part in rows.chunk(self.num_parts)]
        return torch.cat(parts).view(hidden.shape)


class OlmoeMoE(Block):
    """``models/olmoe.py``."""

    def __init__(self, block: Any, gate: type[GateLinear]) -> None:
        super().__init__()
        self.gate = gate(block.gate.weight.data)
        self.experts = MoERunner(block.experts)

    def route(self, rows: torch.Tensor) -> torch.Tensor:
        logits, _ = self.gate(rows)
        return self.experts(rows, logits)


# ----------------------------------------------------------------------------- SGLang's modules
class StandardTopKOutput(NamedTuple):
    """``srt/layers/moe/topk.py``."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class TopK(nn.Module):
    """``srt/layers/moe/topk.py``; here with a column of a shared expert behind the others."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer_id = layer
        self.topk_config = SimpleNamespace(output_format=SimpleNamespace(name="STANDARD"))

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> StandardTopKOutput:
        weights, chosen = choose(logits)
        shared = torch.full_like(chosen[:, :1], 8)
        return StandardTopKOutput(weights, torch.cat([chosen, shared], dim=1), logits)


class SparseMoeBlock(Block):
    """``srt/models/olmoe.py``."""

    def __init__(self, block: Any, layer: int) -> None:
        super().__init__()
        self.gate = GateLinear(block.gate.weight.data)
        self.topk = TopK(layer)
        self.experts = block.experts

    def route(self, rows: torch.Tensor) -> torch.Tensor:
        logits, _ = self.gate(rows)
        weights, chosen, _ = self.topk(rows, logits)
        return self.experts(rows, chosen[:, :2], weights.to(rows.dtype))


# --------------------------------------------------------------------------------------- engines
@dataclass
class Engine:
    """What both have in common: a model, its requests, and rows of padding behind each pass."""

    model: Any
    requests: dict[str, Request]
    padded_to: int = 1

    def __post_init__(self) -> None:
        self._inputs = router_inputs([*self.requests.values()])

    def ids_of(self, pieces: Sequence[Piece]) -> list[int]:
        return [
            t for p in pieces for t in self.requests[p.request].tokens[p.start :][: p.num_tokens]
        ]

    def lay_out(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.ids_of(pieces)
        positions = [p.start + i for p in pieces for i in range(p.num_tokens)]
        padding = [0] * (-len(ids) % self.padded_to)
        return torch.tensor(ids + padding), torch.tensor(positions + padding)

    def call(self, pieces: Sequence[Piece], num_rows: int) -> torch.Tensor:
        total = torch.zeros(num_rows, 32, dtype=torch.float64)
        for number, layer in enumerate(self.model.model.layers):
            rows = torch.zeros_like(total)
            end = 0
            for p in pieces:
                start, end = end, end + p.num_tokens
                rows[start:end] = self._inputs[p.request][number][p.start :][: p.num_tokens]
            total = total + layer.mlp(rows[None])[0]
        return total


class ServedByVLLM(nn.Module):
    """The model as vLLM's runner calls it: flat rows, by name."""

    def __init__(self, gate: type[GateLinear] = GateLinear) -> None:
        super().__init__()
        whole = exact_model()
        for layer in whole.model.layers:
            layer.mlp = OlmoeMoE(layer.mlp, gate)
        self.language_model = whole
        self.engine: list[Engine] = []
        self.pieces: Sequence[Piece] = ()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **ignored: Any) -> Any:
        return self.engine[0].call(self.pieces, len(input_ids))


class GPUModelRunner:
    """``v1/worker/gpu_model_runner.py``: one batch for all passes, requests in its own order."""

    def __init__(self, model: ServedByVLLM, engine: Engine) -> None:
        self.model, self.engine = model, engine
        self.input_batch = SimpleNamespace(
            req_ids=[], num_reqs=0, num_computed_tokens_cpu=None, num_prompt_tokens=None
        )
        self.input_ids = SimpleNamespace(gpu=None)

    def get_model(self) -> nn.Module:
        return self.model

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        pieces = scheduler_output.pieces
        # what is left of an earlier, longer batch stands behind
        self.input_batch.req_ids = [p.request for p in pieces] + ["of an earlier pass"]
        self.input_batch.num_reqs = len(pieces)
        self.input_batch.num_computed_tokens_cpu = np.array([p.start for p in pieces] + [99])
        self.input_batch.num_prompt_tokens = np.array(
            [self.engine.requests[p.request].num_prompt for p in pieces] + [99]
        )
        ids, positions = self.engine.lay_out(pieces)
        self.input_ids.gpu = ids
        self.model.pieces = pieces
        return self.model(input_ids=ids, positions=positions)

    def _dummy_run(self, num_tokens: int) -> None:
        self.model.pieces = ()
        zeros = torch.zeros(num_tokens, dtype=torch.long)
        self.model(input_ids=zeros, positions=zeros)


class GPUModelRunnerV2:
    """``v1/worker/gpu/model_runner.py``: a batch of its own for each pass."""

    def __init__(self, model: ServedByVLLM, engine: Engine) -> None:
        self.model, self.engine = model, engine
        names = list(engine.requests)
        self._places = {name: place + 3 for place, name in enumerate(names)}
        prompts = np.zeros(len(names) + 3, np.int32)
        prompts[3:] = [request.num_prompt for request in engine.requests.values()]
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=prompts))

    def get_model(self) -> nn.Module:
        return self.model

    def prepare_inputs(self, scheduler_output: Any, batch_req_state: Any) -> Any:
        pieces = scheduler_output.pieces
        ids, positions = self.engine.lay_out(pieces)
        return SimpleNamespace(
            req_ids=[p.request for p in pieces],
            num_scheduled_tokens=np.array([p.num_tokens for p in pieces]),
            num_computed_tokens_np=np.array([p.start for p in pieces]),
            idx_mapping_np=np.array([self._places[p.request] for p in pieces]),
            input_ids=ids,
            positions=positions,
        )

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False
    ) -> Any:
        if dummy_run:
            self.model.pieces = ()
            zeros = torch.zeros(3, dtype=torch.long)
            return self.model(input_ids=zeros, positions=zeros)
        batch = self.prepare_inputs(scheduler_output, None)
        self.model.pieces = scheduler_output.pieces
        return self.model(input_ids=batch.input_ids, positions=batch.positions)

    def _dummy_run(self, num_tokens: int) -> None:
        self.execute_model(None, dummy_run=True)


class ForwardMode(Enum):
    """``srt/model_executor/forward_batch_info.py``."""

    EXTEND = auto()
    DECODE = auto()
    IDLE = auto()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE


class ModelRunner:
    """``srt/model_executor/model_runner.py``: calls ``model.forward``, past hooks of the model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        whole = exact_model()
        for place, layer in enumerate(whole.model.layers):
            layer.mlp = SparseMoeBlock(layer.mlp, place)
        self.model = engine.model = whole
        self.can_run_graph = False

    def forward(self, forward_batch: Any) -> Any:
        if forward_batch.forward_mode.is_idle():
            logits = self.engine.call((), 2)
        else:
            # padding is added to the batch itself
            forward_batch.input_ids, _ = self.engine.lay_out(forward_batch.pieces)
            logits = self.engine.call(forward_batch.pieces, len(forward_batch.input_ids))
        return SimpleNamespace(logits_output=logits, can_run_graph=self.can_run_graph)


class SGLangScheduler:
    """``srt/managers/scheduler.py``."""

    def __init__(self, engine: Engine, server_args: Any) -> None:
        self.engine, self.server_args = engine, server_args
        self.tp_worker = SimpleNamespace(model_runner=ModelRunner(engine))

    def run_batch(self, batch: Any) -> Any:
        return self.tp_worker.model_runner.forward(batch.forward_batch)

    def batch_of(self, pieces: Sequence[Piece]) -> Any:
        """A batch and what its runner sees of it: decoding if each piece is a generated token."""
        requests = [self.engine.requests[p.request] for p in pieces]
        is_decode = all(
            p.num_tokens == 1 and p.start >= r.num_prompt
            for p, r in zip(pieces, requests, strict=True)
        )
        lengths = torch.tensor([p.start + p.num_tokens for p in pieces])
        forward = SimpleNamespace(
            pieces=pieces,
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            rids=[p.request for p in pieces],
            input_ids=torch.tensor(self.engine.ids_of(pieces)),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            extend_prefix_lens_cpu=None if is_decode else [p.start for p in pieces],
            extend_seq_lens_cpu=None if is_decode else [p.num_tokens for p in pieces],
        )
        reqs = [
            SimpleNamespace(rid=r.name, origin_input_ids=list(r.tokens[: r.num_prompt]))
            for r in requests
        ]
        return SimpleNamespace(reqs=reqs, forward_batch=forward)
