"""Cells and facets of a whole walk with its ties broken, and points of its cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt32, UInt64
from numba import njit

from moegeom.kernels.cpu import INNER
from moegeom.studies.cells.walk._level_vertex import NONE, RAY
from moegeom.studies.cells.walk.level_walk import Walked


@njit(**INNER)
def _num_bits(value):
    count = 0
    while value:
        value &= value - np.uint32(1)
        count += 1
    return count


@njit(**INNER)
def _next_choice(value):
    """The next larger number with as many bits."""
    low = value & (~value + np.uint32(1))
    high = value + low
    return high | (((value ^ high) // low) >> np.uint32(2))


@njit(**INNER)
def _num_above(bits):
    count = 0
    for word in bits:
        while word:
            word &= word - np.uint64(1)
            count += 1
    return count


@njit(**INNER)
def _code_above(bits, marks):
    """The hash of the experts above, to which the marks of others are added."""
    code = np.uint64(0)
    for w in range(len(bits)):
        word, some = bits[w], marks[64 * w : 64 * w + 64]
        for j in range(len(some)):
            # all ones where the bit is set: no branches, so that lanes are worked on together
            code ^= some[j] & (np.uint64(0) - ((word >> np.uint64(j)) & np.uint64(1)))
    return code


@njit(**INNER)
def _joined(bits, own, some, out):
    """The experts above and those of ``own`` that ``some`` marks."""
    for w in range(len(bits)):
        out[w] = bits[w]
    for c in range(len(own)):
        bit = np.uint64((some >> np.uint32(c)) & np.uint32(1))
        out[own[c] >> 6] |= bit << np.uint64(own[c] & 63)


@njit(**INNER)
def _code_joined(code, own, some, marks):
    for c in range(len(own)):
        bit = np.uint64((some >> np.uint32(c)) & np.uint32(1))
        code ^= marks[own[c]] & (np.uint64(0) - bit)
    return code


@njit(**INNER)
def _slot(table, codes, masks, code, mask):
    """Where an expert set is in the table, or the empty slot where it belongs."""
    last = np.uint64(len(table) - 1)
    slot = code & last
    while table[slot] >= 0:
        cell = table[slot]
        if codes[cell] == code:
            same = True
            for w in range(len(mask)):
                same &= masks[cell, w] == mask[w]
            if same:
                return slot
        slot = (slot + np.uint64(1)) & last
    return slot


@njit(**INNER)
def _cell(table, codes, masks, vertex_of, num, code, mask, vertex):
    """The number of an expert set, ``num`` for a new one; -1 without room for it."""
    slot = _slot(table, codes, masks, code, mask)
    if table[slot] < 0:
        if num == len(masks):
            return -1
        for w in range(len(mask)):
            masks[num, w] = mask[w]
        codes[num] = code
        vertex_of[num] = vertex
        table[slot] = num
    return table[slot]


@njit(nogil=True, cache=True)
def gather_cells(on, above, rising, links, k, marks, table, codes, masks, vertex_of, is_bounded):
    """The expert sets of all cells, a vertex of each, and whether it is bounded; their number.

    A cell that is bounded below has one vertex at which the edges of its experts climb and those
    of the others fall: S is the experts above and those of ``rising``. All others hold a ray.
    -1 where there is no room.
    """
    size, num = on.shape[1], 0
    mask = np.empty(above.shape[1], np.uint64)
    for vertex in range(len(on)):
        count = _num_above(above[vertex])
        code = _code_above(above[vertex], marks)
        if _num_bits(rising[vertex]) == k - count:
            _joined(above[vertex], on[vertex], rising[vertex], mask)
            whole = _code_joined(code, on[vertex], rising[vertex], marks)
            cell = _cell(table, codes, masks, vertex_of, num, whole, mask, vertex)
            if cell < 0:
                return -1
            num = max(num, cell + 1)
        for edge in range(2 * size):
            if links[vertex, edge] != RAY:
                continue
            c, up = edge // 2, edge % 2
            # the experts that stay on the level, of which the cells around take some
            some = (np.uint32(1) << np.uint32(k - count - up)) - np.uint32(1)
            end = np.uint32(1) << np.uint32(size - 1)
            while some < end:
                low = some & ((np.uint32(1) << np.uint32(c)) - np.uint32(1))
                chosen = low | ((some ^ low) << np.uint32(1)) | (np.uint32(up) << np.uint32(c))
                _joined(above[vertex], on[vertex], chosen, mask)
                whole = _code_joined(code, on[vertex], chosen, marks)
                cell = _cell(table, codes, masks, vertex_of, num, whole, mask, vertex)
                if cell < 0:
                    return -1
                num = max(num, cell + 1)
                is_bounded[cell] = False
                if some == 0:
                    break
                some = _next_choice(some)
    return num


@njit(**INNER)
def _pair(cells, own, above, code, some, one, other, marks, mask, tables):
    """The numbers of the two cells of a facet: with ``one`` and with ``other`` beside ``some``."""
    table, codes, masks = tables
    for n in range(2):
        chosen = some | (np.uint32(1) << np.uint32(one if n == 0 else other))
        _joined(above, own, chosen, mask)
        whole = _code_joined(code, own, chosen, marks)
        cells[n] = table[_slot(table, codes, masks, whole, mask)]


@njit(nogil=True, cache=True)
def gather_facets(on, above, rising, links, k, marks, table, codes, masks, facets, seen):
    """Both cells of every facet, and the expert that leaves and the one that enters; their number.

    A facet that is bounded below has one vertex at which all but its two experts climb or fall as
    in its cells; those that hold a ray downwards are looked up in ``seen``. -1 without room.
    """
    size, num = on.shape[1], 0
    mask, cells = np.empty(above.shape[1], np.uint64), np.empty(2, np.int64)
    last = np.uint64(len(seen) - 1)
    tables = (table, codes, masks)
    for vertex in range(len(on)):
        own, over = on[vertex], above[vertex]
        count = _num_above(over)
        code = _code_above(over, marks)
        climbing = rising[vertex]
        all_climbing = _num_bits(climbing)
        for one in range(size):
            for other in range(one + 1, size):
                pair = (np.uint32(1) << np.uint32(one)) | (np.uint32(1) << np.uint32(other))
                taken = np.int64((climbing >> np.uint32(one)) & np.uint32(1))
                taken += np.int64((climbing >> np.uint32(other)) & np.uint32(1))
                if all_climbing - taken != k - count - 1:
                    continue
                if num == len(facets):
                    return -1
                _pair(cells, own, over, code, climbing & ~pair, one, other, marks, mask, tables)
                facets[num, 0], facets[num, 1] = cells[0], cells[1]
                facets[num, 2], facets[num, 3] = own[one], own[other]
                num += 1
        for edge in range(2 * size):
            c, up = edge // 2, edge % 2
            climbs = np.int64((climbing >> np.uint32(c)) & np.uint32(1)) == up
            wanted = k - count - up - 1  # experts of the level in both cells
            if links[vertex, edge] != RAY or climbs or wanted < 0:
                continue
            for one in range(size):
                for other in range(one + 1, size):
                    if c in (one, other):
                        continue
                    some = (np.uint32(1) << np.uint32(wanted)) - np.uint32(1)
                    end = np.uint32(1) << np.uint32(size - 3)
                    while some < end:
                        chosen, place = np.uint32(up) << np.uint32(c), 0
                        for m in range(size):
                            if m in (one, other, c):
                                continue
                            chosen |= ((some >> np.uint32(place)) & np.uint32(1)) << np.uint32(m)
                            place += 1
                        _pair(cells, own, over, code, chosen, one, other, marks, mask, tables)
                        key = np.uint64(cells[0]) * np.uint64(0x9E3779B97F4A7C15)
                        key ^= np.uint64(cells[1]) * np.uint64(0xC2B2AE3D27D4EB4F)
                        slot = (key ^ (key >> np.uint64(29))) & last
                        while seen[slot] >= 0:
                            facet = seen[slot]
                            if facets[facet, 0] == cells[0] and facets[facet, 1] == cells[1]:
                                break
                            slot = (slot + np.uint64(1)) & last
                        if seen[slot] < 0:
                            if num == len(facets):
                                return -1
                            facets[num, 0], facets[num, 1] = cells[0], cells[1]
                            facets[num, 2], facets[num, 3] = own[one], own[other]
                            seen[slot] = num
                            num += 1
                        if some == 0:
                            break
                        some = _next_choice(some)
    return num


@njit(nogil=True, cache=True)
def inner_points(on, point, links, masks, vertex_of, direction, ray_of, witness):
    """A point inside each cell: the mean of a vertex and of the ends of its edges there.

    ``direction`` [rays, d] are unit vectors of the edges without end, ``ray_of`` [vertices, edges]
    their numbers; they count as long as the edges that end, and as 1 where none does.
    """
    d, size = point.shape[1], on.shape[1]
    for cell in range(len(masks)):
        vertex, count, length = vertex_of[cell], 0, 0.0
        for m in range(d):
            witness[cell, m] = 0.0
        num_ends = 0
        for turn in range(2):
            scale = length / num_ends if num_ends else 1.0
            for c in range(size):
                expert = on[vertex, c]
                inside = (masks[cell, expert >> 6] >> np.uint64(expert & 63)) & np.uint64(1)
                end = links[vertex, 2 * c + np.int64(inside)]
                if end == NONE or (end == RAY) != (turn == 1):
                    continue
                squares = 0.0
                for m in range(d):
                    if turn == 0:
                        step = point[end, m] - point[vertex, m]
                    else:
                        step = scale * direction[ray_of[vertex, 2 * c + np.int64(inside)], m]
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
    """Cells as bits, a vertex of each, and facets: both cells, the expert that only each has."""

    masks: UInt64[np.ndarray, "cells words"]
    vertex_of: Int64[np.ndarray, "cells"]
    is_bounded: Bool[np.ndarray, "cells"]
    facets: Int64[np.ndarray, "facets 4"]


def diagram_of(walked: Walked, rising: UInt32[np.ndarray, "vertices"], k: int) -> Diagram:
    """Cells and facets that meet at the vertices; ``rising`` as there, proved at all of them."""
    marks = np.random.default_rng(2).integers(1, 2**63, walked.num_experts).astype(np.uint64)
    vertices = walked.on, walked.bits, rising, walked.links
    room, num = len(walked.on) + 64, -1
    while num < 0:
        table, codes = _empty_table(room), np.empty(room, np.uint64)
        masks = np.empty((room, walked.bits.shape[1]), np.uint64)
        vertex_of, is_bounded = np.empty(room, np.int64), np.ones(room, bool)
        num = gather_cells(*vertices, k, marks, table, codes, masks, vertex_of, is_bounded)
        room *= 2
    cells = table, codes[:num], masks[:num]
    room, num_facets = 4 * len(walked.on) + 64, -1
    while num_facets < 0:
        facets = np.empty((room, 4), np.int64)
        num_facets = gather_facets(*vertices, k, marks, *cells, facets, _empty_table(room))
        room *= 2
    return Diagram(masks[:num], vertex_of[:num], is_bounded[:num], facets[:num_facets])


def _empty_table(room: int) -> Int64[np.ndarray, "slots"]:
    return np.full(1 << (2 * room - 1).bit_length(), -1, np.int64)


def points_near(
    walked: Walked,
    weight: Float64[np.ndarray, "experts dims"],
    masks: UInt64[np.ndarray, "cells words"],
    vertex_of: Int64[np.ndarray, "cells"],
) -> Float64[np.ndarray, "cells dims"]:
    """The mean of a vertex of each cell and of the ends of its edges there.

    Inside the cell, but for rounding, where the vertex is simple; of no meaning where it is not.
    """
    is_ray = (walked.links == RAY) & walked.is_simple[:, None]
    vertex, edge = np.nonzero(is_ray)
    ray_of = np.full(walked.links.shape, -1, np.int32)
    ray_of[is_ray] = np.arange(len(vertex))
    # a vertex has several edges without end: each basis is inverted once
    is_new = np.append(True, vertex[1:] != vertex[:-1])[: len(vertex)]
    experts, basis_of = walked.on[vertex[is_new]].astype(np.int64), np.cumsum(is_new) - 1
    basis = np.concatenate([weight[experts], np.full((*experts.shape, 1), -1.0)], axis=2)
    direction = np.linalg.inv(basis)[basis_of, :-1, edge // 2]
    direction *= np.where(edge % 2 == 1, 1.0, -1.0)[:, None]
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    ends = np.where((walked.links == RAY) & ~is_ray, NONE, walked.links)
    found = np.empty((len(masks), weight.shape[1]))
    inner_points(walked.on, walked.point, ends, masks, vertex_of, direction, ray_of, found)
    return found
