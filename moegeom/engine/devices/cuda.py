"""The loop on GPUs: batches are read, copied, worked on and folded, each while others are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np

from moegeom.core.tokens import TILE
from moegeom.engine.batch import refuse_non_finite
from moegeom.engine.devices.device_router import kept_on_device, refuse, states_of
from moegeom.engine.devices.slots import Slot, input_reader, make_slots, product_tokens
from moegeom.engine.loop import (
    NO_HOOKS,
    Hooks,
    Pace,
    Progress,
    Threads,
    TokenRange,
    Workers,
    token_ranges,
    with_states,
)
from moegeom.engine.plan import MAX_TILES
from moegeom.engine.task import Task, block_of
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.cuda.device import Device, DeviceError, OutOfDeviceMemory
from moegeom.kernels.cuda.program import NOT_COUNTED
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
    """As :func:`moegeom.engine.loop.scan_router`, with the products and the counting on devices.

    Batches go to the devices in turn. Reductions that the devices do not keep are folded by
    ``pace.num_workers`` threads of the host from the logits and choices that the devices give, so
    both see the same choices. ``batch_tokens`` is the size of a batch, by default what suits a GPU
    and its free memory; that of ``pace`` is meant for processors. ``on_message`` hears of a batch
    that had to be halved for lack of memory.

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
    with run.workers() as workers:
        return run.scan(tiles, workers)


class _Run:
    def __init__(
        self, task: Task, pace: Pace, skip_non_finite: bool, hooks: Hooks, begin: Progress
    ) -> None:
        refuse(task)
        self._task, self._pace, self._hooks = task, pace, hooks
        self._skip_non_finite = skip_non_finite
        self._progress = begin
        self._on_device = kept_on_device(task)
        self._on_host = tuple(name for name in task.reductions if name not in self._on_device)
        self._folds = bool(self._on_host) or hooks.rows is not None
        self._reader = input_reader(task)
        self._refuse(begin.non_finite)
        self._by_device: list[tuple[Device, list[Slot]]] = []

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
        while True:
            try:
                self._by_device = [
                    (d, make_slots(task, d, reader, self._on_device, tokens, self._folds))
                    for d in devices
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

    @contextmanager
    def workers(self) -> Iterator[Workers | None]:
        """Threads of the host; None where devices do everything."""
        if not self._folds:
            yield None
            return
        with Threads(self._pace.num_workers) as threads:
            count = self._pace.num_workers
            yield Workers(self._task, threads, count, self._hooks, self._on_host)

    def scan(self, tiles: Sequence[int], workers: Workers | None) -> Progress:
        """Everything from the first tile that is not folded in yet."""
        slots = _in_turn([slots for _, slots in self._by_device])
        busy: deque[Slot] = deque()
        num_tokens = self._task.source.facts.num_tokens
        last_snapshot = time.monotonic()
        with self._waiting_for_devices(), ThreadPoolExecutor(self._pace.num_workers) as readers:
            first = self._progress.next_tile
            for batch in token_ranges(tiles, first, num_tokens, self._batch_tiles):
                slot = next(slots)
                if len(busy) == sum(len(made) for _, made in self._by_device):
                    self._finish(busy.popleft(), workers)
                self._fill(slot, batch, readers)
                slot.start(batch)
                busy.append(slot)
                if len(busy) > len(self._by_device):
                    self._fold(busy[-1 - len(self._by_device)], workers)
                due = time.monotonic() - last_snapshot > self._pace.snapshot_seconds
                if self._hooks.snapshot and due:
                    self._finish_all(busy, workers)
                    self._hooks.snapshot(with_states(self._progress, self._states(workers)))
                    last_snapshot = time.monotonic()
            self._finish_all(busy, workers)
        return with_states(self._progress, self._states(workers))

    @contextmanager
    def _waiting_for_devices(self) -> Iterator[None]:
        """However the loop ends, no device still reads or writes memory that is let go."""
        try:
            yield
        finally:
            for _, slots in self._by_device:
                for slot in slots:
                    with suppress(DeviceError):
                        slot.queue.finish()

    def _fill(self, slot: Slot, batch: TokenRange, readers: ThreadPoolExecutor) -> None:
        """Values and labels of a batch, into memory that the device copies from."""
        tokens = batch.stop - batch.start
        reads = self._reader.start(batch.start, batch.stop, slot.values[:tokens], readers)
        task = self._task
        columns = task.source.read_columns(batch.start, batch.stop)
        block = block_of(columns, batch.start, task.source.facts.num_documents)
        label = task.populations.label(columns) * NUM_BLOCKS + block
        slot.columns = columns
        slot.label[:tokens] = np.where(task.options.counted(columns), label, NOT_COUNTED)
        for read in reads:
            read.result()

    def _fold(self, slot: Slot, workers: Workers | None) -> None:
        """Waits for the device, and hands its answers to the host's threads.

        Without threads nobody is waited for here, so that two batches may be on their way to a
        device while the next one is read.
        """
        if workers is None or slot.batch is None or slot.folds:
            return
        slot.queue.finish()
        step = MAX_TILES * TILE
        for start in range(slot.batch.start, slot.batch.stop, step):
            stop = min(start + step, slot.batch.stop)
            rows = start - slot.batch.start, stop - slot.batch.start
            slot.folds.append(workers.submit(start, stop, slot.known(*rows, self._reader)))

    def _finish(self, slot: Slot, workers: Workers | None) -> None:
        """Takes a batch out of its slot; batches are finished in the order of their tokens."""
        self._fold(slot, workers)
        batch = slot.batch
        assert batch is not None
        tokens = batch.stop - batch.start
        if workers is not None:
            folded = [fold.result() for fold in slot.folds]
            lost = tuple(token for part in folded for token in part.non_finite)
        else:
            slot.queue.finish()
            folded, is_lost = [], slot.answers["is_lost"][:tokens] != 0
            is_lost &= slot.label[:tokens] != NOT_COUNTED
            lost = tuple((np.flatnonzero(is_lost) + batch.start).tolist())
        slot.batch, slot.folds = None, []
        self._progress = self._progress.after(batch.next_tile, tokens, lost)
        self._refuse(lost)
        for part in folded:
            if self._hooks.written:
                self._hooks.written(part.rows)
        if self._hooks.advanced:
            self._hooks.advanced(tokens)

    def _finish_all(self, busy: deque[Slot], workers: Workers | None) -> None:
        while busy:
            self._finish(busy.popleft(), workers)

    def _refuse(self, lost: tuple[int, ...]) -> None:
        if not self._skip_non_finite:
            name, source = self._task.prepared.router.name, self._task.source.facts.name
            refuse_non_finite(name, source, lost, self._progress.num_tokens)

    def _states(self, workers: Workers | None) -> dict[str, State]:
        """States of the host and of all devices; only while nothing is on its way."""
        merged = {} if workers is None else workers.states()
        for device, slots in self._by_device:
            for name, state in states_of(device, slots[0].counters).items():
                merged[name] = (
                    REDUCTIONS[name].merge(merged[name], state) if name in merged else state
                )
        return merged


def _in_turn(slots: Sequence[Sequence[Slot]]) -> Iterator[Slot]:
    """The first slot of each device, then the second, for ever."""
    while True:
        for of_one_turn in zip(*slots, strict=True):
            yield from of_one_turn
