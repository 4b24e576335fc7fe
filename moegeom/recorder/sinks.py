"""Where captured tokens go: into a recording, or into the reductions of a scan in the process that
runs the model, shard by shard.

Passes are collected into shards on the device, and a thread takes them away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from moegeom.core.errors import UsageError
from moegeom.core.text import number_of
from moegeom.core.tokens import TopLogits
from moegeom.recorder.folding import FoldSink
from moegeom.recorder.keep import Keep, RouterRows, Shard, SinkFacts, Step, joined
from moegeom.recorder.ranks import merge_when_complete, part_path
from moegeom.recorder.taps import Identity, Place, as_array
from moegeom.tokens.recording.journal import recorded_tokens
from moegeom.tokens.recording.writer import RecordingWriter


class Sink(Protocol):
    """Takes shards."""

    def append(self, shard: Shard) -> None: ...


def refuse_unfoldable(facts: SinkFacts, keep: Keep) -> None:
    """Raises UsageError when folding is asked for and cannot be done.

    It needs router inputs, and several ranks something that connects them.
    """
    if not facts.fold:
        return
    if facts.ranks.num_ranks > 1 and facts.ranks.group is None:
        raise UsageError(
            f"fold=True on {number_of(facts.ranks.num_ranks, 'rank')} that nothing connects.",
            "Ranks fold together over torch.distributed: leave rank and num_ranks out, and name "
            "the group of those that run different tokens where it is not all of them.",
        )
    if keep.stage != "router_input" or keep.outputs:
        what = "outputs of experts" if keep.outputs else keep.stage
        raise UsageError(f"fold=True measures router inputs; it keeps no {what}.")


def open_sink(
    facts: SinkFacts, identity: Identity, places: Sequence[Place], keep: Keep, has_chosen: bool
) -> AbstractContextManager[Sink]:
    """The sink that was asked for; what it makes is in place when it is left without error."""
    if not facts.fold:
        return _recording(facts, identity, places, keep)
    return FoldSink(facts, identity, places, has_chosen)


class _RecordingSink:
    def __init__(self, writer: RecordingWriter) -> None:
        self._writer = writer

    def append(self, shard: Shard) -> None:
        for name in shard.domains:
            self._writer.add_domain(name)
        self._writer.append(shard.columns, shard.values, shard.chosen, outputs=shard.outputs)


def num_recorded(facts: SinkFacts) -> int:
    """Tokens that an interrupted recording of the same plan holds."""
    if facts.journal is None or facts.fold or facts.restart:
        return 0
    return recorded_tokens(_part(facts), facts.journal)


def _part(facts: SinkFacts) -> Path:
    return part_path(facts.out, facts.ranks.rank, facts.ranks.num_ranks)


@contextmanager
def _recording(
    facts: SinkFacts, identity: Identity, places: Sequence[Place], keep: Keep
) -> Iterator[Sink]:
    with RecordingWriter(
        _part(facts),
        keep.stage,
        tuple(place.router.name for place in places),
        checkpoint_name=identity.checkpoint_name,
        fingerprint=identity.fingerprint,
        engine=facts.engine,
        journal=facts.journal,
        restart=facts.restart,
    ) as writer:
        yield _RecordingSink(writer)
    merge_when_complete(facts.out, facts.ranks.num_ranks)


#: Shards that may wait for the thread: the model runs on while one is written.
_WAITING = 2


@dataclass(frozen=True, eq=False)
class StagedPass:
    """One forward pass: its tokens, and what every router gave."""

    step: Step
    rows: Mapping[str, RouterRows]


class Staging:
    """Holds passes until ``shard_tokens`` rows are there, and hands them to the sink as a shard.

    Values of GPUs stay there where they are folded there: ``device`` is one of them. A stream of
    the thread's own works on them, so that the model's runs on.
    """

    def __init__(
        self,
        sink: Sink,
        shard_tokens: int,
        domains: Sequence[str],
        has_chosen: bool,
        device: torch.device | None = None,
    ) -> None:
        self._sink, self._shard_tokens, self._device = sink, shard_tokens, device
        self._domains, self._has_chosen = domains, has_chosen
        self._staged: list[StagedPass] = []
        self._rows = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moegeom-capture")
        self._waiting: deque[Future[None]] = deque()

    def add(self, staged: StagedPass) -> None:
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
                StagedPass(
                    step,
                    {
                        name: _rows_on_host(rows, self._device is not None)
                        for name, rows in one.rows.items()
                    },
                )
                for step, one in staged
            ]
            arrived = _when_arrived(self._staged[0].step.token_id, self._staged[0].rows)
            self._waiting.append(
                self._thread.submit(self._write, moved, tuple(self._domains), arrived)
            )
        self._staged, self._rows = [], 0

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()

    def _write(
        self, staged: Sequence[StagedPass], domains: tuple[str, ...], arrived: Callable[[], None]
    ) -> None:
        arrived()
        with _stream_beside(self._device):
            self._hand_over(staged, domains)

    def _hand_over(self, staged: Sequence[StagedPass], domains: tuple[str, ...]) -> None:
        steps = [one.step.columns() for one in staged]
        first, *others = [columns for columns, _ in steps]
        columns = first.then(*others)
        if not len(columns.document):
            return
        is_token = [flags for _, flags in steps]
        values, chosen = {}, {}
        outputs: dict[str, dict[str, np.ndarray]] = {}
        for name in staged[0].rows:
            parts = [one.rows[name] for one in staged]
            values[name] = _values(parts, is_token)
            for kind in parts[0].outputs:
                joined = _joined([part.outputs[kind] for part in parts], is_token)
                outputs.setdefault(kind, {})[name] = joined
            if self._has_chosen:
                chosen[name] = _joined([part.chosen for part in parts], is_token)
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


def _values(
    parts: Sequence[RouterRows], rows: Sequence[np.ndarray]
) -> np.ndarray | TopLogits | None:
    if parts[0].values is None:
        return None
    values = _joined([part.values for part in parts], rows)
    if parts[0].expert is None:
        return values
    # numbers of experts stay as small as they are: they are stored so
    return TopLogits(values, _joined([part.expert for part in parts], rows))


def _joined(tensors: Sequence[torch.Tensor | None], rows: Sequence[np.ndarray]) -> np.ndarray:
    arrays = [_where_folded(tensor) for tensor in tensors if tensor is not None]
    # without padding a row is copied once at most
    parts = [
        a if flags.all() else a[flags if isinstance(a, np.ndarray) else torch.from_numpy(flags)]
        for a, flags in zip(arrays, rows, strict=True)
    ]
    return joined(parts)


def _where_folded(tensor: torch.Tensor) -> Any:
    """An array of the host; a tensor that has stayed on its device, as it is."""
    return tensor if tensor.device.type == "cuda" else as_array(tensor)


def _stream_beside(device: torch.device | None) -> AbstractContextManager[Any]:
    """A stream other than the model's, in which this thread works on a device."""
    return nullcontext() if device is None else torch.cuda.stream(torch.cuda.Stream(device))


def _on_host(step: Step) -> Step:
    return Step(
        _to_host(step.token_id),
        _to_host(step.document),
        _to_host(step.position),
        None if step.is_token is None else _to_host(step.is_token),
        step.domain,
    )


def _rows_on_host(rows: RouterRows, stays: bool) -> RouterRows:
    """Rows on their way to the host, but for values that are folded where they are."""
    expert, chosen = (None if t is None else _to_host(t) for t in (rows.expert, rows.chosen))
    values = rows.values
    if values is not None:
        values = values.detach() if stays else _to_host(values)
    outputs = {kind: _to_host(tensor) for kind, tensor in rows.outputs.items()}
    return RouterRows(values, expert, chosen, outputs)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy under way to memory that a device can write to by itself; the tensor on a CPU."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _when_arrived(first: torch.Tensor, rows: Mapping[str, RouterRows]) -> Callable[[], None]:
    """Waits until every copy that was sent has come."""
    tensors = (first, *(one.values for one in rows.values()), *(r.chosen for r in rows.values()))
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
