"""Cells and facets of a whole walk with its ties broken, and points of its cells."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int32, Int64, UInt32, UInt64
from numba import njit

from moegeom.kernels.cpu import INNER, UNCOUNTED
from moegeom.studies.cells.walk._level_vertex import NONE, RAY
from moegeom.studies.cells.walk.level_walk import Walked

#: Slots of a table at first, twice as many when half of them are used.
_SLOTS = 1024

#: No pair of cells.
_NO_PAIR = np.uint64(2**64 - 1)


@njit(**UNCOUNTED)
def _num_bits(value):
    count = 0
    while value:
        value &= value - np.uint32(1)
        count += 1
    return count


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
        while word:
            word &= word - np.uint64(1)
            count += 1
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


@njit(nogil=True, cache=True)
def fill_cells(table, masks):
    """Puts expert sets into an empty table."""
    for cell in range(len(masks)):
        table[_slot(table, masks, masks[cell])] = cell


@njit(**UNCOUNTED)
def _cell(found, num, mask, vertex):
    """The number of an expert set, ``num`` for a new one."""
    table, masks, vertex_of, is_bounded = found
    slot = _slot(table, masks, mask)
    if table[slot] < 0:
        for w in range(len(mask)):
            masks[num, w] = mask[w]
        vertex_of[num], is_bounded[num] = vertex, True
        table[slot] = num
    return table[slot]


@njit(nogil=True, cache=True)
def gather_cells(vertices, k, found, start, num, spare):
    """The expert sets of the cells at the vertices from ``start`` on.

    A cell that is bounded below has one vertex at which the edges of its experts climb and those
    of the others fall: S is the experts above and those of ``rising``. All others hold a ray.
    ``found`` are a table, expert sets, a vertex of each, and whether it is bounded; ``spare`` is
    what one vertex may need. Returns the first vertex that there was no room for, and how many.
    """
    on, above, rising, links = vertices
    size, last = on.shape[1], np.uint32(1) << np.uint32(on.shape[1] - 1)
    mask = np.empty(above.shape[1], np.uint64)
    for vertex in range(start, len(on)):
        if num + spare > len(found[1]):
            return vertex, num
        count = _num_above(above[vertex])
        if _num_bits(rising[vertex]) == k - count:
            _join(above[vertex], on[vertex], rising[vertex], mask)
            num = max(num, _cell(found, num, mask, vertex) + 1)
        for edge in range(2 * size):
            if links[vertex, edge] != RAY:
                continue
            c, up = edge // 2, edge % 2
            # the experts that stay on the level, of which the cells around take some
            some = (np.uint32(1) << np.uint32(k - count - up)) - np.uint32(1)
            while some < last:
                low = some & ((np.uint32(1) << np.uint32(c)) - np.uint32(1))
                chosen = low | ((some ^ low) << np.uint32(1)) | (np.uint32(up) << np.uint32(c))
                _join(above[vertex], on[vertex], chosen, mask)
                cell = _cell(found, num, mask, vertex)
                num = max(num, cell + 1)
                found[3][cell] = False
                if some == 0:
                    break
                some = _next_choice(some)
    return len(on), num


@njit(**UNCOUNTED)
def _number(table, masks, above, own, some, mask):
    """The number of the cell of the experts above and ``some`` of the level."""
    _join(above, own, some, mask)
    return np.int64(table[_slot(table, masks, mask)])


@njit(nogil=True, cache=True)
def gather_facets(vertices, k, table, masks, facets):
    """Both cells of the facets that are bounded below; their number, also where there is no room.

    Such a facet has one vertex at which all but its two experts climb or fall as in its cells.
    Where r edges climb and n experts of the level are chosen, those are, of the r, all and another
    (n = r + 1), all, or all but one and another (n = r), or all but one (n = r - 1).
    """
    on, above, rising, _ = vertices
    size, num = on.shape[1], 0
    mask, around = np.empty(above.shape[1], np.uint64), np.empty(size, np.int64)
    one_bit = np.uint32(1)
    for vertex in range(len(on)):
        own, over, climbing = on[vertex], above[vertex], rising[vertex]
        missing = k - _num_above(over) - _num_bits(climbing)
        if abs(missing) > 1:
            continue
        r = _num_bits(climbing)
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
                    facets[num, 0], facets[num, 1] = min(whole, other), max(whole, other)
                    num += 1
            continue
        found = 0
        for c in range(size):
            if np.int64((climbing >> np.uint32(c)) & one_bit) != np.int64(missing == -1):
                continue
            some = climbing ^ (one_bit << np.uint32(c))
            around[found] = _number(table, masks, over, own, some, mask)
            for n in range(found):
                one, other = around[n], around[found]
                facets[num, 0], facets[num, 1] = min(one, other), max(one, other)
                num += 1
            found += 1
    return num


@njit(**UNCOUNTED)
def _pair_slot(pairs, pair):
    last = np.uint64(len(pairs) - 1)
    slot = _mixed(pair) & last
    while pairs[slot] != _NO_PAIR and pairs[slot] != pair:
        slot = (slot + np.uint64(1)) & last
    return slot


@njit(nogil=True, cache=True)
def refill_pairs(old, pairs):
    """Puts what one table holds into a larger one."""
    for pair in old:
        if pair != _NO_PAIR:
            pairs[_pair_slot(pairs, pair)] = pair


@njit(nogil=True, cache=True)
def gather_open_facets(vertices, k, table, masks, pairs, start, num, spare):
    """Both cells of the facets that hold a ray downwards, as the halves of 64 bits in ``pairs``.

    As ``gather_cells``: the first vertex that there was no room for, and how many there are.
    """
    on, above, rising, links = vertices
    size, one_bit = on.shape[1], np.uint32(1)
    mask = np.empty(above.shape[1], np.uint64)
    last = one_bit << np.uint32(size - 3)
    for vertex in range(start, len(on)):
        if 2 * (num + spare) > len(pairs):
            return vertex, num
        own, over, climbing = on[vertex], above[vertex], rising[vertex]
        count = _num_above(over)
        for edge in range(2 * size):
            c, up = edge // 2, edge % 2
            climbs = np.int64((climbing >> np.uint32(c)) & one_bit) == up
            wanted = k - count - up - 1  # experts of the level in both cells
            if links[vertex, edge] != RAY or climbs or wanted < 0:
                continue
            for one in range(size):
                for other in range(one + 1, size):
                    if c in (one, other):
                        continue
                    some = (one_bit << np.uint32(wanted)) - one_bit
                    while some < last:
                        chosen, place = np.uint32(up) << np.uint32(c), 0
                        for m in range(size):
                            if m in (one, other, c):
                                continue
                            chosen |= ((some >> np.uint32(place)) & one_bit) << np.uint32(m)
                            place += 1
                        # of two sets the one with the lower of the two experts comes first
                        first = chosen | (one_bit << np.uint32(one))
                        second = chosen | (one_bit << np.uint32(other))
                        pair = np.uint64(_number(table, masks, over, own, first, mask))
                        pair = (pair << np.uint64(32)) | np.uint64(
                            _number(table, masks, over, own, second, mask)
                        )
                        slot = _pair_slot(pairs, pair)
                        if pairs[slot] == _NO_PAIR:
                            pairs[slot] = pair
                            num += 1
                        if some == 0:
                            break
                        some = _next_choice(some)
    return len(on), num


@njit(nogil=True, cache=True)
def order_facets(facets, pairs, starts, out):
    """Facets in order: by the first cell, whose facets are counted, then by the second.

    ``starts`` [cells + 1] has room for where those of each cell begin.
    """
    for n in range(len(facets)):
        starts[facets[n, 0] + 1] += 1
    for pair in pairs:
        if pair != _NO_PAIR:
            starts[(pair >> np.uint64(32)) + np.uint64(1)] += 1
    for cell in range(len(starts) - 1):
        starts[cell + 1] += starts[cell]
    for n in range(len(facets)):
        place = starts[facets[n, 0]]
        starts[facets[n, 0]] += 1
        out[place, 0], out[place, 1] = facets[n, 0], facets[n, 1]
    for pair in pairs:
        if pair != _NO_PAIR:
            first = np.int64(pair >> np.uint64(32))
            place = starts[first]
            starts[first] += 1
            out[place, 0], out[place, 1] = first, np.int64(pair & np.uint64(0xFFFFFFFF))
    for n in range(1, len(out)):
        first, second, place = out[n, 0], out[n, 1], n
        while place > 0 and out[place - 1, 0] == first and out[place - 1, 1] > second:
            out[place, 1] = out[place - 1, 1]
            place -= 1
        out[place, 1] = second


@njit(nogil=True, cache=True)
def inner_points(on, point, links, masks, vertex_of, direction, ray_of, witness):
    """A point inside each cell: the mean of a vertex and of the ends of its edges there.

    ``direction`` [rays, d] are unit vectors of the edges without end, ``ray_of`` [vertices] the
    number of the first at each vertex, whose others follow; they count as long as the edges that
    end, and as 1 where none does.
    """
    d, size = point.shape[1], on.shape[1]
    for cell in range(len(masks)):
        vertex, count, length = vertex_of[cell], 0, 0.0
        for m in range(d):
            witness[cell, m] = 0.0
        num_ends = 0
        for turn in range(2):
            scale = length / num_ends if num_ends else 1.0
            ray = ray_of[vertex]
            for c in range(size):
                expert = on[vertex, c]
                inside = np.int64((masks[cell, expert >> 6] >> np.uint64(expert & 63)) & np.uint64(1))
                for side in range(2):
                    end = links[vertex, 2 * c + side]
                    if end == RAY:
                        ray += 1
                    if side != inside or end == NONE or (end == RAY) != (turn == 1):
                        continue
                    if end == RAY and ray_of[vertex] < 0:
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


@dataclass(frozen=True, eq=False)
class Diagram:
    """Cells as bits in the order of their experts, with a vertex of each; facets as pairs, in order.

    The first cell of a facet comes first: it has the lower of the two experts.
    """

    masks: UInt64[np.ndarray, "cells words"]
    expert_set: Int16[np.ndarray, "cells k"]
    vertex_of: Int32[np.ndarray, "cells"]
    is_bounded: Bool[np.ndarray, "cells"]
    facets: Int64[np.ndarray, "facets 2"]


def diagram_of(walked: Walked, rising: UInt32[np.ndarray, "vertices"], k: int) -> Diagram:
    """Cells and facets that meet at the vertices; ``rising`` as there, proved at all of them."""
    vertices = walked.on, walked.bits, rising, walked.links
    masks, vertex_of, is_bounded = _cells(vertices, k)
    order, expert_set = _in_order(masks, walked.num_experts, k)
    masks = masks[order]
    table = np.full(1 << (2 * len(masks)).bit_length(), -1, np.int32)
    fill_cells(table, masks)
    return Diagram(
        masks, expert_set, vertex_of[order], is_bounded[order], _facets(vertices, k, table, masks)
    )


_Vertices = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _cells(vertices: _Vertices, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Expert sets, a vertex of each, and whether it is bounded."""
    on, above = vertices[0], vertices[1]
    # what one vertex may need: a choice of its experts for every edge
    spare = 2 * on.shape[1] * comb(on.shape[1] - 1, (on.shape[1] - 1) // 2) + 1
    slots, start, num = _SLOTS, 0, 0
    columns = [
        np.empty((0, above.shape[1]), np.uint64),
        np.empty(0, np.int32),
        np.empty(0, np.bool_),
    ]
    while start < len(on):
        room = slots // 2
        grown = [np.empty((room, *column.shape[1:]), column.dtype) for column in columns]
        for new, old in zip(grown, columns, strict=True):
            new[:num] = old[:num]
        columns, table = grown, np.full(slots, -1, np.int32)
        fill_cells(table, columns[0][:num])
        start, num = gather_cells(vertices, k, (table, *columns), start, num, spare)
        slots *= 2
    return columns[0][:num], columns[1][:num], columns[2][:num]


def _in_order(
    masks: UInt64[np.ndarray, "cells words"], num_experts: int, k: int
) -> tuple[Int64[np.ndarray, "cells"], Int16[np.ndarray, "cells k"]]:
    """How expert sets follow each other, and their experts."""
    octets = masks.astype("<u8").view(np.uint8)
    members = np.unpackbits(octets, axis=1, count=num_experts, bitorder="little")
    # of two expert sets the one whose lowest expert outside the other is lower comes first
    ranks = np.packbits(members, axis=1)
    ranks = np.pad(ranks, ((0, 0), (0, -ranks.shape[1] % 8))).view(">u8").astype(np.uint64)
    order = np.lexsort(~ranks.T[::-1]) if ranks.shape[1] > 1 else np.argsort(~ranks[:, 0])
    expert_set = np.nonzero(members[order])[1].reshape(len(masks), k)
    return order, expert_set.astype(np.int16)


def _facets(
    vertices: _Vertices, k: int, table: np.ndarray, masks: np.ndarray
) -> Int64[np.ndarray, "facets 2"]:
    size, start, num_open = vertices[0].shape[1], 0, 0
    spare = 2 * size * comb(size - 1, 2) * comb(max(size - 3, 0), max(size - 3, 0) // 2)
    pairs = np.full(_SLOTS, _NO_PAIR)
    while True:
        start, num_open = gather_open_facets(
            vertices, k, table, masks, pairs, start, num_open, spare
        )
        if start == len(vertices[0]):
            break
        old, pairs = pairs, np.full(2 * len(pairs), _NO_PAIR)
        refill_pairs(old, pairs)
    facets = np.empty((4 * len(vertices[0]), 2), np.int32)
    num = gather_facets(vertices, k, table, masks, facets)
    if num > len(facets):
        facets = np.empty((num, 2), np.int32)
        gather_facets(vertices, k, table, masks, facets)
    out = np.empty((num + num_open, 2), np.int64)
    order_facets(facets[:num], pairs, np.zeros(len(masks) + 1, np.int64), out)
    return out


def points_near(
    walked: Walked,
    weight: Float64[np.ndarray, "experts dims"],
    masks: UInt64[np.ndarray, "cells words"],
    vertex_of: Int32[np.ndarray, "cells"],
    point: Float64[np.ndarray, "vertices dims"],
) -> Float64[np.ndarray, "cells dims"]:
    """The mean of a vertex of each cell and of the ends of its edges there.

    ``point`` is where the vertices lie. Inside the cell, but for rounding, where the vertex is
    simple; of no meaning where it is not.
    """
    is_wanted = np.zeros(len(walked.on), bool)
    is_wanted[vertex_of] = True
    has_ray = np.flatnonzero(is_wanted & walked.is_simple & (walked.links == RAY).any(axis=1))
    row, edge = np.nonzero(walked.links[has_ray] == RAY)
    ray_of = np.full(len(walked.on), -1, np.int32)
    ray_of[has_ray] = np.searchsorted(row, np.arange(len(has_ray)))
    experts = walked.on[has_ray].astype(np.int64)
    basis = np.concatenate([weight[experts], np.full((*experts.shape, 1), -1.0)], axis=2)
    direction = np.linalg.inv(basis)[row, :-1, edge // 2]
    direction *= np.where(edge % 2 == 1, 1.0, -1.0)[:, None]
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    found = np.empty((len(masks), weight.shape[1]))
    inner_points(walked.on, point, walked.links, masks, vertex_of, direction, ray_of, found)
    return found
