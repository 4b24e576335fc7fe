"""Positions of a document: from one on, before one, an interval, every n-th, those of chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.studies.faults.scope import Scope, TokenRegion, Where, sums

#: Chunks of a prefill, in tokens: powers of two from the first to the last.
_CHUNKS = range(4, 15)


def _interval(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    position = where.position
    of_each = sums(saved, position)
    length = len(of_each)
    if length < 2 or (position < 0).all():
        return
    bits = math.log2(length)
    total = np.concatenate([[0.0], np.cumsum(of_each)])
    first = int((total[-1] - total).argmax())
    yield TokenRegion(position >= first, f"positions from {first} on", bits)
    last = int(total.argmax())
    inside = (position >= 0) & (position < last)
    yield TokenRegion(inside, f"positions before {last}", bits)
    lowest = np.minimum.accumulate(total)
    stop = int((total - lowest).argmax())
    start = int(total[: stop + 1].argmin())
    if stop > start:
        inside = (position >= start) & (position < stop)
        yield TokenRegion(inside, f"positions {start}-{stop - 1}", 2.0 * bits)


INTERVAL = Scope("positions", _interval)


def _chunks(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    position = where.position
    has_position = position >= 0
    if not has_position.any():
        return
    for power in _CHUNKS:
        size = 2**power
        if size >= int(position.max()) + 1:
            break
        # of chunks after the first one
        inside = has_position & (position % size == 0) & (position > 0)
        text = f"the first token of chunks of {size}"
        yield TokenRegion(inside, text, math.log2(len(_CHUNKS)) + 1.0)
        inside = has_position & (position % size == size - 1)
        text = f"the last token of chunks of {size}"
        yield TokenRegion(inside, text, math.log2(len(_CHUNKS)) + 1.0)


CHUNKS = Scope("chunks", _chunks)
