"""The loop on GPUs: batches are read, copied, routed and folded, each while others are."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from moegeom.core.shapes import Shaped
from moegeom.core.tokens import TILE, StoredValues
from moegeom.engine.batch import refuse_non_finite
from moegeom.engine.devices.device_router import device_router, refuse, route_batch
from moegeom.engine.devices.fold import GatheredRows, Reduced, TokenRows
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
    run.make_slots(devices, batch_tokens, on_message)
    return run.scan(tiles)


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
        self._by_device: list[list[Slot]] = []

    def make_slots(
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
                self._by_device = [
                    make_slots(task, device, reader, tokens, with_rows) for device in devices
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
                self._batch_tiles = tokens // TILE
                return

    def scan(self, tiles: Sequence[int]) -> Progress:
        """Everything from the first tile that is not folded in yet."""
        slots, num_tokens = _in_turn(self._by_device), self._task.source.facts.num_tokens
        busy: deque[Slot] = deque()
        reading: tuple[Slot, TokenRange, list[Future[None]]] | None = None
        last_snapshot = time.monotonic()
        with self._waiting_for_devices(), ThreadPoolExecutor(self._pace.num_workers) as readers:
            first = self._progress.next_tile
            ranges = token_ranges(tiles, first, num_tokens, self._batch_tiles)
            for batch in (*ranges, None):
                begun = reading
                if batch is not None:  # is read while the one before is copied
                    slot = next(slots)
                    if slot.rows is not None:
                        self._finish(busy.popleft())
                    values = slot.values[: batch.stop - batch.start]
                    reads = self._reader.start(batch.start, batch.stop, values, readers)
                    reading = slot, batch, reads
                if begun is not None:
                    self._start(*begun)
                    busy.append(begun[0])
                # the last batch of each device is on its way while others are folded
                while len(busy) > len(self._by_device):
                    self._finish(busy.popleft())
                due = time.monotonic() - last_snapshot > self._pace.snapshot_seconds
                if self._hooks.snapshot and due and busy:
                    self._finish_all(busy)
                    self._hooks.snapshot(with_states(self._progress, self._states()))
                    last_snapshot = time.monotonic()
            self._finish_all(busy)
        return with_states(self._progress, self._states())

    @contextmanager
    def _waiting_for_devices(self) -> Iterator[None]:
        """However the loop ends, no device still reads or writes memory that is let go."""
        try:
            yield
        finally:
            for slots in self._by_device:
                for slot in slots:
                    with suppress(DeviceError):
                        slot.queue.finish()

    def _start(self, slot: Slot, batch: TokenRange, reads: Sequence[Future[None]]) -> None:
        """Queues the work on a batch once its values are in memory that the device copies from."""
        task, token = self._task, np.arange(batch.start, batch.stop)
        columns = task.source.read_columns(batch.start, batch.stop)
        rows = TokenRows(token, columns, task.options.counted(columns))
        slot.label[: len(rows)] = rows.labels(task)
        drawn = slot.reduced.drawn(token, task.source.facts.num_tokens)
        for read in reads:
            read.result()
        if len(drawn):
            rows = dataclasses.replace(rows, inputs=GatheredRows(drawn, slot.values[drawn]))
        slot.start(batch, rows)

    def _finish(self, slot: Slot) -> None:
        """Takes a batch out of its slot; batches are finished in the order of their tokens."""
        rows, slot.rows = slot.rows, None
        assert rows is not None
        folded, tokens = slot.fold(rows, self._hooks), len(rows)
        self._progress = self._progress.after(slot.next_tile, tokens, folded.non_finite)
        self._refuse(folded.non_finite)
        if self._hooks.written:
            self._hooks.written(folded.rows)
        if self._hooks.advanced:
            self._hooks.advanced(tokens)

    def _finish_all(self, busy: deque[Slot]) -> None:
        while busy:
            self._finish(busy.popleft())

    def _refuse(self, lost: tuple[int, ...]) -> None:
        if not self._skip_non_finite:
            router, source = self._task.prepared.router.name, self._task.source.facts.name
            refuse_non_finite(router, source, lost, self._progress.num_tokens)

    def _states(self) -> dict[str, State]:
        """The states of all devices merged."""
        merged: dict[str, State] = {}
        for slots in self._by_device:
            for name, state in slots[0].reduced.states(slots[0].queue).items():
                merged[name] = (
                    REDUCTIONS[name].merge(merged[name], state) if name in merged else state
                )
        return merged


def _in_turn(slots: Sequence[Sequence[Slot]]) -> Iterator[Slot]:
    """First slot of each device, second slot of each device ..., and again."""
    while True:
        for number in range(SLOTS):
            for of_device in slots:
                yield of_device[number]


# -------------------------------------------------------------------------------------------- slots


#: Bytes that one thread copies at a time, a tile of wide rows: many pieces in a batch. Whole tiles,
#: because sources draw and decode some rows together.
_PIECE_BYTES = 2**22


@dataclass(frozen=True)
class InputReader:
    """Reads inputs of one router; ``kind`` is ``bfloat16`` if they are kept so, else ``float32``.

    bfloat16 is handed on as its bits: a device multiplies them as they are, and half as much is
    copied.
    """

    task: Task
    kind: str
    width: int

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
    kind = ""
    if stage == "router_input" and isinstance(source, StoredValues):
        kind = source.stored_dtype(router.name).name
    return InputReader(task, "bfloat16" if kind == "bfloat16" else "float32", width)


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


@dataclass(eq=False)
class Slot:
    """A batch on its way through one device; used again and again."""

    task: Task
    reduced: Reduced
    queue: Queue
    values: np.ndarray
    label: np.ndarray
    device_values: DeviceArray
    device_label: DeviceArray
    device_logits: DeviceArray
    device_norm: DeviceArray | None
    outputs: dict[str, DeviceArray]
    rows: TokenRows | None = None
    next_tile: int = 0

    def start(self, batch: TokenRange, rows: TokenRows) -> None:
        """Queues the work on a batch whose values and labels are in place."""
        self.rows, self.next_tile, tokens = rows, batch.next_tile, len(rows)
        self.queue.upload(self.device_values[:tokens], self.values[:tokens])
        self.queue.upload(self.device_label[:tokens], self.label[:tokens])
        route_batch(
            self.queue,
            self.reduced.router,
            self.device_values,
            self.device_label,
            tokens,
            self.device_logits,
            self.device_norm,
            RouteOutputs(**self.outputs),
            self.reduced.counters,
        )

    def fold(self, rows: TokenRows, hooks: Hooks) -> Folded:
        """Folds the batch, which is done when this returns."""
        left = {"logits": self.device_logits, **self.outputs}
        if self.device_norm is not None:
            left["input_norm"] = self.device_norm
        answers = {name: array[: len(rows)] for name, array in left.items()}
        return self.reduced.fold(self.task, self.queue, answers, [rows], hooks)


def make_slots(
    task: Task, device: Device, reader: InputReader, tokens: int, with_rows: bool
) -> list[Slot]:
    """Slots of ``tokens`` rows that share one router and what its tokens are folded into.

    Raises
    ------
    OutOfDeviceMemory
        When they do not fit; nothing is kept then.
    """
    router = device_router(task, device, reader.kind)
    reduced = Reduced(task, device, router, device.queue())
    return [_slot(task, device, reader, reduced, tokens, with_rows) for _ in range(SLOTS)]


def _slot(
    task: Task, device: Device, reader: InputReader, reduced: Reduced, tokens: int, with_rows: bool
) -> Slot:
    router, queue = reduced.router, device.queue()
    values = device.empty((tokens, reader.width), reader.dtype)
    logits = (tokens, router.logit_columns)
    float32, float64, uint16 = map(np.dtype, (np.float32, np.float64, np.uint16))
    return Slot(
        task=dataclasses.replace(task, kernels=kernels_in(queue)),
        reduced=reduced,
        queue=queue,
        values=device.pinned((tokens, reader.width), reader.dtype),
        label=device.pinned((tokens,), uint16),
        device_values=values,
        device_label=device.empty((tokens,), uint16),
        device_logits=values if router.rows is None else device.empty(logits, float32),
        device_norm=device.empty((tokens,), float64) if router.needs_norm else None,
        outputs=reduced.outputs(tokens, with_rows, with_logits=False),
    )
