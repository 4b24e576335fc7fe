"""Where a fault may have been: documents, positions, ranks that take tokens in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.studies.faults.scope import TokenRegion, Where, listed, scope, some_documents, sums

#: Chunks of a prefill, in tokens: powers of two from the first to the last.
_CHUNKS = range(4, 15)

#: Numbers of ranks that are tried.
_MOST_RANKS = 16

#: What is counted modulo a number of ranks, by the name that :class:`Where` has for it.
_COUNTED = {"number": "tokens", "position": "positions", "document": "documents"}


@scope
def documents(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    """Some documents; those of an engine are its requests."""
    names, group = where.documents
    if len(names) < 2 or names[0] < 0:
        return
    chosen, text, bits = some_documents(sums(saved, group), names, len(names) - 1)
    yield TokenRegion(np.isin(group, chosen), text, bits)


@scope
def later_parts(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    """Some documents from a place of their own on: later turns of a conversation, a resumption."""
    names, group = where.documents
    if len(names) < 2 or names[0] < 0:
        return
    order = np.argsort(group, kind="stable")
    start = np.flatnonzero(np.diff(group[order], prepend=-1))
    ends = np.append(start[1:], len(order))
    best, first = np.zeros(len(names)), np.zeros(len(names), np.int64)
    for number, (begin, end) in enumerate(zip(start, ends, strict=True)):
        behind = np.cumsum(saved[order[begin:end]][::-1])[::-1]
        first[number] = int(behind.argmax())
        best[number] = behind[first[number]] - math.log2(end - begin)
    chosen, text, bits = some_documents(best, names, len(names))
    inside = np.zeros(len(saved), bool)
    for number in chosen:
        inside[order[start[number] + first[number] : ends[number]]] = True
    lengths = sum(math.log2(ends[number] - start[number]) for number in chosen)
    yield TokenRegion(inside, f"the later part of {text}", bits + lengths)


@scope
def positions(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    """Positions of a document from one on, before one, and an interval."""
    position = where.position
    of_each = sums(saved, position)
    length = len(of_each)
    if length < 2 or (position < 0).all():
        return
    bits = math.log2(length)
    total = np.concatenate([[0.0], np.cumsum(of_each)])
    first, last = int((total[-1] - total).argmax()), int(total.argmax())
    yield TokenRegion(position >= first, f"positions from {first} on", bits)
    is_early = (position >= 0) & (position < last)
    yield TokenRegion(is_early, f"positions before {last}", bits)
    stop = int((total - np.minimum.accumulate(total)).argmax())
    start = int(total[: stop + 1].argmin())
    if stop > start:
        inside = (position >= start) & (position < stop)
        yield TokenRegion(inside, f"positions {start}-{stop - 1}", 2.0 * bits)


@scope
def chunks(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    """The first tokens or the last one of each chunk of a prefill."""
    position = where.position
    bits = math.log2(len(_CHUNKS)) + 1.0
    for power in _CHUNKS:
        size = 2**power
        if size >= int(position.max()) + 1:
            break
        # of chunks after the first one; of several tokens as many as save most
        behind = np.where(position >= size, position % size, -1)
        most = int(np.cumsum(sums(saved, behind)).argmax()) + 1
        yield TokenRegion(behind == 0, f"the first token of chunks of {size}", bits)
        if 1 < most < size:
            text = f"the first {most} tokens of chunks of {size}"
            yield TokenRegion((behind >= 0) & (behind < most), text, bits + math.log2(size))
        is_last = (position >= 0) & (position % size == size - 1)
        yield TokenRegion(is_last, f"the last token of chunks of {size}", bits)


def _in_turn(
    saved: Float64[np.ndarray, "tokens"], where: Where, kind: str
) -> Iterator[TokenRegion]:
    for count in range(2, _MOST_RANKS + 1):
        group = where.turn(kind, count)
        of_each = np.append(sums(saved, group), np.zeros(count))[:count]
        is_chosen = of_each > 0.0
        chosen = np.flatnonzero(is_chosen)
        if 0 < len(chosen) < count:
            # the place behind the last is that of -1
            inside = np.append(is_chosen, False)[group]
            text = f"{_COUNTED[kind]} {listed(chosen)} modulo {count}"
            yield TokenRegion(inside, text, math.log2(_MOST_RANKS) + count)


@scope
def ranks(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    """Tokens by their number in the recording, modulo a number of ranks."""
    yield from _in_turn(saved, where, "number")


@scope
def turns(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    """Tokens by their position, modulo a number of ranks."""
    yield from _in_turn(saved, where, "position")


@scope
def requests(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    """Tokens by their document, modulo a number of ranks."""
    yield from _in_turn(saved, where, "document")
