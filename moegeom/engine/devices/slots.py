"""Memory that a device copies router inputs from, and the slots on it that take turns."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import numpy as np

from moegeom.core.shapes import Shaped
from moegeom.core.tokens import TILE, StoredValues, TokenColumns, TokenSource
from moegeom.engine.devices.device_router import (
    DeviceRouter,
    device_router,
    route_batch,
    start_counters,
)
from moegeom.engine.loop import Folded, TokenRange
from moegeom.engine.prepared import check_width
from moegeom.engine.recorded import RecordedQuantities
from moegeom.engine.task import Task
from moegeom.kernels.cuda.device import Device, DeviceArray, Queue
from moegeom.kernels.cuda.route import RouteCounters, RouteOutputs

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
    kind = "float32"
    if stage == "router_input" and _stored_dtype(source, router.name) == "bfloat16":
        kind = "bfloat16"
    return InputReader(task, kind, width)


def _stored_dtype(source: TokenSource, router: str) -> str:
    return source.stored_dtype(router).name if isinstance(source, StoredValues) else ""


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
