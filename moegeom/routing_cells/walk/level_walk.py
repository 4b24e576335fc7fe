"""All vertices of the order-k diagram of an affine router, by ray shooting in certified float64.

Vertices whose signs float64 cannot prove go to exact arithmetic. The reference in the
tests is a walk in exact arithmetic alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moegeom.core.shapes import Bool, Float64, Int16, Int32, Int64, UInt32, UInt64
from moegeom.routing_cells.exact.dictionary import Arrangement, Dictionary, dictionary
from moegeom.routing_cells.walk._level_vertex import (
    BOTH,
    EMPTY,
    ENTER,
    EXACT,
    EXAMINE,
    GONE,
    NONE,
    PLACE,
    PROVED,
    RAY,
    TURN,
    UNCERTAIN,
    UNORDERED,
    WEIGH,
    Level,
    Room,
    Seen,
    Vertices,
    advance,
    aligned,
    check_links,
    put,
    room_for,
)

#: Slots of the table at first, twice as many when there is no room; five of eight are used at most.
_SLOTS = 2048

#: Vertices that each thread examines before their edges are entered.
_TURN_PER_THREAD = 2048

#: Vertices between two calls of ``watch``.
_STEP = 50_000

#: Experts are padded to whole vector registers with rows of 0 that lie below all others.
_LANES, _BELOW = 8, -1e200


class WalkWatch(Protocol):
    """A listener to a walk or a search: its progress, and the answers left to exact arithmetic."""

    def __call__(self, num_done: int, num_known: int) -> None: ...

    def settles(self, num_exact: int) -> None:
        """Hears how many answers were left to exact arithmetic, about a millisecond each."""
        ...


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
    rising: UInt32[np.ndarray, "vertices"]
    links: Int32[np.ndarray, "vertices edges"]
    is_simple: Bool[np.ndarray, "vertices"]
    upwards: Float64[np.ndarray, "dims"]
    gap: float
    is_whole: bool

    @property
    def num_exact(self) -> int:
        """Vertices that exact arithmetic decided."""
        return int((~self.is_simple).sum())


def level_walk(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    most: int,
    threads: int = 1,
    watch: WalkWatch | None = None,
) -> Walked:
    """Every vertex with k - d to k - 1 experts above it.

    For 0 < k < E, d >= 2 and rows of full rank. About a microsecond for each vertex and each
    thousand multiply-adds of its E (d + 1)^2; vertices that are not proved take a thousand times
    that. The order of the vertices depends on ``threads``, what is found does not. ``watch`` is
    told from time to time how many vertices are done and known.
    """
    walk = _Walk(weight, bias, k, most, threads, watch)
    return walk.walked(walk.run())


class _Walk:
    """A walk in progress, with arrays that grow."""

    _vertices: Vertices
    _seen: Seen

    def __init__(
        self,
        weight: np.ndarray,
        bias: np.ndarray,
        k: int,
        most: int,
        threads: int,
        watch: WalkWatch | None,
    ) -> None:
        experts, d = weight.shape
        self._weight, self._bias, self._most = weight, bias, most
        self._threads, self._watch, self._size = threads, watch, d + 1
        generator = np.random.default_rng(0)
        self._level = _level(weight, bias, k, generator.standard_normal(d))
        self._marks = generator.integers(1, 2**63, experts).astype(np.uint64)
        self._arrangement = Arrangement.of(weight, bias)
        self._num = self._head = self._num_left = 0
        self._notes = np.array([np.inf, 0.0])
        self._room = room_for(self._size, len(self._level.bias))
        self._make(_SLOTS)
        self._add(first_vertex(self._arrangement, k).on)

    def _make(self, slots: int) -> None:
        """Makes a table with room for its vertices and copies the known vertices.

        Array by array, so that only one of them is held twice.
        """
        room, size, num = min(self._most, slots // 8 * 5), self._size, self._num
        empty = _vertices(room, size, len(self._weight))
        if num:
            old = list(self._vertices)
            del self._vertices, self._seen
            for array in empty:
                array[:num] = old.pop(0)[:num]
        self._vertices = empty
        self._seen = _seen(slots, self._marks, size)
        put(self._seen, empty.on, 0, num)

    def _add(self, on: Int64[np.ndarray, "on"] | tuple[int, ...]) -> int | None:
        """The number of a vertex, a new one if need be; None where there is no room for it."""
        while True:
            new = self._num
            self._vertices.on[new] = on
            number = int(put(self._seen, self._vertices.on, new, new + 1))
            if number < new:
                return number
            if new < len(self._vertices.state):
                self._vertices.links[new], self._vertices.state[new] = NONE, UNCERTAIN
                self._num += 1
                return new
            if not self._grow():
                return None

    def _grow(self) -> bool:
        if len(self._vertices.state) == self._most:
            return False
        self._make(2 * len(self._seen.table))
        return True

    def _advance(
        self,
        work: int,
        vertices: Vertices,
        met: Int16[np.ndarray, "turn edges"],
        notes: Float64[np.ndarray, "2"],
        span: tuple[int, int, int, int],
        room: Room | None = None,
    ) -> tuple[int, int, bool]:
        """``advance``, where ``span`` is its ``first``, ``head``, ``num`` and ``last``."""
        head, num, has_room = advance(
            self._level, vertices, self._seen, met, notes, *span, room or self._room,
            np.empty((0, 0)), work,
        )  # fmt: skip
        return int(head), int(num), has_room

    def run(self) -> bool:
        """Walks until nothing is left; False where there is no room for more."""
        while True:
            while self._head < self._num:
                if self._threads > 1 and self._num - self._head >= self._threads * 512:
                    has_room = self._turn_of_all()
                else:
                    has_room = self._turn_of_one()
                if self._watch is not None:
                    self._watch(int(self._head), int(self._num))
                if not has_room and not self._grow():
                    return False
            state = self._vertices.state[: self._num]
            is_plain = self._notes[1] == 0.0 and bool((state == PROVED).all())
            expected = np.empty_like(self._vertices.above[0])
            if check_links(self._vertices, self._num, is_plain, expected) == 0 and is_plain:
                return True
            left = np.flatnonzero(state == UNCERTAIN).tolist()
            if not left:
                return True
            self._num_left += len(left)
            if self._watch is not None:
                self._watch.settles(self._num_left)
            if not all(self._settle(vertex) for vertex in left):
                return False

    def _turn_of_one(self) -> bool:
        """Takes the next vertices in one thread; False where there is no room for more."""
        met = np.empty((TURN, 2 * self._size), np.int16)
        span = self._head, self._head, self._num, self._head + _STEP
        self._head, self._num, has_room = self._advance(
            BOTH, self._vertices, met, self._notes, span
        )
        return has_room

    def _turn_of_all(self) -> bool:
        """Takes a piece of the frontier in all threads; False where there is no room for more."""
        start = self._head
        stop = min(self._num, start + self._threads * _TURN_PER_THREAD)
        met = np.empty((stop - start, 2 * self._size), np.int16)
        cuts = np.linspace(start, stop, self._threads + 1).astype(int)
        notes = [np.array([np.inf, 0.0]) for _ in range(self._threads)]
        with ThreadPoolExecutor(self._threads) as pool:
            parts = [
                pool.submit(
                    self._advance,
                    EXAMINE,
                    self._vertices,
                    met[a - start : b - start],
                    n,
                    (a, a, b, b),
                    room_for(self._size, len(self._level.bias)),
                )
                for a, b, n in zip(cuts[:-1].tolist(), cuts[1:].tolist(), notes, strict=True)
            ]
            for part in parts:
                part.result()
        self._notes[0] = min(self._notes[0], *(part[0] for part in notes))
        while self._head < stop:
            self._head, self._num, has_room = self._advance(
                ENTER, self._vertices, met, self._notes, (start, self._head, self._num, stop)
            )
            if not has_room and not self._grow():
                return False
        return True

    def _settle(self, vertex: int) -> bool:
        """Settles one vertex in exact arithmetic; False where there is no room for its neighbours.

        Hyperplanes that only rounding made meet are no vertex: whoever came here is settled next.
        """
        on = tuple(self._vertices.on[vertex].tolist())
        exact = dictionary(self._arrangement, on)
        self._vertices.links[vertex] = NONE
        if exact is None:
            self._vertices.state[vertex] = GONE
            return True
        self._vertices.above[vertex] = 0
        for expert in exact.above:
            self._vertices.above[vertex, expert >> 6] |= np.uint64(1 << (expert & 63))
        if not is_of_order(exact, self._level.k, self._size - 1):
            self._vertices.state[vertex] = GONE
            return True
        self._vertices.state[vertex] = EXACT
        self._vertices.rising[vertex] = UNORDERED
        for column, upwards in diagram_edges(exact, self._level.k, self._size - 1):
            end = self._end(exact, column, upwards)
            if end is None:
                return False
            self._vertices.links[vertex, 2 * column + upwards] = end
        return True

    def _end(self, exact: Dictionary, column: int, upwards: bool) -> int | None:
        met = exact.shot(column, upwards)
        if met is None:
            return RAY
        return self._add(tuple(sorted({*exact.on, met} - {exact.on[column]})))

    def walked(self, is_whole: bool) -> Walked:
        """The vertices of the walk so far; on-sets that are no vertex are left out."""
        on, above, rising, state, links = (array[: self._num] for array in self._vertices)
        if (state == GONE).any():
            rows = np.flatnonzero(state != GONE)
            number = np.append(np.full(self._num, NONE, np.int32), np.array([RAY, NONE], np.int32))
            number[rows] = np.arange(len(rows))
            on, above, rising, state = on[rows], above[rows], rising[rows], state[rows]
            links = number[links[rows]]
        return Walked(
            on=on,
            bits=above,
            rising=rising,
            links=links,
            is_simple=state == PROVED,
            upwards=self._level.upwards,
            gap=float(self._notes[0]),
            is_whole=is_whole,
        )


def first_vertex(arrangement: Arrangement, k: int) -> Dictionary:
    """A vertex of the order-k diagram: no cell holds a line where rows have full rank.

    Often one of the experts around rank k at a point without pattern, else of any experts.
    """
    size = arrangement.dimension + 1
    every = itertools.combinations(range(arrangement.num_experts), size)
    for on in itertools.chain(_guesses(arrangement, k), every):
        vertex = dictionary(arrangement, on)
        if vertex is not None and is_of_order(vertex, k, arrangement.dimension):
            return vertex
    raise AssertionError("rows of full rank have a vertex of each order")


def is_of_order(vertex: Dictionary, k: int, dimension: int) -> bool:
    """Whether cells with k experts above meet at the vertex."""
    return k - dimension <= len(vertex.above) <= k - 1


def _guesses(arrangement: Arrangement, k: int) -> Iterator[tuple[int, ...]]:
    """As many experts around rank k as a vertex takes, at points of the size of the numbers."""
    experts, d = arrangement.num_experts, arrangement.dimension
    weight, bias = (np.array(part, np.float64) for part in (arrangement.weight, arrangement.bias))
    generator = np.random.default_rng(1)
    # one scale for rows and one for biases, so that points lie where logits are comparable
    scale = max(float(np.abs(bias).max()), 1e-12) / max(float(np.abs(weight).max()), 1e-12)
    starts = np.clip(k - 1 - np.arange(d + 1), 0, experts - d - 1)
    for attempt in range(16):
        point = generator.standard_normal(d) * scale * 2.0 ** (attempt % 4 - 2)
        order = np.argsort(-(weight @ point + bias), kind="stable")
        for around in np.sort(order[starts[:, None] + np.arange(d + 1)], axis=1).tolist():
            yield tuple(around)


def diagram_edges(vertex: Dictionary, k: int, dimension: int) -> Iterator[tuple[int, bool]]:
    """Edges of the diagram at a vertex: which expert leaves the level, and to which side."""
    above = len(vertex.above)
    for column in range(len(vertex.on)):
        if above <= k - 2:
            yield column, True
        if above >= k - dimension + 1:
            yield column, False


def _columns(
    weight: Float64[np.ndarray, "experts dims"], lanes: int
) -> Float64[np.ndarray, "on lanes"]:
    """The columns of the rows, padded with zeros, and one of zeros."""
    experts, d = weight.shape
    columns = aligned(d + 1, lanes)
    columns.fill(0.0)
    columns[:d, :experts] = weight.T
    return columns


def _level(
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    k: int,
    upwards: Float64[np.ndarray, "dims"],
) -> Level:
    experts = len(bias)
    lanes = -(-experts // _LANES) * _LANES
    padded = aligned(lanes)
    padded.fill(_BELOW)
    padded[:experts] = bias
    return Level(_columns(weight, lanes), padded, k, experts, upwards)


def _vertices(room: int, size: int, experts: int) -> Vertices:
    return Vertices(
        on=np.empty((room + 1, size), np.int16),
        above=np.empty((room, (experts + 63) // 64), np.uint64),
        rising=np.empty(room, np.uint32),
        state=np.empty(room, np.uint8),
        links=np.empty((room, 2 * size), np.int32),
    )


def _seen(slots: int, marks: UInt64[np.ndarray, "experts"], size: int) -> Seen:
    return Seen(np.full(slots, EMPTY), marks, np.empty(size, np.int16))


def points_of(
    on: Int16[np.ndarray, "vertices on"],
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
) -> Float64[np.ndarray, "vertices dims"]:
    """Where vertices lie: the numbers with which their signs were proved."""
    d = weight.shape[1]
    return _worked(PLACE, on, _level(weight, bias, 0, np.zeros(d)), d)


@dataclass(frozen=True, eq=False)
class Weighed:
    """The places of vertices with error bounds, and multipliers that lead there from a centre.

    ``multipliers`` [vertices, on] of the experts on the level sum to 0, and their rows times those
    to the way from a centre to the vertex, but for rounding.
    """

    point: Float64[np.ndarray, "vertices dims"]
    error: Float64[np.ndarray, "vertices dims"]
    multipliers: Float64[np.ndarray, "vertices on"]


def weighed(
    on: Int16[np.ndarray, "vertices on"],
    weight: Float64[np.ndarray, "experts dims"],
    bias: Float64[np.ndarray, "experts"],
    centre: Float64[np.ndarray, "dims"],
) -> Weighed:
    """Vertices as seen from a centre; errors are infinite where none are proved."""
    d = len(centre)
    columns = _worked(WEIGH, on, _level(weight, bias, 0, centre), 3 * d + 1)
    return Weighed(columns[:, :d], columns[:, d : 2 * d], columns[:, 2 * d :])


def _worked(
    work: int, on: Int16[np.ndarray, "vertices on"], level: Level, width: int
) -> Float64[np.ndarray, "vertices width"]:
    num, size = on.shape
    columns, vertices = np.empty((num, width)), _vertices(0, size, level.num_experts)
    advance(
        level, vertices._replace(on=on), _seen(0, np.empty(0, np.uint64), size),
        np.empty((0, 0), np.int16), np.empty(2), 0, 0, num, num,
        room_for(size, len(level.bias)), columns, work,
    )  # fmt: skip
    return columns
