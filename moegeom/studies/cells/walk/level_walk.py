"""All vertices of the order-k diagram of an affine router, by ray shooting in certified float64.

The reference is :func:`moegeom.studies.cells.exact.exact_walk.exact_walk`, which is also where
vertices go whose signs float64 cannot prove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int32, UInt32, UInt64

from moegeom.studies.cells.exact.dictionary import Arrangement, Dictionary, dictionary
from moegeom.studies.cells.exact.exact_walk import diagram_edges, first_vertex, is_of_order
from moegeom.studies.cells.walk._level_vertex import (
    EXACT,
    GONE,
    NONE,
    PROVED,
    RAY,
    UNCERTAIN,
    UNORDERED,
    Level,
    Seen,
    Vertices,
    advance,
    check_links,
    enter,
    entered,
    examine,
    fill_table,
)

#: Vertices that there is room for at first; four times as many when that is full.
_ROOM = 1024

#: Vertices that are examined before their edges are entered: few, so that most edges are known from
#: their other end, and per thread where there are several.
_TURN, _TURN_PER_THREAD = 32, 2048

#: Vertices between two calls of ``watch``.
_STEP = 50_000

#: Experts are padded to whole vector registers with rows of 0 that lie below all others.
_LANES, _BELOW = 8, -1e200

Watch = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Walked:
    """Vertices of the diagram: the experts that tie there, and those above them.

    ``bits`` holds the experts above as bits, ``links`` the vertex at the end of each edge, at 2 c
    where ``on[c]`` goes down and 2 c + 1 where it goes up (-2 for an edge without end, -1 where the
    diagram has none). ``rising`` marks as bits the experts of ``on`` whose edge upwards climbs
    along ``upwards``, a direction without pattern; its highest bit is set where that is not proved.
    All signs are proved: those of vertices that are not ``is_simple`` in exact arithmetic, with
    ties broken as if the bias of a lower number were larger; ``gap`` is the least distance of the
    others from a tie, in units of its error bound. ``is_whole`` is False where ``most`` vertices
    were found and more are left.
    """

    on: Int16[np.ndarray, "vertices on"]
    bits: UInt64[np.ndarray, "vertices words"]
    point: Float64[np.ndarray, "vertices dims"]
    rising: UInt32[np.ndarray, "vertices"]
    links: Int32[np.ndarray, "vertices edges"]
    is_simple: Bool[np.ndarray, "vertices"]
    upwards: Float64[np.ndarray, "dims"]
    num_experts: int
    gap: float
    is_whole: bool

    @property
    def above(self) -> Bool[np.ndarray, "vertices experts"]:
        """The experts above the level at each vertex."""
        octets = self.bits.astype("<u8").view(np.uint8)
        found = np.unpackbits(octets, axis=1, count=self.num_experts, bitorder="little")
        return found.astype(bool)

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
    threads: int = 1,
    watch: Watch | None = None,
) -> Walked | None:
    """Every vertex with k - d to k - 1 experts above it; None where there is none.

    For 0 < k < E, d >= 2 and rows of full rank. About a microsecond for each vertex and each
    thousand multiply-adds of its E (d + 1)^2; vertices that are not proved take a thousand times
    that. The order of the vertices depends on ``threads``, what is found does not. ``watch`` is
    told from time to time how many vertices are done and known.
    """
    walk = _Walk(weight, bias, k, most, threads, watch)
    if not walk.begin():
        return None
    return walk.found(walk.run())


class _Walk:
    """Arrays that grow while vertices are found."""

    _vertices: Vertices
    _seen: Seen

    def __init__(
        self,
        weight: np.ndarray,
        bias: np.ndarray,
        k: int,
        most: int,
        threads: int,
        watch: Watch | None,
    ) -> None:
        experts, d = weight.shape
        self._weight, self._bias, self._most = weight, bias, most
        self._threads, self._watch, self._size = threads, watch, d + 1
        lanes = -(-experts // _LANES) * _LANES
        columns, padded = np.zeros((d, lanes)), np.full(lanes, _BELOW)
        columns[:, :experts], padded[:experts] = weight.T, bias
        generator = np.random.default_rng(0)
        upwards = tuple(generator.standard_normal(d).tolist())
        self._level = Level(columns, padded, k, experts, upwards)
        self._marks = generator.integers(1, 2**63, experts).astype(np.uint64)
        self._exact: Arrangement | None = None
        self._num = self._head = 0
        self._gap = np.array([np.inf])
        self._make(min(most, _ROOM))

    @property
    def _arrangement(self) -> Arrangement:
        if self._exact is None:
            self._exact = Arrangement(
                [[Fraction(value) for value in row] for row in self._weight.tolist()],
                [Fraction(value) for value in self._bias.tolist()],
            )
        return self._exact

    def _make(self, room: int) -> None:
        """Room for so many vertices; what was found stays."""
        words, size, num = (len(self._weight) + 63) // 64, self._size, self._num
        grown = Vertices(
            on=np.full((room, size), -1, np.int16),
            above=np.zeros((room, words), np.uint64),
            point=np.zeros((room, size - 1)),
            rising=np.zeros(room, np.uint32),
            state=np.zeros(room, np.uint8),
            links=np.full((room, 2 * size), NONE, np.int32),
        )
        table = np.full(1 << max(4, (2 * room - 1).bit_length()), -1, np.int32)
        seen = Seen(table, np.zeros(room, np.uint64), self._marks)
        if num:
            for array, old in zip(grown, self._vertices, strict=True):
                array[:num] = old[:num]
            seen.codes[:num] = self._seen.codes[:num]
        fill_table(seen, grown.on, num, self._level.upwards)
        self._vertices, self._seen = grown, seen

    def _add(self, on: tuple[int, ...]) -> int | None:
        """The number of a vertex, a new one if need be; None where there is no room for it."""
        row = np.array(on, np.int16)
        for _ in range(2):
            number = entered(self._seen, self._vertices.on, self._num, row, self._level.upwards)
            if number >= 0:
                self._num = max(self._num, int(number) + 1)
                return int(number)
            if not self._grow():
                break
        return None

    def _grow(self) -> bool:
        if len(self._vertices.on) == self._most:
            return False
        self._make(min(self._most, 4 * len(self._vertices.on)))
        return True

    def begin(self) -> bool:
        """A first vertex, proved in float64 where one is found so; False where there is none."""
        for on in _guesses(self._weight, self._bias, self._level.k):
            number = self._add(on)
            if number is None:
                return True
            met = np.empty((1, 2 * self._size), np.int16)
            self._examine(met, number, number + 1, self._gap)
            if self._vertices.state[number] == PROVED:
                return True
            self._num, self._vertices.state[number] = 0, UNCERTAIN
            self._seen.table.fill(-1)
        first = first_vertex(self._arrangement, self._level.k)
        return first is not None and self._add(first.on) is not None

    def _examine(self, met: np.ndarray, start: int, stop: int, gap: np.ndarray) -> None:
        examine(self._level, self._vertices, met, gap, start, stop)

    def run(self) -> bool:
        """Walks until nothing is left; False where there is no room for more."""
        turn = np.empty((_TURN, 2 * self._size), np.int16)
        while True:
            while self._head < self._num:
                if self._threads > 1 and self._num - self._head >= self._threads * 512:
                    has_room = self._turn_of_all()
                else:
                    self._head, self._num, has_room = advance(
                        self._level, self._vertices, self._seen, turn, self._gap,
                        self._head, self._num, _STEP,
                    )  # fmt: skip
                if self._watch is not None:
                    self._watch(self._head, self._num)
                if not has_room and not self._grow():
                    return False
            check_links(self._vertices, self._num)
            left = np.flatnonzero(self._vertices.state[: self._num] == UNCERTAIN).tolist()
            if not left:
                return True
            if not all(self._settle(vertex) for vertex in left):
                return False

    def _turn_of_all(self) -> bool:
        """A piece of the frontier, a part for each thread; False where there was no room."""
        start = self._head
        stop = min(self._num, start + self._threads * _TURN_PER_THREAD)
        met = np.empty((stop - start, 2 * self._size), np.int16)
        cuts = np.linspace(start, stop, self._threads + 1).astype(int)
        gaps = [np.array([np.inf]) for _ in range(self._threads)]
        with ThreadPoolExecutor(self._threads) as pool:
            parts = [
                pool.submit(self._examine, met[a - start : b - start], a, b, gap)
                for a, b, gap in zip(cuts[:-1].tolist(), cuts[1:].tolist(), gaps, strict=True)
            ]
            for part in parts:
                part.result()
        self._gap[0] = min(self._gap[0], *(gap[0] for gap in gaps))
        while self._head < stop:
            self._head, self._num = enter(
                self._vertices, self._seen, met, start, self._head, stop, self._num,
                self._level.upwards,
            )  # fmt: skip
            if self._head < stop and not self._grow():
                return False
        return True

    def _settle(self, vertex: int) -> bool:
        """The signs and the edges of one vertex in exact arithmetic; False where there is no room.

        Hyperplanes that only rounding made meet are no vertex: whoever came here is settled next.
        """
        on = tuple(self._vertices.on[vertex].tolist())
        found = dictionary(self._arrangement, on)
        self._vertices.links[vertex] = NONE
        if found is None:
            self._vertices.state[vertex] = GONE
            return True
        self._vertices.above[vertex] = 0
        for expert in found.above:
            self._vertices.above[vertex, expert >> 6] |= np.uint64(1 << (expert & 63))
        if not is_of_order(found, self._level.k, self._size - 1):
            self._vertices.state[vertex] = GONE
            return True
        self._vertices.state[vertex] = EXACT
        self._vertices.rising[vertex] = UNORDERED
        self._vertices.point[vertex] = [float(value) for value in found.point(self._arrangement)]
        for column, upwards in diagram_edges(found, self._level.k, self._size - 1):
            end = self._end(found, column, upwards)
            if end is None:
                return False
            self._vertices.links[vertex, 2 * column + upwards] = end
        return True

    def _end(self, found: Dictionary, column: int, upwards: bool) -> int | None:
        met = found.shot(column, upwards)
        if met is None:
            return RAY
        return self._add(tuple(sorted({*found.on, met} - {found.on[column]})))

    def found(self, is_whole: bool) -> Walked:
        """What was found until now; vertices that are none are left out."""
        state = self._vertices.state[: self._num]
        kept = np.flatnonzero(state != GONE)
        number = np.append(np.full(self._num, NONE, np.int32), np.array([RAY, NONE], np.int32))
        number[kept] = np.arange(len(kept))
        return Walked(
            on=self._vertices.on[kept],
            bits=self._vertices.above[kept],
            point=self._vertices.point[kept],
            rising=self._vertices.rising[kept],
            links=number[self._vertices.links[kept]],
            is_simple=state[kept] == PROVED,
            upwards=np.array(self._level.upwards),
            num_experts=len(self._weight),
            gap=float(self._gap[0]),
            is_whole=is_whole,
        )


def _guesses(weight: np.ndarray, bias: np.ndarray, k: int) -> Iterator[tuple[int, ...]]:
    """Experts around rank k at points without pattern: often those of a vertex of the diagram."""
    experts, d = weight.shape
    generator = np.random.default_rng(1)
    # one scale for rows and one for biases, so that points lie where logits are comparable
    scale = max(float(np.abs(bias).max()), 1e-12) / max(float(np.abs(weight).max()), 1e-12)
    for attempt in range(16):
        point = generator.standard_normal(d) * scale * 2.0 ** (attempt % 4 - 2)
        order = np.argsort(-(weight @ point + bias), kind="stable")
        for before in range(d + 1):
            start = min(max(0, k - 1 - before), experts - d - 1)
            yield tuple(sorted(order[start : start + d + 1].tolist()))
