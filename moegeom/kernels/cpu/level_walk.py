"""All vertices of the order-k diagram of an affine router, by ray shooting in certified float64.

The reference is :func:`moegeom.geometry.cells.exact_walk.exact_walk`, which is also where vertices
go whose signs float64 cannot prove.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from moegeom.geometry.cells.dictionary import Arrangement, Dictionary, dictionary
from moegeom.geometry.cells.exact_walk import diagram_edges, first_vertex, is_of_order
from moegeom.kernels.cpu._level_walk import (
    EXACT,
    FULL,
    GONE,
    NONE,
    PROVED,
    RAY,
    UNCERTAIN,
    check_links,
    entered,
    fill_table,
    level_walk_loop,
)

#: Vertices that there is room for at first; four times as many when that is full.
_ROOM = 1024


@dataclass(frozen=True, eq=False)
class Walked:
    """Vertices of the diagram: the experts that tie there, and those above them.

    ``links`` is the vertex at the end of each edge, as in ``level_walk_loop``. All signs are
    proved: those of vertices that are not ``is_simple`` in exact arithmetic, with ties broken as if
    the bias of a lower number were larger; ``gap`` is the least distance of the others from a tie,
    in units of its error bound. ``is_whole`` is False where ``most`` vertices were found and more
    are left.
    """

    on: Int16[np.ndarray, "vertices on"]
    above: Bool[np.ndarray, "vertices experts"]
    links: Int64[np.ndarray, "vertices edges"]
    is_simple: Bool[np.ndarray, "vertices"]
    gap: float
    is_whole: bool

    @property
    def num_exact(self) -> int:
        """Vertices that exact arithmetic decided."""
        return int((~self.is_simple).sum())

    @property
    def rays(self) -> Bool[np.ndarray, "vertices edges"]:
        """Edges without end."""
        return self.links == RAY


def level_walk(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    most: int,
) -> Walked | None:
    """Every vertex with k - d to k - 1 experts above it; None where there is none.

    For 0 < k < E, d >= 2 and rows of full rank. About a microsecond for each vertex and each few
    hundred multiply-adds of its E (d + 1); vertices that are not proved take a thousand times that.
    """
    arrangement = Arrangement(
        [[Fraction(value) for value in row] for row in weight.tolist()],
        [Fraction(value) for value in bias.tolist()],
    )
    start = first_vertex(arrangement, k)
    if start is None:
        return None
    walk = _Walk(np.ascontiguousarray(weight), np.ascontiguousarray(bias), k, most, arrangement)
    walk.add(start.on)
    is_whole = walk.run()
    return walk.found(is_whole)


class _Walk:
    """Arrays that grow while vertices are found."""

    def __init__(
        self, weight: np.ndarray, bias: np.ndarray, k: int, most: int, arrangement: Arrangement
    ) -> None:
        self._weight, self._bias, self._k, self._most = weight, bias, k, most
        self._arrangement, self._size = arrangement, weight.shape[1] + 1
        self._num = self._head = 0
        self._gap = np.array([np.inf])
        self._make(min(most, _ROOM))

    def _make(self, room: int) -> None:
        """Room for so many vertices; what was found stays."""
        old = None if self._num == 0 else (self._on, self._above, self._proved, self._links)
        self._on = np.full((room, self._size), -1, np.int16)
        self._above = np.zeros((room, len(self._weight)), np.bool_)
        self._proved = np.zeros(room, np.uint8)
        self._links = np.full((room, 2 * self._size), NONE, np.int64)
        if old is not None:
            for new, kept in zip(
                (self._on, self._above, self._proved, self._links), old, strict=True
            ):
                new[: self._num] = kept[: self._num]
        self._table = np.full(1 << max(4, (2 * room - 1).bit_length()), -1, np.int64)
        fill_table(self._table, self._on, self._num)

    def add(self, on: tuple[int, ...]) -> int | None:
        """The number of a vertex, a new one if need be; None where there is no room for it."""
        row = np.array(on, np.int16)
        number = int(entered(self._table, self._on, self._num, row))
        if number < 0 and self._grow():
            number = int(entered(self._table, self._on, self._num, row))
        if number < 0:
            return None
        self._num = max(self._num, number + 1)
        return number

    def _grow(self) -> bool:
        if len(self._on) == self._most:
            return False
        self._make(min(self._most, 4 * len(self._on)))
        return True

    def run(self) -> bool:
        """Walks until nothing is left; False where there is no room for more."""
        while True:
            while self._head < self._num:
                self._head, self._num, ended = level_walk_loop(
                    self._weight,
                    self._bias,
                    self._k,
                    self._on,
                    self._above,
                    self._proved,
                    self._links,
                    self._gap,
                    self._table,
                    self._head,
                    self._num,
                )
                if ended == FULL and not self._grow():
                    return False
            check_links(self._on, self._above, self._proved, self._links, self._num)
            left = np.flatnonzero(self._proved[: self._num] == UNCERTAIN).tolist()
            if not left:
                return True
            if not all(self._settle(vertex) for vertex in left):
                return False

    def _settle(self, vertex: int) -> bool:
        """The signs and the edges of one vertex in exact arithmetic; False where there is no room.

        Hyperplanes that only rounding made meet are no vertex: whoever came here is settled next.
        """
        on = tuple(self._on[vertex].tolist())
        found = dictionary(self._arrangement, on)
        self._links[vertex] = NONE
        if found is None:
            self._proved[vertex] = GONE
            return True
        self._proved[vertex] = EXACT
        self._above[vertex] = False
        self._above[vertex, list(found.above)] = True
        if not is_of_order(found, self._k, self._size - 1):
            self._proved[vertex] = GONE
            return True
        for column, upwards in diagram_edges(found, self._k, self._size - 1):
            end = self._end(found, column, upwards)
            if end is None:
                return False
            self._links[vertex, 2 * column + upwards] = end
        return True

    def _end(self, found: Dictionary, column: int, upwards: bool) -> int | None:
        met = found.shot(column, upwards)
        if met is None:
            return RAY
        return self.add(tuple(sorted({*found.on, met} - {found.on[column]})))

    def found(self, is_whole: bool) -> Walked:
        """What was found until now; vertices that are none are left out."""
        state = self._proved[: self._num]
        kept = np.flatnonzero(state != GONE)
        number = np.append(np.full(self._num, NONE, np.int64), [RAY, NONE])
        number[kept] = np.arange(len(kept))
        return Walked(
            self._on[kept],
            self._above[kept],
            number[self._links[kept]],
            state[kept] == PROVED,
            float(self._gap[0]),
            is_whole,
        )
