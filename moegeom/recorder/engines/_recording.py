"""One recording of an engine: from its batches to ``RouterRecorder``, without ever stopping it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.files import write_whole
from moegeom.core.text import number_of
from moegeom.recorder.engines._gates import EngineRouters
from moegeom.recorder.engines._listening import GateTap, Listen
from moegeom.recorder.engines._requests import PHASES, Requests, RequestSlice
from moegeom.recorder.identity import Identity
from moegeom.recorder.recorder import RouterRecorder
from moegeom.recorder.taps import Deliver


@dataclass(frozen=True)
class Asked:
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
        asked: Asked,
        *,
        engine: str,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if (asked.keep or "").startswith("outputs"):
            raise UsageError(
                f"keep {asked.keep!r}: outputs of experts are not seen in an engine.",
                "Keep hidden, logits, top-logits or ids.",
            )
        self._routers, self._choices, self._asked = routers, choices, asked
        self._engine, self._rank, self._num_ranks = engine, rank, num_ranks
        self._requests = Requests(rank, num_ranks, asked.num_tokens)
        self._recorder = RouterRecorder(
            model,
            asked.out,
            keep=asked.keep,
            domains=PHASES,
            fold=asked.fold,
            num_tokens=asked.num_tokens if asked.fold else None,
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
        """Puts hooks on all gates; each call that comes back takes one off."""

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
            _padded(torch.from_numpy(rows.kept), num_real, num_rows)[:, None],
            documents=_padded(torch.from_numpy(rows.document), num_real, num_rows),
            positions=_padded(torch.from_numpy(rows.position), num_real, num_rows)[:, None],
            domain=[*rows.phases, *[PHASES[0]] * (num_rows - num_real)],
        )

    # --------------------------------------------------------------------------- what people ask
    def status(self) -> dict[str, Any]:
        """What has been recorded and what was left out, in plain values."""
        return {
            "recording": self._error is None,
            "out": self._asked.out,
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
        out = Path(self._asked.out)
        return out.with_name(f"{out.name}{part}.requests.json")


def _padded(values: torch.Tensor | None, num_real: int, num_rows: int) -> torch.Tensor:
    """``num_rows`` values: the first ``num_real`` of these (-1 where there are none), then 0."""
    if values is None:
        values = torch.full((num_real,), -1)
    return torch.nn.functional.pad(values[:num_real], (0, num_rows - num_real))
