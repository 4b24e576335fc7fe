"""Cells and facets of a whole walk with its ties broken, and points of its cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from moegeom.core.shapes import Bool, Float64, Int16, Int32, Int64, UInt32, UInt64
from moegeom.kernels.cpu import COUNTLESS, UNCOUNTED, kernel
from moegeom.routing_cells.walk._level_vertex import NONE, RAY, num_bits
from moegeom.routing_cells.walk.level_walk import Walked

#: Slots of a table at first, twice as many when half of them are used.
_SLOTS = 1024

#: No pair of cells.
_NO_PAIR = np.uint64(2**64 - 1)


@njit(**UNCOUNTED)
def _next_choice(value):
    """The next larger number with as many bits."""
    low = value & (~value + np.uint32(1))
    high = value + low
    return high | (((value ^ high) // low) >> np.uint32(2))


@njit(**UNCOUNTED)
def _num_above(bits):
    count = 0
    for word in bits:
        count += num_bits(word)
    return count


@njit(**UNCOUNTED)
def _join(bits, own, some, out):
    """The experts above and those of ``own`` that ``some`` marks."""
    for w in range(len(bits)):
        out[w] = bits[w]
    for c in range(len(own)):
        bit = np.uint64((some >> np.uint32(c)) & np.uint32(1))
        out[own[c] >> 6] |= bit << np.uint64(own[c] & 63)


@njit(**UNCOUNTED)
def _mixed(value):
    """A number whose low bits depend on all bits of ``value``."""
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return value ^ (value >> np.uint64(29))


@njit(**UNCOUNTED)
def _slot(table, masks, mask):
    """Where an expert set is in the table, or the empty slot where it belongs."""
    last, code = np.uint64(len(table) - 1), np.uint64(0)
    for w in range(len(mask)):
        code = _mixed(code ^ mask[w])
    slot = code & last
    while table[slot] >= 0:
        same = True
        for w in range(len(mask)):
            same &= masks[table[slot], w] == mask[w]
        if same:
            return slot
        slot = (slot + np.uint64(1)) & last
    return slot


@kernel(**COUNTLESS)
def fill_cells(table, masks):
    """Puts expert sets into an empty table."""
    for cell in range(len(masks)):
        table[_slot(table, masks, masks[cell])] = cell


@njit(**UNCOUNTED)
def _cell(tables, num, mask, vertex):
    """The number of an expert set, ``num`` for a new one."""
    table, masks, vertex_of, is_bounded = tables
    slot = _slot(table, masks, mask)
    if table[slot] < 0:
        for w in range(len(mask)):
            masks[num, w] = mask[w]
        vertex_of[num], is_bounded[num] = vertex, True
        table[slot] = num
    return table[slot]


@njit(**UNCOUNTED)
def _read_rays(links, vertex, rays):
    """As bits the experts of the level whose edge downwards and whose edge upwards has no end."""
    rays[0] = rays[1] = np.uint32(0)
    for edge in range(links.shape[1]):
        is_ray = np.uint32(links[vertex, edge] == RAY)
        rays[edge & 1] |= is_ray << np.uint32(edge >> 1)


@kernel(**COUNTLESS)
def gather_cells(vertices, k, tables, start, num, mask, rays):
    """The expert sets of the cells at the vertices from ``start`` on.

    A cell that is bounded below has one vertex at which the edges of its experts climb and those
    of the others fall: S is the experts above and those of ``rising``. All others hold a ray.
    ``tables`` are a table, expert sets, a vertex of each, and whether it is bounded; ``mask`` and
    ``rays`` are room. Returns the first vertex that there was no room for, and how many.
    """
    on, above, rising, links = vertices
    size = on.shape[1]
    last = np.uint32(1) << np.uint32(size)
    for vertex in range(start, len(on)):
        own, over = on[vertex], above[vertex]
        missing = k - _num_above(over)
        _read_rays(links, vertex, rays)
        if num_bits(np.uint64(rising[vertex])) == missing:
            if num == len(tables[1]):
                return vertex, num
            _join(over, own, rising[vertex], mask)
            num += np.int64(_cell(tables, num, mask, vertex) == num)
        if not rays[0] | rays[1]:
            continue
        # the cells around take some of the experts on the level
        some = (np.uint32(1) << np.uint32(missing)) - np.uint32(1)
        while some < last:
            if (some & rays[1]) | (~some & rays[0]):
                if num == len(tables[1]):
                    return vertex, num
                _join(over, own, some, mask)
                cell = np.int64(_cell(tables, num, mask, vertex))
                num += np.int64(cell == num)
                tables[3][cell] = False
            some = _next_choice(some)
    return len(on), num


@njit(**UNCOUNTED)
def _number(table, masks, above, own, some, mask):
    """The number of the cell of the experts above and ``some`` of the level."""
    _join(above, own, some, mask)
    return np.int64(table[_slot(table, masks, mask)])


@njit(**UNCOUNTED)
def _both(one, other):
    """Two cells, the lower one in the upper half."""
    first, second = (one, other) if one < other else (other, one)
    return (np.uint64(first) << np.uint64(32)) | np.uint64(second)


@kernel(**COUNTLESS)
def gather_facets(vertices, k, table, masks, facets, mask, around):
    """Both cells of the facets that are bounded below, as the halves of 64 bits.

    Returns their number, also where there is no room. Such a facet has one vertex at which all but
    its two experts climb or fall as in its cells. Where r edges climb and n experts of the level
    are chosen, those are, of the r, all and another (n = r + 1), all, or all but one and another
    (n = r), or all but one (n = r - 1). ``mask`` and ``around`` [d + 1] are room.
    """
    on, above, rising, _ = vertices
    size, num, one_bit = on.shape[1], 0, np.uint32(1)
    for vertex in range(len(on)):
        own, over, climbing = on[vertex], above[vertex], rising[vertex]
        missing = k - _num_above(over) - num_bits(np.uint64(climbing))
        if abs(missing) > 1:
            continue
        r = num_bits(np.uint64(climbing))
        if missing == 0:
            count = r * (size - r)
        else:
            free = size - r if missing == 1 else r
            count = free * (free - 1) // 2
        if num + count > len(facets):
            num += count
            continue
        if missing == 0:
            whole = _number(table, masks, over, own, climbing, mask)
            for out in range(size):
                if not (climbing >> np.uint32(out)) & one_bit:
                    continue
                for into in range(size):
                    if (climbing >> np.uint32(into)) & one_bit:
                        continue
                    some = climbing ^ (one_bit << np.uint32(out)) ^ (one_bit << np.uint32(into))
                    other = _number(table, masks, over, own, some, mask)
                    facets[num] = _both(whole, other)
                    num += 1
            continue
        num_around = 0
        for c in range(size):
            if np.int64((climbing >> np.uint32(c)) & one_bit) != np.int64(missing == -1):
                continue
            some = climbing ^ (one_bit << np.uint32(c))
            around[num_around] = _number(table, masks, over, own, some, mask)
            for n in range(num_around):
                facets[num] = _both(around[n], around[num_around])
                num += 1
            num_around += 1
    return num


@njit(**UNCOUNTED)
def _pair_slot(pairs, pair):
    last = np.uint64(len(pairs) - 1)
    slot = _mixed(pair) & last
    while pairs[slot] != _NO_PAIR and pairs[slot] != pair:
        slot = (slot + np.uint64(1)) & last
    return slot


@kernel(**COUNTLESS)
def refill_pairs(old, pairs):
    """Puts what one table holds into a larger one."""
    for pair in old:
        if pair != _NO_PAIR:
            pairs[_pair_slot(pairs, pair)] = pair


@njit(**UNCOUNTED)
def _pair(near, vertex, table, masks, over, own, some, pair, mask):
    """The numbers of the cells of ``some`` and one of ``pair``, the lower one in the upper half.

    ``near`` holds the numbers that this vertex asked for last: vertex and choice, and the number.
    """
    both, whole = pair, np.uint64(0)
    while both:
        low = both & (~both + np.uint32(1))
        both ^= low
        chosen = some | low
        key = (np.uint64(vertex) << np.uint64(32)) | np.uint64(chosen)
        slot = chosen & np.uint32(near.shape[1] - 1)
        if near[0, slot] != key:
            near[0, slot] = key
            near[1, slot] = np.uint64(_number(table, masks, over, own, chosen, mask))
        whole = (whole << np.uint64(32)) | near[1, slot]
    return whole


@kernel(**COUNTLESS)
def gather_open_facets(vertices, k, table, masks, pairs, start, num, mask, rays, near):
    """Both cells of the facets that hold a ray downwards, as the halves of 64 bits in ``pairs``.

    As ``gather_cells``: the first vertex that there was no room for, and how many there are.
    """
    on, above, rising, links = vertices
    size, one_bit = on.shape[1], np.uint32(1)
    last = one_bit << np.uint32(size)
    for vertex in range(start, len(on)):
        own, over = on[vertex], above[vertex]
        _read_rays(links, vertex, rays)
        # an edge downwards falls where the one upwards climbs
        down, up = rays[0] & rising[vertex], rays[1] & ~rising[vertex]
        if not down | up:
            continue
        some = (one_bit << np.uint32(k - _num_above(over) - 1)) - one_bit
        while some < last:
            for one in range(size):
                for other in range(one + 1, size):
                    # of two sets the one with the lower of the two experts comes first
                    pair = (one_bit << np.uint32(one)) | (one_bit << np.uint32(other))
                    if some & pair or not (some & up) | (~(some | pair) & down):
                        continue
                    if 2 * num >= len(pairs):
                        return vertex, num
                    whole = _pair(near, vertex, table, masks, over, own, some, pair, mask)
                    slot = _pair_slot(pairs, whole)
                    if pairs[slot] == _NO_PAIR:
                        pairs[slot] = whole
                        num += 1
            if some == 0:
                break
            some = _next_choice(some)
    return len(on), num


@kernel(**COUNTLESS)
def inner_points(vertex_of, on, links, point, masks, direction, ray_of, witness):
    """A point inside each cell: the mean of a vertex and of the ends of its edges there.

    ``on`` and ``links`` are those of the vertex of each cell. ``direction`` [rays, d] are unit
    vectors of the edges without end, ``ray_of`` [cells] the number of the first at the vertex,
    whose others follow; they count as long as the edges that end, and as 1 where none does.
    """
    d, size = point.shape[1], on.shape[1]
    for cell in range(len(masks)):
        vertex, count, length = vertex_of[cell], 0, 0.0
        for m in range(d):
            witness[cell, m] = 0.0
        num_ends = 0
        for turn in range(2):
            scale = length / num_ends if num_ends else 1.0
            ray = ray_of[cell]
            for c in range(size):
                expert = on[cell, c]
                inside = np.int64(
                    (masks[cell, expert >> 6] >> np.uint64(expert & 63)) & np.uint64(1)
                )
                for side in range(2):
                    end = links[cell, 2 * c + side]
                    if end == RAY:
                        ray += 1
                    if side != inside or end == NONE or (end == RAY) != (turn == 1):
                        continue
                    if end == RAY and ray_of[cell] < 0:
                        continue  # of a vertex that is not simple
                    squares = 0.0
                    for m in range(d):
                        if turn == 0:
                            step = point[end, m] - point[vertex, m]
                        else:
                            step = scale * direction[ray - 1, m]
                        witness[cell, m] += step
                        squares += step * step
                    count += 1
                    if turn == 0:
                        num_ends += 1
                        length += np.sqrt(squares)
        for m in range(d):
            witness[cell, m] = point[vertex, m] + witness[cell, m] / (count + 1)


@kernel(**COUNTLESS)
def list_experts(masks, expert_set):
    """The experts of each mask, in order."""
    for cell in range(len(masks)):
        count = 0
        for w in range(masks.shape[1]):
            word, expert = masks[cell, w], 64 * w
            while word:
                if word & np.uint64(1):
                    expert_set[cell, count] = expert
                    count += 1
                word >>= np.uint64(1)
                expert += 1


@dataclass(frozen=True, eq=False)
class LevelCells:
    """Cells as bits and as experts, in the order of those, and a vertex of each."""

    masks: UInt64[np.ndarray, "cells words"]
    expert_set: Int16[np.ndarray, "cells k"]
    vertex_of: Int32[np.ndarray, "cells"]
    is_bounded: Bool[np.ndarray, "cells"]


@dataclass(frozen=True, eq=False)
class LooseFacets:
    """Unordered facets, their two cells packed into 64 bits, in a list and a table."""

    listed: UInt64[np.ndarray, "facets"]
    table: UInt64[np.ndarray, "slots"]

    def in_order(self) -> Int64[np.ndarray, "facets 2"]:
        """Both cells of each facet; the first has the lower of the two experts."""
        both = np.concatenate([self.listed, self.table[self.table != _NO_PAIR]])
        both.sort()
        # the lower half comes first in memory
        halves = both.astype("<u8", copy=False).view("<u4").reshape(-1, 2)
        return halves[:, ::-1].astype(np.int64)


#: Where links are not looked at.
_NO_LINKS = np.empty((0, 0), np.int32)

_Vertices = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def cells_of(walked: Walked, rising: UInt32[np.ndarray, "vertices"], k: int) -> LevelCells:
    """The cells that meet at the vertices of a walk; ``rising`` must be proved at all of them."""
    masks, vertex_of, is_bounded = _cells((walked.on, walked.bits, rising, walked.links), k)
    order = _order(masks)
    expert_set = np.empty((len(masks), k), np.int16)
    list_experts(masks[order], expert_set)
    return LevelCells(masks[order], expert_set, vertex_of[order], is_bounded[order])


def _cells(vertices: _Vertices, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Expert sets, a vertex of each, and whether it is bounded."""
    words = vertices[1].shape[1]
    mask, rays = np.empty(words, np.uint64), np.empty(2, np.uint32)
    slots, start, num = _SLOTS, 0, 0
    columns = [np.empty((0, words), np.uint64), np.empty(0, np.int32), np.empty(0, np.bool_)]
    while start < len(vertices[0]):
        grown = [np.empty((slots // 2, *old.shape[1:]), old.dtype) for old in columns]
        for new, old in zip(grown, columns, strict=True):
            new[:num] = old[:num]
        columns, table = grown, np.full(slots, -1, np.int32)
        fill_cells(table, columns[0][:num])
        start, num = gather_cells(vertices, k, (table, *columns), start, num, mask, rays)
        slots *= 2
    return columns[0][:num], columns[1][:num], columns[2][:num]


def _order(masks: UInt64[np.ndarray, "cells words"]) -> Int64[np.ndarray, "cells"]:
    """The order of expert sets, as of sorted tuples.

    Of two the one whose lowest expert outside the other is lower comes first: its bits, from the
    lowest to the highest, are the larger number.
    """
    words = masks
    for shift, some in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        by, half = np.uint64(shift), np.uint64(some)
        words = ((words >> by) & half) | ((words & half) << by)
    words = ~words.byteswap()
    return np.lexsort(words.T[::-1]) if words.shape[1] > 1 else np.argsort(words[:, 0])


def facets_of(
    walked: Walked,
    rising: UInt32[np.ndarray, "vertices"],
    k: int,
    masks: UInt64[np.ndarray, "cells words"],
) -> LooseFacets:
    """The facets between those cells."""
    vertices = walked.on, walked.bits, rising, walked.links
    table = _table(masks)
    num_vertices, size = vertices[0].shape
    mask, rays = np.empty(masks.shape[1], np.uint64), np.empty(2, np.uint32)
    near = np.full((2, 1 << min(size, 10)), _NO_PAIR)
    pairs, start, num_open = np.full(_SLOTS, _NO_PAIR), 0, 0
    while True:
        start, num_open = gather_open_facets(
            vertices, k, table, masks, pairs, start, num_open, mask, rays, near
        )
        if start == num_vertices:
            break
        old, pairs = pairs, np.full(2 * len(pairs), _NO_PAIR)
        refill_pairs(old, pairs)
    return LooseFacets(_lowest_facets(vertices, k, table, masks), pairs)


def _table(masks: UInt64[np.ndarray, "cells words"]) -> Int32[np.ndarray, "slots"]:
    table = np.full(1 << (2 * len(masks)).bit_length(), -1, np.int32)
    fill_cells(table, masks)
    return table


def _lowest_facets(
    vertices: _Vertices, k: int, table: np.ndarray, masks: np.ndarray
) -> UInt64[np.ndarray, "facets"]:
    num, size = vertices[0].shape
    mask, around = np.empty(masks.shape[1], np.uint64), np.empty(size, np.int64)
    listed = np.empty(4 * num, np.uint64)
    count = gather_facets(vertices, k, table, masks, listed, mask, around)
    if count > len(listed):
        listed = np.empty(count, np.uint64)
        gather_facets(vertices, k, table, masks, listed, mask, around)
    return listed[:count]


def facets_at(
    on: Int16[np.ndarray, "vertices on"],
    above: UInt64[np.ndarray, "vertices words"],
    rising: UInt32[np.ndarray, "vertices"],
    expert_set: Int16[np.ndarray, "cells k"],
    facets: Int64[np.ndarray, "facets 2"],
) -> tuple[Int64[np.ndarray, "found"], Int64[np.ndarray, "found"]]:
    """The facets on which all but the two experts that tie are chosen where they are ``rising``.

    Their numbers in an ordered list of facets, and the vertex of each; facets and cells that are
    not listed are left out.
    """
    cells, k = expert_set.shape
    masks = np.zeros((cells, above.shape[1]), np.uint64)
    for c in range(k):
        expert = expert_set[:, c].astype(np.uint64)
        masks[np.arange(cells), expert >> np.uint64(6)] |= np.uint64(1) << (expert & np.uint64(63))
    pairs = _lowest_facets((on, above, rising, _NO_LINKS), k, _table(masks), masks)
    climbing, size = np.bitwise_count(rising).astype(np.int64), on.shape[1]
    missing = k - np.bitwise_count(above).sum(axis=1).astype(np.int64) - climbing
    free = np.where(missing == 1, size - climbing, climbing)
    count = np.where(missing == 0, climbing * (size - climbing), free * (free - 1) // 2)
    vertex = np.repeat(np.arange(len(on)), np.where(np.abs(missing) > 1, 0, count))
    keys = (facets[:, 0].astype(np.uint64) << np.uint64(32)) | facets[:, 1].astype(np.uint64)
    place = np.searchsorted(keys, pairs)
    place[place == len(keys)] = 0
    is_listed = keys[place] == pairs if len(keys) else np.zeros(len(pairs), bool)
    return place[is_listed], vertex[is_listed]


@dataclass(frozen=True, eq=False)
class Corners:
    """A vertex of each cell: its number, its experts, the ends of its edges."""

    vertex: Int32[np.ndarray, "cells"]
    on: Int16[np.ndarray, "cells on"]
    links: Int32[np.ndarray, "cells edges"]
    is_simple: Bool[np.ndarray, "cells"]

    @classmethod
    def of(cls, walked: Walked, vertex: Int32[np.ndarray, "cells"]) -> Corners:
        """The rows of a walk for one vertex of each cell."""
        return cls(vertex, walked.on[vertex], walked.links[vertex], walked.is_simple[vertex])

    def points_near(
        self,
        weight: Float64[np.ndarray, "experts dims"],
        masks: UInt64[np.ndarray, "cells words"],
        point: Float64[np.ndarray, "vertices dims"],
    ) -> Float64[np.ndarray, "cells dims"]:
        """The mean of the vertex of each cell and of the ends of its edges there.

        ``point`` is where all vertices lie. Inside the cell, but for rounding, where the vertex is
        simple; of no meaning where it is not.
        """
        is_ray = self.links == RAY
        some = np.flatnonzero(is_ray.any(axis=1) & self.is_simple)
        _, first, number = np.unique(self.vertex[some], return_index=True, return_inverse=True)
        is_ray = is_ray[some[first]]
        ray_of = np.full(len(masks), -1, np.int32)
        ray_of[some] = (np.cumsum(is_ray.sum(axis=1)) - is_ray.sum(axis=1))[number]
        row, edge = np.nonzero(is_ray)
        experts = self.on[some[first]].astype(np.int64)
        basis = np.concatenate([weight[experts], np.full((*experts.shape, 1), -1.0)], axis=2)
        direction = np.linalg.inv(basis)[row, :-1, edge // 2]
        direction *= np.where(edge % 2 == 1, 1.0, -1.0)[:, None]
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        points = np.empty((len(masks), weight.shape[1]))
        inner_points(self.vertex, self.on, self.links, point, masks, direction, ray_of, points)
        return points
