"""One recording of an engine, which it never stops.

The engine's routers are modules of its own, recognised by their weights; hooks listen at their
gates, and at what chooses behind them. Of each row of a pass it says the request, position and
phase, and from there on it is a recording of ``RouterRecorder``.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.files import write_whole
from moegeom.core.router import Router
from moegeom.core.shapes import Bool, Int32, Int64
from moegeom.core.text import number_of
from moegeom.recorder.recorder import RouterRecorder
from moegeom.recorder.taps import Deliver, Identity, Place, holds_rows
from moegeom.router.load import load_routers

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class EngineGate:
    """A router of the checkpoint and the engine's linear module that holds its weight."""

    router: Router
    path: str
    module: torch.nn.Module

    @property
    def holds_checkpoint(self) -> bool:
        """Whether the module has the weight that the checkpoint has."""
        return holds_rows(self.router.weight, _rows(self.module, self.router))

    def refuse_changed(self) -> None:
        """Raises RecordingError when the module no longer holds the checkpoint's weight."""
        if not self.holds_checkpoint:
            raise RecordingError(
                f"the weight of '{self.path}' changed while router {self.router.name} was being "
                "recorded: the tokens would belong to no single checkpoint.",
                "Stop before weights are updated, and make a recording for each checkpoint.",
            )


@dataclass(frozen=True, eq=False)
class EngineRouters:
    """The routers that an engine runs; ``left_out`` are stacks of the checkpoint that it does not.

    Drafts, say: layers that predict further tokens run in a model of their own.
    """

    identity: Identity
    gates: tuple[EngineGate, ...]
    left_out: tuple[str, ...]


def find_gates(model: torch.nn.Module, checkpoint: str | Path) -> EngineRouters:
    """Where each router of ``checkpoint`` is in ``model``: by shape, layer number and weight.

    Names of modules are the engine's own. A linear module is a router when it stands in a layer of
    that number, has one row for each expert, and holds the checkpoint's weight (rounded to the
    precision that the engine runs in).

    Raises
    ------
    RecordingError
        When a router of a stack that runs is not there, or not with this weight.
    MoeGeomError
        When the checkpoint cannot be read.
    """
    stored = load_routers(open_checkpoint(checkpoint))
    modules = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
    ]
    gates: list[EngineGate] = []
    missing: dict[str, RecordingError] = {}
    for router in stored.routers:
        try:
            gates.append(_gate(router, modules, stored.checkpoint))
        except RecordingError as error:
            missing.setdefault(router.stack, error)
    stacks = {gate.router.stack for gate in gates}
    for stack, error in missing.items():
        if stack in stacks or not gates:
            raise error
    identity = Identity(
        stored,
        tuple(Place(gate.router, (gate.path,)) for gate in gates),
        stored.fingerprint,
        stored.checkpoint,
        str(checkpoint),
        _versions(gates),
    )
    return EngineRouters(identity, tuple(gates), tuple(sorted(missing)))


def _gate(router: Router, modules: Iterable[tuple[str, torch.nn.Module]], label: str) -> EngineGate:
    shape = tuple(router.weight.shape)
    alike = [
        EngineGate(router, path, module)
        for path, module in modules
        if str(router.layer) in path.split(".") and _shape(module) == shape
    ]
    same = [gate for gate in alike if gate.holds_checkpoint]
    if len(same) == 1:
        return same[0]
    if same:
        raise RecordingError(
            f"router {router.name}: modules {_listed(same)} of the engine hold the same weight.",
            "One of them has to be the router: report the model.",
        )
    if alike:
        raise RecordingError(
            f"router {router.name}: the engine's {_listed(alike)} has its shape, but not the "
            f"weight that {label} has.",
            "Name the checkpoint that the engine has loaded; a router that the engine quantises "
            "cannot be recorded.",
        )
    raise RecordingError(
        f"router {router.name}: no module in layer {router.layer} of the engine's model has a "
        f"weight of {shape[0]} x {shape[1]}.",
        "Name the checkpoint that the engine has loaded; pipeline stages are not recorded.",
    )


def _listed(gates: Sequence[EngineGate]) -> str:
    return ", ".join(f"'{gate.path}'" for gate in gates)


def _weight(module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "find_gates looks at no other"
    return weight


def _shape(module: torch.nn.Module) -> tuple[int, ...]:
    """Outputs and inputs of a linear module, also of one that keeps its weight packed."""
    weight = _weight(module)
    if weight.numel():
        return tuple(weight.shape)
    return getattr(module, "output_size", 0), getattr(module, "input_size", 0)


@torch.no_grad()
def _rows(module: torch.nn.Module, router: Router) -> torch.Tensor:
    """The weight [experts, hidden]; of a packed one what the module makes of unit vectors.

    Each is one product and zeros, so that nothing is rounded.
    """
    weight = _weight(module)
    if weight.numel():
        return weight

    def response(inputs: torch.Tensor) -> torch.Tensor:
        result = module(inputs.to(weight.device, weight.dtype))
        return result[0] if isinstance(result, tuple) else result

    unit = torch.eye(router.hidden_size)
    if router.logit_bias is None:
        return response(unit).T
    return (response(unit) - response(torch.zeros_like(unit))).T


def _versions(gates: Iterable[EngineGate]) -> tuple[tuple[str, torch.Tensor, int], ...]:
    """Version counters that show a change of weights; tensors of inference mode have none."""
    return tuple(
        (f"{gate.path}.weight", weight, weight._version)
        for gate in gates
        if not (weight := _weight(gate.module)).is_inference()
    )


def beside(path: str, candidates: Mapping[str, _T]) -> _T | None:
    """The one of ``candidates``, by path, that stands closest to ``path``.

    The module around ``path`` grows until it holds one; None where it then holds several.
    """
    around = path
    while "." in around:
        around = around.rpartition(".")[0]
        inside = [one for name, one in candidates.items() if name.startswith(f"{around}.")]
        if inside:
            return inside[0] if len(inside) == 1 else None
    return None


#: Begins to call back with experts [rows, slots] whenever one router has chosen; ends it.
Listen = Callable[[Callable[[torch.Tensor], None]], Callable[[], None]]


class GateTap:
    """One gate: its input when it is called, with the choice once that is made.

    The choice comes from elsewhere (``listen``), after the gate and before the next one; a router
    whose choice is made inside a fused kernel has none. ``guard`` runs what may fail.
    """

    def __init__(
        self,
        gate: EngineGate,
        listen: Listen | None,
        deliver: Deliver,
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self._gate, self._listen, self._deliver, self._guard = gate, listen, deliver, guard
        self._inputs: torch.Tensor | None = None

    def hooks(self) -> Iterator[Callable[[], None]]:
        """Attaches hooks; each returned call removes one."""
        hook = self._gate.module.register_forward_hook(self._called, with_kwargs=True)
        yield hook.remove
        if self._listen is not None:
            yield self._listen(self._chosen)

    def _called(
        self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> None:
        self._guard(lambda: self._take(next(iter((*arguments, *named.values())))))

    def _take(self, inputs: torch.Tensor) -> None:
        # blocks change their input in place: what counts is what it is now
        if self._inputs is not None:
            raise RecordingError(
                f"router {self._gate.router.name}: its gate was called a second time before a "
                "choice was made.",
                "Its choice is made where it cannot be heard: keep cannot be met for this engine.",
            )
        rows = inputs.detach().reshape(-1, self._gate.router.hidden_size).clone()
        if self._listen is None:
            self._deliver(self._gate.router.name, rows, None)
        else:
            self._inputs = rows

    def _chosen(self, experts: torch.Tensor) -> None:
        self._guard(lambda: self._join(experts))

    def _join(self, experts: torch.Tensor) -> None:
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        router = self._gate.router
        # columns of shared experts that were fused in stand behind
        chosen = experts.detach()[:, : router.rule.top_k].clone()
        self._deliver(router.name, inputs, chosen)


def choices_of(
    model: torch.nn.Module,
    routers: EngineRouters,
    is_chooser: Callable[[Any], bool],
    listen: Callable[[Any], Listen | None],
) -> dict[str, Listen]:
    """By path of its gate, how to hear what each router chooses; fused kernels tell nothing."""
    choosers: dict[str, Any] = {p: m for p, m in model.named_modules() if is_chooser(m)}
    nearest = {gate.path: beside(gate.path, choosers) for gate in routers.gates}
    return {
        path: hear
        for path, module in nearest.items()
        if module is not None and (hear := listen(module)) is not None
    }


def engine_text(package: str, model: torch.nn.Module) -> str:
    """``vllm 0.32.0, bfloat16``: the engine's package with its version, and how the model runs."""
    version = getattr(sys.modules.get(package), "__version__", "of unknown version")
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"{package} {version}, {dtype}"


def wrap(owner: Any, method: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Calls ``around(original, *arguments)`` in place of a method of this one object; ends it."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, method, wrapped)
    return lambda: delattr(owner, method)


#: Populations of a recording: tokens of prompts, and tokens that the engine generated.
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class RequestSlice:
    """Consecutive rows of one request: positions ``start``, ``start + 1`` and so on.

    ``num_prompt`` is the number of tokens of its prompt.
    """

    request: str
    start: int
    num_rows: int
    num_prompt: int


@dataclass(frozen=True, eq=False)
class PassRows:
    """The rows of one pass, padding left out; ``is_recorded`` is False for rows to leave out."""

    document: Int64[np.ndarray, "rows"]
    position: Int32[np.ndarray, "rows"]
    is_prompt: Bool[np.ndarray, "rows"]
    is_recorded: Bool[np.ndarray, "rows"]

    @property
    def phases(self) -> list[str]:
        """The phase of each row, by name."""
        return [PHASES[0] if prompt else PHASES[1] for prompt in self.is_prompt]


@dataclass
class _Seen:
    """A request: the number of its document, and the positions that have been run.

    Those are ``first`` to ``next``, and what was run of the cached ones in front when the request
    lost its cache: up to ``front``.
    """

    document: int
    num_prompt: int
    first: int
    next: int
    front: int = 0
    num_run: int = 0
    num_recorded: int = 0

    def run(self, places: Int64[np.ndarray, "rows"]) -> Bool[np.ndarray, "rows"]:
        """Which of these positions are run for the first time; all are marked as run."""
        is_new = (places >= self.next) | ((places >= self.front) & (places < self.first))
        end = int(places[-1]) + 1
        if places[0] < self.first:
            self.front = max(self.front, min(end, self.first))
        self.next = max(self.next, end)
        self.num_run += int(is_new.sum())
        return is_new


@dataclass
class Requests:
    """All requests of a recording; documents are numbered as they come, in steps of ``stride``.

    A position counts once: an engine runs tokens again after it has taken a request's cache away.
    Behind ``num_tokens`` recorded tokens nothing more is kept.
    """

    first_document: int = 0
    stride: int = 1
    num_tokens: int | None = None
    num_recorded: int = 0
    num_again: int = 0
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def rows(self, slices: Sequence[RequestSlice]) -> PassRows:
        """The rows of a pass, in the order in which its slices stand."""
        total = sum(one.num_rows for one in slices)
        document, position = np.empty(total, np.int64), np.empty(total, np.int32)
        is_prompt, is_recorded = np.empty(total, bool), np.empty(total, bool)
        first = 0
        for one in slices:
            here = slice(first, first + one.num_rows)
            seen = self._of(one)
            places = np.arange(one.start, one.start + one.num_rows)
            is_new = seen.run(places)
            room = np.cumsum(is_new) <= self._room()
            document[here], position[here] = seen.document, places
            is_prompt[here], is_recorded[here] = places < one.num_prompt, is_new & room
            num_kept = int(is_recorded[here].sum())
            seen.num_recorded += num_kept
            self.num_recorded += num_kept
            self.num_again += int((~is_new).sum())
            first += one.num_rows
        return PassRows(document, position, is_prompt, is_recorded)

    def _of(self, one: RequestSlice) -> _Seen:
        if one.request not in self._seen:
            number = self.first_document + len(self._seen) * self.stride
            self._seen[one.request] = _Seen(number, one.num_prompt, one.start, one.start)
        return self._seen[one.request]

    def _room(self) -> int:
        if self.num_tokens is None:
            return np.iinfo(np.int64).max
        return self.num_tokens - self.num_recorded

    @property
    def is_full(self) -> bool:
        """Whether all tokens that were asked for have come."""
        return self._room() <= 0

    @property
    def num_not_run(self) -> int:
        """Positions that no pass had: cached prefixes, or run before the recording began."""
        return sum(seen.next - seen.num_run for seen in self._seen.values())

    def as_json(self) -> list[dict[str, int | str]]:
        """One record for each request, in the order of documents."""
        return [
            {
                "request": name,
                "document": seen.document,
                "num_prompt_tokens": seen.num_prompt,
                "first_position": seen.first,
                "num_recorded": seen.num_recorded,
            }
            for name, seen in self._seen.items()
        ]


@dataclass(frozen=True)
class EngineRequest:
    """What a recording is to be; see ``RouterRecorder``.

    ``num_tokens`` ends it: tokens behind are left out. ``checkpoint`` None is the engine's own.
    """

    out: str
    checkpoint: str | None = None
    keep: str | None = None
    fold: bool = False
    num_tokens: int | None = None


@dataclass(frozen=True, eq=False)
class EnginePass:
    """A pass as the engine has laid it out: slices of requests, then padding.

    ``token_id`` is [rows] or longer, None where the engine has none; ``num_rows`` says how many
    rows the pass has in all, asked when the first gate is called.
    """

    slices: Sequence[RequestSlice]
    token_id: torch.Tensor | None
    num_rows: Callable[[], int]


@dataclass(frozen=True)
class Obstacle:
    """Something that keeps an engine from being recorded, and what to start it with instead."""

    is_there: bool
    reason: str
    hint: str


def refuse_obstacles(*obstacles: Obstacle) -> None:
    """Raises UsageError for the first obstacle that is there."""
    for obstacle in obstacles:
        if obstacle.is_there:
            raise UsageError(f"this engine cannot be recorded: {obstacle.reason}.", obstacle.hint)


class EngineRecording:
    """Listens at the gates of an engine until ``stop``.

    The engine calls ``begin`` before each pass and ``end`` after it; passes without ``begin`` are
    counted and left out. What goes wrong is kept: the engine goes on, and ``stop`` raises it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        routers: EngineRouters,
        choices: Mapping[str, Listen],
        request: EngineRequest,
        *,
        engine: str,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if (request.keep or "").startswith("outputs"):
            raise UsageError(
                f"keep {request.keep!r}: outputs of experts are not seen in an engine.",
                "Keep hidden, logits, top-logits or ids.",
            )
        self._routers, self._choices, self._request = routers, choices, request
        self._engine, self._rank, self._num_ranks = engine, rank, num_ranks
        self._requests = Requests(rank, num_ranks, request.num_tokens)
        self._recorder = RouterRecorder(
            model,
            request.out,
            keep=request.keep,
            domains=PHASES,
            fold=request.fold,
            num_tokens=request.num_tokens if request.fold else None,
            engine=engine,
            rank=rank,
            num_ranks=num_ranks,
            taps=self,
        )
        self._batch: EnginePass | None = None
        self._is_open = False
        self._error: Exception | None = None
        self._num_padding = self._num_passes = self._num_other_passes = 0
        self._first_gate = routers.gates[0].router.name
        self._recorder.__enter__()

    # ---------------------------------------------------------------- what RouterRecorder asks for
    @property
    def identity(self) -> Identity:
        """The routers that are recorded."""
        return self._routers.identity

    def hooks(self, deliver: Deliver) -> Iterator[Callable[[], None]]:
        """Attaches hooks to all gates; each returned call removes one."""

        def hear(name: str, inputs: torch.Tensor, chosen: torch.Tensor | None) -> None:
            if self._announced(name):
                deliver(name, inputs, chosen)

        for gate in self._routers.gates:
            yield from GateTap(gate, self._choices.get(gate.path), hear, self._guard).hooks()

    # ------------------------------------------------------------------------ what an engine calls
    def begin(self, batch: Callable[[], EnginePass]) -> None:
        """Says what the next pass holds; ``batch`` is called here, and may fail."""

        def take() -> None:
            self._batch = None if self._requests.is_full else batch()
            self._is_open = False

        self._guard(take)

    def end(self) -> None:
        """The pass is over: gates that are called now belong to none."""
        self._batch, self._is_open = None, False

    def fail(self, error: Exception) -> None:
        """Ends the recording for ``error``, which ``stop`` raises; nothing of it stays."""
        if self._error is not None:
            return
        self._error = error
        logging.getLogger("moegeom").error("the recording was given up: %s", error)
        with ExitStack() as stack:
            stack.push(lambda *ignored: True)
            self._recorder.__exit__(type(error), error, error.__traceback__)

    def _guard(self, action: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the engine goes on, whatever it is
            self.fail(error)

    def _announced(self, name: str) -> bool:
        """Whether this gate's call belongs to a pass; the first one of a pass announces it."""
        if self._batch is None:
            self._num_other_passes += name == self._first_gate and not self._requests.is_full
            return False
        if not self._is_open:
            self._announce(self._batch)
            self._is_open = True
        return True

    def _announce(self, batch: EnginePass) -> None:
        rows = self._requests.rows(batch.slices)
        num_rows, num_real = batch.num_rows(), len(rows.document)
        if num_rows < num_real:
            raise RecordingError(
                f"the engine's pass has {number_of(num_rows, 'row')}; its batch lists "
                f"{number_of(num_real, 'token')}.",
                "A pass that is cut into parts, or spread over ranks, cannot be recorded.",
            )
        self._num_padding += num_rows - num_real
        self._num_passes += 1
        self._recorder.tokens(
            _padded(batch.token_id, num_real, num_rows)[:, None],
            _padded(torch.from_numpy(rows.is_recorded), num_real, num_rows)[:, None],
            documents=_padded(torch.from_numpy(rows.document), num_real, num_rows),
            positions=_padded(torch.from_numpy(rows.position), num_real, num_rows)[:, None],
            domain=[*rows.phases, *[PHASES[0]] * (num_rows - num_real)],
        )

    # --------------------------------------------------------------------------- what people ask
    def status(self) -> dict[str, Any]:
        """What has been recorded and what was left out, in plain values."""
        return {
            "recording": self._error is None,
            "out": self._request.out,
            "engine": self._engine,
            "routers": [gate.router.name for gate in self._routers.gates],
            "stacks_left_out": list(self._routers.left_out),
            "num_passes": self._num_passes,
            "num_tokens": self._requests.num_recorded,
            "has_all_tokens": self._requests.is_full,
            "num_padding": self._num_padding,
            "num_run_again": self._requests.num_again,
            "num_positions_not_run": self._requests.num_not_run,
            "num_passes_of_no_request": self._num_other_passes,
            "has_chosen": self._recorder.has_chosen,
            "error": None if self._error is None else str(self._error),
        }

    def stop(self) -> dict[str, Any]:
        """Ends the recording, and writes which request is which document beside it.

        Raises
        ------
        Exception
            What went wrong while the engine ran.
        """
        if self._error is None:
            self._finish()
        if self._error is not None:
            raise self._error
        report = {**self.status(), "recording": False}
        write_whole(
            self._requests_file(),
            json.dumps({**report, "requests": self._requests.as_json()}, indent=1) + "\n",
        )
        return report

    def _finish(self) -> None:
        self.end()
        try:
            for gate in self._routers.gates:
                gate.refuse_changed()
        except RecordingError as error:
            self.fail(error)
            return
        try:
            self._recorder.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - raised by stop, whatever it is
            self._error = error

    def _requests_file(self) -> Path:
        part = "" if self._num_ranks == 1 else f".{self._rank:05d}-of-{self._num_ranks:05d}"
        out = Path(self._request.out)
        return out.with_name(f"{out.name}{part}.requests.json")


def _padded(values: torch.Tensor | None, num_real: int, num_rows: int) -> torch.Tensor:
    """``num_rows`` values: the first ``num_real`` of these (-1 where there are none), then 0."""
    if values is None:
        values = torch.full((num_real,), -1)
    return torch.nn.functional.pad(values[:num_real], (0, num_rows - num_real))
