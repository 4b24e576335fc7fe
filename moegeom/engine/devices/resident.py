"""Router inputs that are on a device already, such as tensors of a running model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.router import Router
from moegeom.core.tokens import SourceFacts
from moegeom.engine.devices.device_router import (
    device_router,
    refuse,
    route_batch,
    start_counters,
    states_of,
)
from moegeom.engine.loop import Progress
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.cuda.device import Device, DeviceArray, DeviceError
from moegeom.kernels.cuda.route import ON_DEVICE, RouteOutputs
from moegeom.kernels.reductions.choices import TOKENS
from moegeom.kernels.table import load_kernels

#: Number of every token that is counted, which the progress is read from.
_TOKENS = "token_counts"


class DeviceFold:
    """Counts tensors of one router's inputs where they are; nothing is copied to the host.

    Tensors are taken by DLPack, in bfloat16 or float32, C-ordered, all of one dtype. Tokens have no
    document and no domain; they share blocks by runs of 256. The product has the shape of the
    tensor, so that another cut of the stream may differ in the last bit of a logit.

    Raises
    ------
    UsageError
        For reductions that devices do not keep, rules that they do not route, and tasks that are
        not about all router inputs.
    """

    def __init__(self, task: Task, device: Device) -> None:
        others = sorted(set(task.reductions) - set(ON_DEVICE))
        if others:
            folds = ", ".join(ON_DEVICE)
            raise UsageError(f"A device does not keep {', '.join(others)}.", f"Known: {folds}.")
        refuse(task)
        if task.source.facts.stage != "router_input" or task.options.exclude_first:
            raise UsageError(
                f"Tensors are router inputs of every position; asked for "
                f"{task.source.facts.stage.replace('_', ' ')} without the first "
                f"{task.options.exclude_first} of a document."
            )
        self._task, self._device, self._queue = task, device, device.queue()
        names = dict.fromkeys((_TOKENS, *task.reductions))
        self._counters = start_counters(task, device, names)
        self._routers: dict[str, Any] = {}
        self._room: dict[tuple[str, int], DeviceArray] = {}
        self._taken = 0

    def __del__(self) -> None:
        # work on its way writes to memory that would be another's, unless everything ends
        queue = getattr(self, "_queue", None)
        if queue is not None and not sys.is_finalizing():
            with suppress(DeviceError):
                queue.finish()

    def take(self, tensor: Any) -> None:
        """Queues the work on [tokens, hidden] more inputs, which must stay until ``wait``.

        Raises
        ------
        UsageError
            For a tensor of another width or dtype.
        """
        values = self._queue.adopt(tensor)
        kind = {"uint16": "bfloat16", "float32": "float32"}.get(values.dtype.name)
        hidden = self._task.prepared.router.hidden_size
        if kind is None or len(values.shape) != 2 or values.shape[1] != hidden:
            shape = " x ".join(map(str, values.shape))
            raise UsageError(
                f"A tensor of {shape} numbers in {values.dtype.name} was given to router "
                f"{self._task.prepared.router.name}; expected tokens x {hidden} in bfloat16 or "
                "float32."
            )
        if not len(values):
            return
        if kind not in self._routers:
            self._routers[kind] = device_router(self._task, self._device, kind)
        router, tokens = self._routers[kind], len(values)
        logits = self._at_least("logits", tokens, router.logit_columns, np.float32)
        norm = self._at_least("norm", tokens, 0, np.float64) if router.needs_norm else None
        route_batch(
            self._queue,
            router,
            values,
            None,
            tokens,
            logits,
            norm,
            RouteOutputs(),
            self._counters,
            self._taken,
        )
        self._taken += tokens

    def _at_least(self, name: str, tokens: int, columns: int, dtype: type) -> DeviceArray:
        """Room that grows with the tensors; the old one is let go once its work is done."""
        array = self._room.get((name, columns))
        if array is None or len(array) < tokens:
            self._queue.finish()
            shape = (tokens, columns) if columns else (tokens,)
            array = self._room[name, columns] = self._device.empty(shape, np.dtype(dtype))
        return array[:tokens]

    def wait(self) -> None:
        """Waits for the work queued so far: the tensors may go after it."""
        self._queue.finish()

    def progress(self) -> Progress:
        """Waits, and gives the counts as a scan would."""
        self.wait()
        states = states_of(self._device, self._counters)
        counted = int(states[_TOKENS]["counts"][..., TOKENS].sum())
        done = Progress(num_tokens=self._taken, states=states)
        return replace(done, num_non_finite=self._taken - counted)


def device_fold(router: Router, reductions: Sequence[str], device: Device) -> DeviceFold:
    """A fold of tensors of this router's inputs; see :class:`DeviceFold` for what it refuses.

    Outlier tokens are counted with the others: their usual length is not known in advance.
    """
    kernels = load_kernels("reference")
    task = Task(prepare(router), Tensors(router.name), kernels, tuple(reductions))
    return DeviceFold(task, device)


class Tensors:
    """Inputs of one router, any number of them, without documents and domains."""

    def __init__(self, router: str) -> None:
        self.facts: SourceFacts = SourceFacts(
            name="tensors",
            stage="router_input",
            num_tokens=0,
            routers=(router,),
            domains=(),
            has_documents=False,
            has_chosen=False,
        )

    def read_columns(self, start: int, stop: int) -> NoReturn:
        raise InternalError("tensors are handed over, not read")

    def read_values(self, router: str, start: int, stop: int) -> NoReturn:
        self.read_columns(start, stop)

    def read_top_logits(self, router: str, start: int, stop: int) -> NoReturn:
        self.read_columns(start, stop)

    def read_chosen(self, router: str, start: int, stop: int) -> NoReturn:
        self.read_columns(start, stop)

    def read_output(self, router: str, kind: str, start: int, stop: int) -> NoReturn:
        self.read_columns(start, stop)
