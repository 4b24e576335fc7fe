"""The loop on GPUs: batches are read, copied, worked on and folded, each while others are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from moegeom.core.shapes import Shaped
from moegeom.core.tokens import TILE, StoredValues, TokenColumns
from moegeom.engine.batch import refuse_non_finite
from moegeom.engine.choice import RecordedQuantities
from moegeom.engine.devices.device_router import (
    DeviceRouter,
    device_router,
    kept_on_device,
    refuse,
    route_batch,
    start_counters,
    states_of,
)
from moegeom.engine.loop import (
    NO_HOOKS,
    Folded,
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
from moegeom.engine.prepared import check_width
from moegeom.engine.task import Task, block_of
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.cuda.device import Device, DeviceArray, DeviceError, OutOfDeviceMemory, Queue
from moegeom.kernels.cuda.program import NOT_COUNTED
from moegeom.kernels.cuda.route import RouteCounters, RouteOutputs
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

    def numbers(
        self, rows: Shaped[np.ndarray, "tokens width"]
    ) -> Shaped[np.ndarray, "tokens width"]:
        """What was read, as numbers."""
        if self.kind == "float32":
            return rows
        import ml_dtypes

        return rows.view(ml_dtypes.bfloat16)

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
            source.read_stored(name, first, self.numbers(part))
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


#: Names and dtypes of what is asked of the device for folding on the host.
_ANSWERS = {
    "is_lost": np.uint8,
    "logits": np.float32,
    "chosen": np.int32,
    "margin": np.float64,
    "group_margin": np.float64,
    "distance": np.float64,
    "pair": np.int32,
}


@dataclass(eq=False)
class Slot:
    """A batch on its way through one device; used again and again."""

    router: DeviceRouter
    queue: Queue
    counters: RouteCounters
    values: np.ndarray
    label: np.ndarray
    device_values: DeviceArray
    device_label: DeviceArray
    device_logits: DeviceArray
    device_norm: DeviceArray | None
    outputs: RouteOutputs
    answers: dict[str, np.ndarray]
    columns: TokenColumns | None = None
    batch: TokenRange | None = None
    folds: list[Future[Folded]] = field(default_factory=list)

    def start(self, batch: TokenRange) -> None:
        """Queues the work on a batch whose values and labels are in place."""
        tokens = batch.stop - batch.start
        self.batch = batch
        self.queue.upload(self.device_values[:tokens], self.values[:tokens])
        self.queue.upload(self.device_label[:tokens], self.label[:tokens])
        route_batch(
            self.queue,
            self.router,
            self.device_values,
            self.device_label,
            tokens,
            self.device_logits,
            self.device_norm,
            self.outputs,
            self.counters,
        )
        for name, array in (vars(self.outputs) | {"input_norm": self.device_norm}).items():
            if name in self.answers:
                assert array is not None
                self.queue.download(self.answers[name][:tokens], array[:tokens])

    def known(self, first: int, last: int, reader: InputReader) -> RecordedQuantities:
        """What the device found out about rows ``[first, last)``, once the queue is finished."""
        # copies: whoever keeps them must not see the next batch
        rows = {name: array[first:last].copy() for name, array in self.answers.items()}
        assert self.columns is not None
        rows["is_lost"] = rows["is_lost"].astype(bool)
        return RecordedQuantities(
            **rows,
            columns=self.columns.at(slice(first, last)),
            values=None if self.router.rows is None else reader.numbers(self.values[first:last]),
        )


def make_slots(
    task: Task,
    device: Device,
    reader: InputReader,
    names: Collection[str],
    tokens: int,
    with_answers: bool,
) -> list[Slot]:
    """Slots of ``tokens`` rows that share one router and its counters ``names`` on a device.

    Raises
    ------
    OutOfDeviceMemory
        When they do not fit; nothing is kept then.
    """
    router = device_router(task, device, reader.kind)
    counters = start_counters(task, device, names)
    return [
        _slot(task, device, reader, router, counters, tokens, with_answers) for _ in range(SLOTS)
    ]


def _slot(
    task: Task,
    device: Device,
    reader: InputReader,
    router: DeviceRouter,
    counters: RouteCounters,
    tokens: int,
    with_answers: bool,
) -> Slot:
    values = device.empty((tokens, reader.width), reader.dtype)
    recorded = router.rows is None
    names = _asked(router, with_answers)
    columns = {"logits": router.rule.num_experts, "chosen": router.rule.top_k, "pair": 2}
    shapes = {n: (tokens, columns[n]) if n in columns else (tokens,) for n in _ANSWERS}
    outputs = {name: device.empty(shapes[name], np.dtype(_ANSWERS[name])) for name in names}
    answers = {name: device.pinned(shapes[name], np.dtype(_ANSWERS[name])) for name in names}
    norm = device.empty((tokens,), np.dtype(np.float64)) if router.needs_norm else None
    if norm is not None and with_answers:
        answers["input_norm"] = device.pinned((tokens,), np.dtype(np.float64))
    return Slot(
        router=router,
        queue=device.queue(),
        counters=counters,
        values=device.pinned((tokens, reader.width), reader.dtype),
        label=device.pinned((tokens,), np.dtype(np.uint16)),
        device_values=values,
        device_label=device.empty((tokens,), np.dtype(np.uint16)),
        device_logits=values
        if recorded
        else device.empty((tokens, router.logit_columns), np.dtype(np.float32)),
        device_norm=norm,
        outputs=RouteOutputs(**outputs),
        answers=answers,
    )


def _asked(router: DeviceRouter, with_answers: bool) -> list[str]:
    """Answers that the host wants: which tokens are lost, always; the rest to fold them itself."""
    if not with_answers:
        return ["is_lost"]
    names = ["is_lost", "logits", "chosen", "margin"]
    if router.rule.groups is not None:
        names.append("group_margin")
    return [*names, "distance", "pair"] if router.tables.inverse is not None else names
