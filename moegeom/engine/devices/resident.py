"""Router inputs that are on a device already, such as tensors of a running model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.router import Router
from moegeom.core.tokens import TILE, SourceFacts
from moegeom.engine.devices.device_router import device_router, refuse, route_batch
from moegeom.engine.devices.fold import GatheredRows, LabelledRows, Reduced
from moegeom.engine.loop import Progress
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.cuda.device import Device, DeviceArray, DeviceError
from moegeom.kernels.cuda.parts import kernels_in
from moegeom.kernels.cuda.route import RouteOutputs
from moegeom.kernels.reduction import Extent
from moegeom.kernels.reductions.choices import TOKENS
from moegeom.kernels.table import load_kernels
from moegeom.tokens.recording.columns import unknown_columns

#: Number of every token that is counted, which the progress is read from.
_TOKENS = "token_counts"

#: Tokens of a fold by default: what is left of each until then takes some 4 bytes an expert.
BLOCK_TOKENS = 2**18


class DeviceFold:
    """Folds tensors of one router's inputs where they are; no input but those of samples is copied.

    Tensors are taken by DLPack, in bfloat16 or float32, C-ordered, all of one dtype. What is routed
    waits until ``block_tokens`` tokens are there, and whole tiles of them are folded; what the
    kernel counts by itself waits for nothing. Without ``columns`` tokens have no document and no
    domain; they share blocks by runs of 256. The product has the shape of the tensor, so that
    another cut of the stream may differ in the last bit of a logit.

    Raises
    ------
    UsageError
        For rules that devices do not route, and tasks that are not about all router inputs.
    """

    def __init__(
        self,
        task: Task,
        device: Device,
        block_tokens: int = BLOCK_TOKENS,
        extent: Extent | None = None,
    ) -> None:
        refuse(task)
        if task.source.facts.stage != "router_input" or task.options.exclude_first:
            raise UsageError(
                f"Tensors are router inputs of every position; asked for "
                f"{task.source.facts.stage.replace('_', ' ')} without the first "
                f"{task.options.exclude_first} of a document."
            )
        names = tuple(dict.fromkeys((_TOKENS, *task.reductions)))
        self._device, self._queue = device, device.queue()
        kernels = kernels_in(self._queue)
        self.task: Task = dataclasses.replace(task, reductions=names, kernels=kernels)
        self._reduced: Reduced | None = None
        self._kind, self._block_tokens, self._extent = "", block_tokens, extent
        self._room: dict[str, DeviceArray] = {}
        self._parts: list[LabelledRows] = []
        self._labels: list[DeviceArray] = []  # which the queue may not have read yet
        self._waiting, self._progress = 0, Progress()

    def __del__(self) -> None:
        # work on its way writes to memory that would be another's, unless everything ends
        queue = getattr(self, "_queue", None)
        if queue is not None and not sys.is_finalizing():
            with suppress(DeviceError):
                queue.finish()

    def take(self, tensor: Any, rows: LabelledRows | None = None) -> None:
        """Queues the work on [tokens, hidden] more inputs, which must stay until ``wait``.

        ``rows`` are their numbers and labels; without, they follow those before.

        Raises
        ------
        UsageError
            For a tensor of another width or dtype.
        """
        values = self._queue.adopt(tensor)
        reduced, tokens = self._reduced_by(values), len(values)
        if not tokens:
            return
        taken = self._progress.num_tokens + self._waiting
        router, label, first = reduced.router, None, self._waiting
        if rows is not None or reduced.folds:
            rows = rows or _unlabelled(taken, tokens)
            label = self._device.put(rows.labels(self.task))
            self._labels.append(label)
        room = self._made_room(reduced, tokens)
        left = {name: array[first : first + tokens] for name, array in room.items()}
        logits, norm = left.pop("product", None), left.pop("input_norm", None)
        if logits is None:  # they stay as the product leaves them
            logits = left.pop("logits")
        else:
            logits = room["product"][:tokens]
        route_batch(
            self._queue,
            router,
            values,
            label,
            tokens,
            logits,
            norm,
            RouteOutputs(**left),
            reduced.counters,
            taken,
        )
        if rows is None or not reduced.folds:
            self._progress = dataclasses.replace(self._progress, num_tokens=taken + tokens)
            return
        sampled = reduced.sampled_rows(rows.token, taken + tokens)
        with self._queue.current():
            place = np.asarray(sampled, like=values)
            rows = dataclasses.replace(rows, inputs=GatheredRows(sampled, values[place]))
        self._parts.append(rows)
        self._waiting += tokens
        if self._waiting >= self._block_tokens:
            self._fold(self._waiting // TILE * TILE)

    def _reduced_by(self, values: DeviceArray) -> Reduced:
        """What inputs of this kind are folded into."""
        kind = {"uint16": "bfloat16", "float32": "float32"}.get(values.dtype.name)
        hidden = self.task.prepared.router.hidden_size
        if (
            kind is None
            or len(values.shape) != 2
            or values.shape[1] != hidden
            or self._kind not in ("", kind)
        ):
            shape = " x ".join(map(str, values.shape))
            raise UsageError(
                f"A tensor of {shape} numbers in {values.dtype.name} was given to router "
                f"{self.task.prepared.router.name}; expected tokens x {hidden} in "
                f"{self._kind or 'bfloat16 or float32'}."
            )
        if self._reduced is None:
            router = device_router(self.task, self._device, kind)
            self._kind = kind
            self._reduced = Reduced(self.task, self._device, router, self._queue, self._extent)
        return self._reduced

    @property
    def non_finite(self) -> tuple[int, ...]:
        """The first tokens that were folded and are not finite."""
        return self._progress.non_finite

    def _made_room(self, reduced: Reduced, tokens: int) -> dict[str, DeviceArray]:
        """Room for so many tokens behind those that wait; grown where it is short."""
        room, router = self._room, reduced.router
        if not (reduced.folds and router.is_direct) and len(room.get("product", ())) < tokens:
            self._queue.finish()
            shape = (tokens, router.logit_columns)
            room["product"] = self._device.empty(shape, np.dtype(np.float32))
        behind = self._waiting + tokens
        name = "is_lost" if reduced.folds else "input_norm"
        if (reduced.folds or router.needs_norm) and len(room.get(name, ())) < behind:
            self._queue.finish()
            if reduced.folds:
                more = reduced.outputs(max(behind, self._block_tokens + tokens))
            else:
                more = {name: self._device.empty((behind,), np.dtype(np.float64))}
            if self._waiting:
                with self._queue.current():
                    for name, array in more.items():
                        array[: self._waiting] = room[name][: self._waiting]
            room.update(more)
        return room

    def _fold(self, tokens: int) -> None:
        """Folds the first ``tokens`` of those that wait; the others move to the front."""
        reduced, parts, left = self._reduced, [], []
        assert reduced is not None
        done = 0
        for rows in self._parts:
            cut = min(max(tokens - done, 0), len(rows))
            parts += [rows.at(0, cut)] * (cut > 0)
            left += [rows.at(cut, len(rows))] * (cut < len(rows))
            done += len(rows)
        answers = {name: array for name, array in self._room.items() if name != "product"}
        first = {name: array[:tokens] for name, array in answers.items()}
        folded = reduced.fold(self.task, self._queue, first, parts)
        self._labels.clear()
        with self._queue.current():
            for array in answers.values():
                rest = array[tokens : self._waiting]
                array[: len(rest)] = rest.copy()
        self._parts, self._waiting = left, self._waiting - tokens
        self._progress = self._progress.after(0, tokens, folded.non_finite)

    def wait(self) -> None:
        """Waits for the work queued so far: the tensors may go after it."""
        self._queue.finish()
        self._labels.clear()

    def progress(self) -> Progress:
        """Folds what is left, waits, and gives the states as a scan would."""
        if self._waiting:
            self._fold(self._waiting)
        self.wait()
        if self._reduced is None:  # no tensor has come: nothing was counted
            router = device_router(self.task, self._device, "float32")
            self._reduced = Reduced(self.task, self._device, router, self._queue, self._extent)
        states = self._reduced.states(self._queue)
        counted = int(states[_TOKENS]["counts"][..., TOKENS].sum())
        lost = self._progress.num_tokens - counted
        return dataclasses.replace(self._progress, num_non_finite=lost, states=states)


def _unlabelled(start: int, tokens: int) -> LabelledRows:
    token, is_counted = np.arange(start, start + tokens), np.ones(tokens, bool)
    return LabelledRows(token, unknown_columns(tokens), is_counted)


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
