"""Many tensors over a network: neighbours in one request, several requests at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from moegeom.checkpoint.store import TensorInfo

S = TypeVar("S")
T = TypeVar("T")

#: Bytes between two tensors that are fetched along: cheaper than one more request.
_GAP_BYTES = 16 << 10

#: Spans are not grown beyond this; a tensor that is larger is a span of its own.
_SPAN_BYTES = 8 << 20


@dataclass(frozen=True)
class Span:
    """Tensors of one file that are fetched together."""

    infos: tuple[TensorInfo, ...]

    @property
    def file(self) -> str:
        return self.infos[0].file

    @property
    def offset(self) -> int:
        return self.infos[0].offset

    @property
    def size(self) -> int:
        return max(info.offset + info.size_bytes for info in self.infos) - self.offset


def in_file_order(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """The order in which tensors are read, so that a disk reads forward."""
    return sorted(infos, key=lambda info: (info.file, info.offset, info.name))


def join_neighbours(infos: Sequence[TensorInfo]) -> list[Span]:
    """Tensors in file order, joined where at most 16 KiB lie between them in one file."""
    spans: list[list[TensorInfo]] = []
    stop = 0
    for info in infos:
        first = spans[-1][0] if spans else info
        joined = max(stop, info.offset + info.size_bytes)
        if (
            spans
            and first.file == info.file
            and info.offset - stop <= _GAP_BYTES
            and joined - first.offset <= _SPAN_BYTES
        ):
            spans[-1].append(info)
            stop = joined
        else:
            spans.append([info])
            stop = info.offset + info.size_bytes
    return [Span(tuple(span)) for span in spans]


def in_parallel(work: Callable[[S], T], items: Iterable[S], num_parallel: int) -> Iterator[T]:
    """Results in the order of the items; at most ``2 * num_parallel`` wait to be consumed."""
    if num_parallel == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_parallel) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) == 2 * num_parallel:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
