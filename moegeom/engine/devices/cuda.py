"""The loop on GPUs: batches are read, copied, routed and folded, each while others are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.shapes import Shaped
from moegeom.core.tokens import TILE, StoredValues, TensorValues
from moegeom.engine.batch import refuse_non_finite
from moegeom.engine.devices.device_router import DeviceRouter, device_router, refuse, route_batch
from moegeom.engine.devices.fold import GatheredRows, LabelledRows, Reduced
from moegeom.engine.loop import (
    NO_HOOKS,
    Folded,
    Hooks,
    Pace,
    Progress,
    TokenRange,
    token_ranges,
    with_states,
)
from moegeom.engine.prepared import check_width
from moegeom.engine.task import Task
from moegeom.kernels.cuda.device import Device, DeviceArray, DeviceError, OutOfDeviceMemory, Queue
from moegeom.kernels.cuda.parts import kernels_in
from moegeom.kernels.cuda.route import RouteOutputs
from moegeom.kernels.reduction import REDUCTIONS, State


def scan_on_devices(
    task: Task,
    tiles: Sequence[int],
    pace: Pace,
    skip_non_finite: bool = False,
    hooks: Hooks = NO_HOOKS,
    begin: Progress | None = None,
    *,
    devices: Sequence[Device],
    batch_tokens: int | None = None,
    on_message: Callable[[str], None] | None = None,
) -> Progress:
    """As :func:`moegeom.engine.loop.scan_router`, with products, counting and folds on devices.

    Batches go to the devices in turn. ``batch_tokens`` is the size of a batch, by default what
    suits a GPU and its free memory; that of ``pace`` is meant for processors. ``on_message`` hears
    of a batch that had to be halved for lack of memory.

    Raises
    ------
    UsageError
        For a task that devices do not do.
    NonFiniteError
        At the first batch with a non-finite token, unless ``skip_non_finite``.
    DeviceError
        When a device fails, or its memory does not hold the smallest batch.
    """
    run = _Run(task, pace, skip_non_finite, hooks, begin or Progress())
    run.make_lanes(devices, batch_tokens, on_message)
    return run.scan(tiles)


#: Batches of a device that are folded together: what a fold costs grows little with its tokens.
_BATCHES_OF_FOLD = 4


@dataclass(frozen=True, eq=False)
class _Started:
    """A batch on its way through a device."""

    lane: DeviceLane
    slot: Slot
    batch: TokenRange
    rows: LabelledRows


class _Run:
    def __init__(
        self, task: Task, pace: Pace, skip_non_finite: bool, hooks: Hooks, begin: Progress
    ) -> None:
        refuse(task)
        self._task, self._pace, self._hooks = task, pace, hooks
        self._skip_non_finite = skip_non_finite
        self._progress = begin
        self._reader = input_reader(task)
        self._refuse(begin.non_finite)
        self._lanes: list[DeviceLane] = []
        # rows are handed on in the order of the tokens, so that each batch is folded by itself
        self._batches = 1 if hooks.rows else _BATCHES_OF_FOLD
        self._started: list[_Started] = []
        self._number = 0
        self._folding: tuple[Sequence[_Started], Future[_Lost]] | None = None

    def make_lanes(
        self,
        devices: Sequence[Device],
        batch_tokens: int | None,
        on_message: Callable[[str], None] | None,
    ) -> None:
        """Slots of one size on every device, halved until they fit all of them."""
        task, reader = self._task, self._reader
        free = min(device.free_bytes() for device in devices)
        row_bytes = reader.width * reader.dtype.itemsize
        tokens = product_tokens(row_bytes, free, task.source.facts.num_tokens, batch_tokens)
        with_rows = self._hooks.rows is not None
        while True:
            try:
                self._lanes = [
                    DeviceLane(task, device, reader, tokens, self._batches, with_rows)
                    for device in devices
                ]
            except OutOfDeviceMemory:
                if tokens <= TILE:
                    raise
                tokens //= 2
                if on_message:
                    on_message(
                        f"the device has no room for {2 * tokens} tokens at once; taking {tokens}"
                    )
            else:
                self._batch_tokens = tokens
                return

    def scan(self, tiles: Sequence[int]) -> Progress:
        """Everything from the first tile that is not folded in yet."""
        slots, num_tokens = _in_turn(self._lanes), self._task.source.facts.num_tokens
        reading: tuple[DeviceLane, Slot, TokenRange, list[Future[LabelledRows]]] | None = None
        last_snapshot = time.monotonic()
        with (
            self._waiting_for_devices(),
            ThreadPoolExecutor(self._pace.num_workers, "moegeom-read") as readers,
            ThreadPoolExecutor(1, "moegeom-fold") as folder,
        ):
            first = self._progress.next_tile
            ranges = token_ranges(tiles, first, num_tokens, self._batch_tokens // TILE)
            for batch in (*ranges, None):
                begun = reading
                if batch is not None:  # is read while the one before is copied
                    lane, slot = next(slots)
                    slot.queue.finish()
                    reading = lane, slot, batch, self._read(lane, slot, batch, readers)
                if begun is not None:
                    self._start(*begun)
                if self._is_full():
                    self._fold(folder)
                due = time.monotonic() - last_snapshot > self._pace.snapshot_seconds
                if self._hooks.snapshot and due and (self._started or self._folding):
                    self._fold(folder)
                    self._finish()
                    self._hooks.snapshot(with_states(self._progress, self._states()))
                    last_snapshot = time.monotonic()
            self._fold(folder)
            self._finish()
        return with_states(self._progress, self._states())

    @contextmanager
    def _waiting_for_devices(self) -> Iterator[None]:
        """However the loop ends, no device still reads or writes memory that is let go."""
        try:
            yield
        finally:
            for lane in self._lanes:
                for queue in (lane.queue, *(slot.queue for slot in lane.slots)):
                    with suppress(DeviceError):
                        queue.finish()

    def _read(
        self, lane: DeviceLane, slot: Slot, batch: TokenRange, readers: Executor
    ) -> list[Future[Any]]:
        """Begins to read a batch; the first that is waited for has its labels."""
        labelled = readers.submit(self._labelled, lane, slot, batch)
        if lane.is_there:
            return [labelled]
        values = slot.values[: batch.stop - batch.start]
        return [labelled, *self._reader.start(batch.start, batch.stop, values, readers)]

    def _labelled(self, lane: DeviceLane, slot: Slot, batch: TokenRange) -> LabelledRows:
        task, token = self._task, np.arange(batch.start, batch.stop)
        columns = task.source.read_columns(batch.start, batch.stop)
        rows = LabelledRows(token, columns, task.options.counted(columns))
        slot.label[: len(rows)] = rows.labels(task)
        sampled = lane.reduced.sampled_rows(token, task.source.facts.num_tokens)
        return dataclasses.replace(rows, inputs=GatheredRows(sampled, slot.values))

    def _start(
        self, lane: DeviceLane, slot: Slot, batch: TokenRange, reads: Sequence[Future[Any]]
    ) -> None:
        """Queues the work on a batch once its values are in memory that the device copies from."""
        rows, *_ = (read.result() for read in reads)
        place = sum(len(one.rows) for one in self._started if one.lane is lane)
        values = lane.start(slot, batch, place, self._number % 2)
        sampled, inputs = rows.inputs.row, None
        if len(sampled):
            with slot.queue.current():  # of an array of the host they are there when this returns
                row = np.asarray(sampled, like=values)
                inputs = GatheredRows(sampled, values[row])
        rows = dataclasses.replace(rows, inputs=inputs)
        self._started.append(_Started(lane, slot, batch, rows))

    def _is_full(self) -> bool:
        """Whether no other batch can be folded with those that are started."""
        last = self._started[-1] if self._started else None
        is_full = len(self._started) == self._batches * len(self._lanes)
        # a short one ends the rows that follow each other
        return is_full or (last is not None and len(last.rows) < self._batch_tokens)

    def _fold(self, folder: Executor) -> None:
        """Folds what is started, in a thread: meanwhile batches to come go to the other block."""
        self._finish()
        started, self._started = self._started, []
        if started:
            folding = folder.submit(_folded, started, self._number % 2, self._hooks)
            self._folding, self._number = (started, folding), self._number + 1

    def _finish(self) -> None:
        """Tells of the batches that are folded, in the order of their tokens."""
        if self._folding is None:
            return
        (started, folding), self._folding = self._folding, None
        lost, made = folding.result()
        for one in started:
            batch, tokens = one.batch, len(one.rows)
            own = tuple(token for token in lost if batch.start <= token < batch.stop)
            self._progress = self._progress.after(batch.next_tile, tokens, own)
            self._refuse(own)
            if self._hooks.written and id(one) in made:
                self._hooks.written(made[id(one)])
            if self._hooks.advanced:
                self._hooks.advanced(tokens)

    def _refuse(self, lost: tuple[int, ...]) -> None:
        if not self._skip_non_finite:
            router, source = self._task.prepared.router.name, self._task.source.facts.name
            refuse_non_finite(router, source, lost, self._progress.num_tokens)

    def _states(self) -> dict[str, State]:
        """The states of all devices merged."""
        merged: dict[str, State] = {}
        for lane in self._lanes:
            for name, state in lane.reduced.states(lane.queue).items():
                merged[name] = (
                    REDUCTIONS[name].merge(merged[name], state) if name in merged else state
                )
        return merged


#: Tokens that are not finite, and rows made of the batches that a key stands for.
_Lost = tuple[list[int], dict[int, Any]]


def _folded(started: Sequence[_Started], block: int, hooks: Hooks) -> _Lost:
    """Folds batches whose answers lie in a block of each device."""
    lost, made = [], {}
    for lane in dict.fromkeys(one.lane for one in started):
        mine = [one for one in started if one.lane is lane]
        for one in mine:
            one.slot.queue.finish()
        folded = lane.fold([one.rows for one in mine], block, hooks)
        lost += folded.non_finite
        made[id(mine[0])] = folded.rows
    return lost, made


def _in_turn(lanes: Sequence[DeviceLane]) -> Iterator[tuple[DeviceLane, Slot]]:
    """The first slot of each device, then the second, and again."""
    while True:
        for number in range(SLOTS):
            for lane in lanes:
                yield lane, lane.slots[number]


# -------------------------------------------------------------------------------------------- slots


#: Bytes that one thread copies at a time, a tile of wide rows: many pieces in a batch. Whole tiles,
#: because sources draw and decode some rows together.
_PIECE_BYTES = 2**22


@dataclass(frozen=True)
class InputReader:
    """Reads inputs of one router; ``kind`` is ``bfloat16`` if they are kept so, else ``float32``.

    bfloat16 is handed on as its bits: a device multiplies them as they are, and half as much is
    copied. ``tensor`` holds them all where they lie in the memory of a GPU.
    """

    task: Task
    kind: str
    width: int
    tensor: Any = None

    @property
    def dtype(self) -> np.dtype:
        """Of the memory that is read into."""
        return np.dtype(np.uint16 if self.kind == "bfloat16" else np.float32)

    def start(
        self, start: int, stop: int, out: Shaped[np.ndarray, "tokens width"], pool: Executor
    ) -> list[Future[None]]:
        """Fills ``out`` with tokens ``[start, stop)``, in pieces that are to be waited for."""
        step = max(_PIECE_BYTES // (TILE * self.width * self.dtype.itemsize), 1) * TILE
        pieces = [(first, min(first + step, stop)) for first in range(start, stop, step)]
        return [pool.submit(self._read, *piece, out[piece[0] - start :]) for piece in pieces]

    def _read(self, first: int, last: int, out: np.ndarray) -> None:
        source, name = self.task.source, self.task.prepared.router.name
        part = out[: last - first]
        if self.kind == "bfloat16":
            assert isinstance(source, StoredValues)
            import ml_dtypes

            source.read_stored(name, first, part.view(ml_dtypes.bfloat16))
        else:
            part[...] = source.read_values(name, first, last)


def input_reader(task: Task) -> InputReader:
    """How the inputs of the task's router are read; reads one row, to see that it fits."""
    router, source = task.prepared.router, task.source
    stage, name = source.facts.stage, source.facts.name
    width = router.num_experts if stage == "logits" else router.hidden_size
    if source.facts.num_tokens:
        check_width(router, stage, source.read_values(router.name, 0, 1).shape[1], name)
    kind, tensor = "", None
    if stage == "router_input" and isinstance(source, StoredValues):
        kind = source.stored_dtype(router.name).name
        tensor = source.tensor(router.name) if isinstance(source, TensorValues) else None
    return InputReader(task, "bfloat16" if kind == "bfloat16" else "float32", width, tensor)


#: Bytes of inputs in one product: some milliseconds of copying, beside which starting it is little.
_PRODUCT_BYTES = 2**28

#: Tokens of one product.
_LEAST_TOKENS, _MOST_TOKENS = TILE, 2**16

#: Batches on their way in one device: one is read, one is worked on, one is folded on the host.
SLOTS = 3

#: Share of the free memory that is taken at most.
_SHARE_OF_FREE = 0.8


def product_tokens(
    row_bytes: int, free_bytes: int, num_tokens: int, batch_tokens: int | None = None
) -> int:
    """Tokens of a batch, which one product takes: a power of two times 1024.

    As many as ``_PRODUCT_BYTES`` hold; fewer where ``free_bytes`` are short, where the stream of
    ``num_tokens`` is no longer than half of that, or where ``batch_tokens`` are asked for. A whole
    row stands for about twice its bytes: logits and answers come to it.
    """
    room = int(free_bytes * _SHARE_OF_FREE) // (2 * SLOTS * row_bytes)
    most = min(_PRODUCT_BYTES // row_bytes, room, _MOST_TOKENS, batch_tokens or _MOST_TOKENS)
    tokens = _LEAST_TOKENS
    while 2 * tokens <= most and tokens < num_tokens:
        tokens *= 2
    return tokens


@dataclass(frozen=True, eq=False)
class Slot:
    """Room for a batch on its way to a device; used again and again."""

    queue: Queue
    values: np.ndarray
    label: np.ndarray
    device_values: DeviceArray
    device_label: DeviceArray
    device_logits: DeviceArray


class DeviceLane:
    """One device: a router on it, slots of ``tokens`` rows, and what its tokens are folded into.

    What is left of each token waits in one of two blocks of ``batches`` batches: while one is
    folded, batches go to the other.

    Raises
    ------
    OutOfDeviceMemory
        When they do not fit; nothing is kept then.
    """

    def __init__(
        self,
        task: Task,
        device: Device,
        reader: InputReader,
        tokens: int,
        batches: int,
        with_rows: bool,
    ) -> None:
        router = device_router(task, device, reader.kind)
        self.queue: Queue = device.queue()
        self.task: Task = dataclasses.replace(task, kernels=kernels_in(self.queue))
        self.reduced: Reduced = Reduced(task, device, router, self.queue)
        self._tokens, self._tensor = tokens, reader.tensor
        #: Whether the inputs lie on this device: no other memory holds them then.
        self.is_there: bool = reader.tensor is not None and device.has(reader.tensor)
        self._blocks = [self.reduced.outputs(batches * tokens, with_rows) for _ in range(2)]
        # else the kernel adds up what the product leaves
        self._is_direct = router.is_direct and "logits" in self._blocks[0]
        read = 0 if self.is_there else tokens
        self.slots: list[Slot] = [
            _slot(router, device, reader, tokens, read, self._is_direct) for _ in range(SLOTS)
        ]

    def start(self, slot: Slot, batch: TokenRange, place: int, block: int) -> Any:
        """Queues the work on a batch whose labels, and values unless they lie on this device, are
        in the slot's memory; returns where samples read the values.

        What is left of it lies in a block, from row ``place`` on.
        """
        tokens, values = batch.stop - batch.start, slot.device_values
        if not self.is_there:
            slot.queue.upload(values[:tokens], slot.values[:tokens])
        else:
            inputs = slot.queue.adopt(self._tensor[batch.start : batch.stop])
            if inputs.dtype == values.dtype and tokens == self._tokens:
                values = inputs
            else:  # every product has the same number of rows, of the dtype of the router's
                with slot.queue.current():
                    values[:tokens] = inputs
        slot.queue.upload(slot.device_label[:tokens], slot.label[:tokens])
        room = self._blocks[block]
        outputs = {name: array[place : place + tokens] for name, array in room.items()}
        norm, logits = outputs.pop("input_norm", None), slot.device_logits
        if self._is_direct:
            logits = room["logits"][place : place + self._tokens]
            del outputs["logits"]
        route_batch(
            slot.queue,
            self.reduced.router,
            values,
            slot.device_label,
            tokens,
            logits,
            norm,
            RouteOutputs(**outputs),
            self.reduced.counters,
        )
        return values if self.is_there else slot.values

    def fold(self, parts: Sequence[LabelledRows], block: int, hooks: Hooks) -> Folded:
        """Folds what was left of batches in a block, which is done when this returns."""
        tokens = sum(map(len, parts))
        answers = {name: array[:tokens] for name, array in self._blocks[block].items()}
        return self.reduced.fold(self.task, self.queue, answers, parts, hooks)


_NO_VALUES = np.empty((0, 0), np.float32)


def _slot(
    router: DeviceRouter,
    device: Device,
    reader: InputReader,
    tokens: int,
    read: int,
    is_direct: bool,
) -> Slot:
    values, uint16 = device.empty((tokens, reader.width), reader.dtype), np.dtype(np.uint16)
    logits = values
    if router.rows is not None and not is_direct:
        logits = device.empty((tokens, router.logit_columns), np.dtype(np.float32))
    return Slot(
        queue=device.queue(),
        values=device.pinned((read, reader.width), reader.dtype) if read else _NO_VALUES,
        label=device.pinned((tokens,), uint16),
        device_values=values,
        device_label=device.empty((tokens,), uint16),
        device_logits=logits,
    )
