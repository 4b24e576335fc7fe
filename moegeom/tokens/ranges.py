"""Ranges of tokens: whether a source has them, and in which shards they lie."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from jaxtyping import Int64

from moegeom.core.errors import InternalError
from moegeom.core.tokens import SourceFacts


def check_range(facts: SourceFacts, start: int, stop: int) -> None:
    """Raise unless the source has tokens ``[start, stop)``; asking for others is a bug of ours."""
    if not 0 <= start <= stop <= facts.num_tokens:
        raise InternalError(
            f"{facts.name}: tokens [{start}, {stop}) were asked for; it has {facts.num_tokens}."
        )


def consecutive(numbers: Int64[np.ndarray, "numbers"]) -> Iterator[tuple[int, int]]:
    """Ranges ``[start, stop)`` of numbers that follow one another by one, in their order."""
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for first, last in pairwise(edges):
        if last > first:
            yield int(numbers[first]), int(numbers[last - 1]) + 1


def shard_ranges(starts: tuple[int, ...], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(shard, first, last) of every piece of ``[start, stop)``, in rows of that shard.

    ``starts`` has one entry more than there are shards: the total.
    """
    if start >= stop:
        return []
    pieces = []
    for shard in range(bisect_right(starts, start) - 1, len(starts) - 1):
        low, high = starts[shard], starts[shard + 1]
        if low >= stop:
            break
        if low < high:
            pieces.append((shard, max(start, low) - low, min(stop, high) - low))
    return pieces
