"""Some documents from a place of their own on: later turns of a conversation, a request resumed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Float64
from moegeom.studies.faults.scope import Scope, TokenRegion, Where, some_documents


def _later(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
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
    lengths = 0.0
    for number in chosen:
        begin, end = start[number], ends[number]
        inside[order[begin + first[number] : end]] = True
        lengths += math.log2(end - begin)
    yield TokenRegion(inside, f"the later part of {text}", bits + lengths)


LATER_PARTS = Scope("later_parts", _later)
