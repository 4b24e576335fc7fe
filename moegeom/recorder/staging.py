"""From the device to the sink: steps are gathered into shards, and a thread takes them away."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from moegeom.core.tokens import TopLogits
from moegeom.recorder.arrays import as_array
from moegeom.recorder.reading import Kept
from moegeom.recorder.shard import Shard
from moegeom.recorder.sinks import Sink
from moegeom.recorder.steps import Step

#: Shards that may wait for the thread: the model runs on while one is written.
_WAITING = 2


@dataclass(frozen=True, eq=False)
class Staged:
    """One forward pass: its tokens, and what every router gave."""

    step: Step
    kept: Mapping[str, Kept]


class Staging:
    """Holds passes until ``shard_tokens`` rows are there, and hands them to the sink as a shard."""

    def __init__(
        self, sink: Sink, shard_tokens: int, domains: Sequence[str], has_chosen: bool
    ) -> None:
        self._sink, self._shard_tokens = sink, shard_tokens
        self._domains, self._has_chosen = domains, has_chosen
        self._staged: list[Staged] = []
        self._rows = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moegeom-capture")
        self._waiting: deque[Future[None]] = deque()

    def add(self, staged: Staged) -> None:
        """Takes one pass in; raises what went wrong with an earlier shard."""
        self._staged.append(staged)
        self._rows += staged.step.num_rows
        if self._rows >= self._shard_tokens:
            self._send()

    def close(self, drop: bool = False) -> None:
        """Hands over what is left, unless ``drop``, and waits for the thread."""
        try:
            if not drop:
                self._send()
                self._wait(0)
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _send(self) -> None:
        self._wait(_WAITING - 1)
        if self._staged:
            staged = [(_on_host(one.step), one) for one in self._staged]
            moved = [
                Staged(step, {name: _kept_on_host(kept) for name, kept in one.kept.items()})
                for step, one in staged
            ]
            arrived = _when_arrived(self._staged[0].step.token_id, self._staged[0].kept)
            self._waiting.append(
                self._thread.submit(self._write, moved, tuple(self._domains), arrived)
            )
        self._staged, self._rows = [], 0

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()

    def _write(
        self, staged: Sequence[Staged], domains: tuple[str, ...], arrived: Callable[[], None]
    ) -> None:
        arrived()
        found = [one.step.columns() for one in staged]
        first, *others = [columns for columns, _ in found]
        columns = first.then(*others)
        if not len(columns.document):
            return
        rows = [kept for _, kept in found]
        values, chosen = {}, {}
        outputs: dict[str, dict[str, np.ndarray]] = {}
        for name in staged[0].kept:
            parts = [one.kept[name] for one in staged]
            values[name] = _values(parts, rows)
            for kind in parts[0].outputs:
                joined = _joined([part.outputs[kind] for part in parts], rows)
                outputs.setdefault(kind, {})[name] = joined
            if self._has_chosen:
                chosen[name] = _joined([part.chosen for part in parts], rows)
        has_values = all(value is not None for value in values.values())
        self._sink.append(
            Shard(
                columns,
                values if has_values else None,
                chosen if self._has_chosen else None,
                domains,
                outputs or None,
            )
        )


def _values(parts: Sequence[Kept], rows: Sequence[np.ndarray]) -> np.ndarray | TopLogits | None:
    if parts[0].values is None:
        return None
    values = _joined([part.values for part in parts], rows)
    if parts[0].expert is None:
        return values
    # numbers of experts stay as small as they are: they are stored so
    return TopLogits(values, _joined([part.expert for part in parts], rows))


def _joined(tensors: Sequence[torch.Tensor | None], rows: Sequence[np.ndarray]) -> np.ndarray:
    arrays = [as_array(tensor) for tensor in tensors if tensor is not None]
    # without padding a row is copied once at most
    found = [a if kept.all() else a[kept] for a, kept in zip(arrays, rows, strict=True)]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _on_host(step: Step) -> Step:
    return Step(
        _to_host(step.token_id),
        _to_host(step.document),
        _to_host(step.position),
        None if step.kept is None else _to_host(step.kept),
        step.domain,
    )


def _kept_on_host(kept: Kept) -> Kept:
    values, expert, chosen = (
        None if t is None else _to_host(t) for t in (kept.values, kept.expert, kept.chosen)
    )
    outputs = {kind: _to_host(tensor) for kind, tensor in kept.outputs.items()}
    return Kept(values, expert, chosen, outputs)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy under way to memory that a device can write to by itself; the tensor on a CPU."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _when_arrived(first: torch.Tensor, kept: Mapping[str, Kept]) -> Callable[[], None]:
    """Waits until every copy that was sent has come."""
    tensors = (first, *(one.values for one in kept.values()), *(k.chosen for k in kept.values()))
    devices = {t.device for t in tensors if t is not None and t.device.type == "cuda"}
    events = []
    for device in devices:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)

    def arrived() -> None:
        for event in events:
            event.synchronize()

    return arrived
