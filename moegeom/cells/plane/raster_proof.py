"""Rectangles of a plane and the chosen sets that are proved for them, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int32

from moegeom.cells.plane.raster_choice import certain_choice
from moegeom.cells.plane.raster_enclosure import Rectangles
from moegeom.cells.plane.raster_slice import PlaneRouter
from moegeom.cells.plane.score_ranges import score_ranges

#: Numbers of one array of a chunk: all arrays of a chunk together stay within some 50 MB.
_CHUNK = 1 << 15


class Coalitions:
    """Numbers of chosen sets, in the order in which they are first met."""

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}
        self._size = 0

    def numbered(self, chosen: np.ndarray) -> Int32[np.ndarray, "n"]:
        """Number of each row, new ones included."""
        rows = np.ascontiguousarray(chosen, dtype=np.int32)
        self._size = rows.shape[1]
        number = self._number
        keys = rows.view(f"V{rows.itemsize * self._size}").ravel().tolist()
        return np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int32)

    def listed(self) -> list[tuple[int, ...]]:
        """All sets so far, by number."""
        return [tuple(np.frombuffer(key, dtype=np.int32).tolist()) for key in self._number]


def proved_sets(
    router: PlaneRouter, rectangles: Rectangles, found: Coalitions
) -> tuple[Bool[np.ndarray, "n"], Int32[np.ndarray, "n"]]:
    """Whether one set is chosen on each rectangle, and its number (-1 where it is not proved)."""
    is_proved = np.zeros(len(rectangles.centre), dtype=bool)
    number = np.full(len(is_proved), -1, dtype=np.int32)
    for some in chunks(len(is_proved), router):
        part = Rectangles(rectangles.centre[some], rectangles.half[some])
        is_proved[some], chosen = certain_choice(score_ranges(router, part), router.rule)
        hits = np.flatnonzero(is_proved[some])
        number[some][hits] = found.numbered(chosen[hits])
    return is_proved, number


def chunks(total: int, router: PlaneRouter) -> Iterator[slice]:
    """Slices of so many rectangles that their arrays stay within a cache."""
    experts = len(router.offset)
    groups = 0 if router.rule.groups is None else router.rule.groups.num_groups
    pairs = max(router.rule.top_k * min(experts, 16), 6 * groups * groups)
    step = max(_CHUNK // max(experts, pairs), 1)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
