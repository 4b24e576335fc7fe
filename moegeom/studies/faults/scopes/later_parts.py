"""Some documents from a place of their own on: later turns of a conversation, a request resumed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64

from moegeom.geometry.set_code import log2_sets
from moegeom.studies.faults.scope import Scope, TokenRegion, Where, listed

#: Documents that are named.
_NAMED = 8


def _later(saved: Float64[np.ndarray, "tokens"], where: Where) -> Iterator[TokenRegion]:
    names, group = np.unique(where.document, return_inverse=True)
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
    ranked = np.argsort(-best, kind="stable")
    count = np.arange(1, len(names) + 1)
    cost = np.array([log2_sets(len(names), int(m)) for m in count]) + math.log2(len(names))
    most = int((np.cumsum(best[ranked]) - cost).argmax())
    chosen = np.sort(ranked[: most + 1])
    inside = np.zeros(len(saved), bool)
    lengths = 0.0
    for number in chosen:
        begin, end = start[number], ends[number]
        inside[order[begin + first[number] : end]] = True
        lengths += math.log2(end - begin)
    named = f" ({listed(names[chosen])})" if len(chosen) <= _NAMED else ""
    text = f"the later part of {len(chosen)} of {len(names)} documents{named}"
    yield TokenRegion(inside, text, float(cost[most]) + lengths)


LATER_PARTS = Scope("later_parts", _later)
