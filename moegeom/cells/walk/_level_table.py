"""The vertices that a walk has seen, by their on-sets, and the edges between them."""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.cells.walk._level_vertex import GONE, NONE, PROVED, RAY, UNCERTAIN, examine
from moegeom.kernels.cpu._inner import INNER


@njit(**INNER)
def _code(marks, row):
    """The hash of a set of experts, which changes by two marks when one is exchanged."""
    value = np.uint64(0)
    for c in range(len(row)):
        value ^= marks[row[c]]
    return value


@njit(**INNER)
def _place(table, on, codes, row, code, dims):
    """The slot of an on-set in the table, or the empty one where it belongs."""
    mask = np.uint64(len(table) - 1)
    slot = code & mask
    while table[slot] >= 0:
        vertex = table[slot]
        if codes[vertex] == code:
            same = True
            for c in range(len(dims) + 1):
                same &= on[vertex, c] == row[c]
            if same:
                return slot
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit(**INNER)
def _number(table, on, codes, num, row, code, dims):
    """The number of an on-set, ``num`` for a new one that was put there; -1 without room for it."""
    slot = _place(table, on, codes, row, code, dims)
    if table[slot] < 0:
        if num == len(on):
            return -1
        for c in range(len(dims) + 1):
            on[num, c] = row[c]
        codes[num] = code
        table[slot] = num
    return table[slot]


@njit(**INNER)
def _swapped(on, leaving, entering, out, dims):
    """The on-set without ``on[leaving]`` and with ``entering``, in order; where that stands."""
    size, place = len(dims) + 1, 0
    for c in range(size):
        place += np.int64((on[c] < entering) & (c != leaving))
    # no branches: which way they went could not be foretold
    for n in range(size):
        left = n - np.int64(n > place)
        out[n] = on[min(left + np.int64(left >= leaving), size - 1)]
    out[place] = entering
    return place


@njit(nogil=True, cache=True)
def enter(on, above, links, codes, table, marks, met, start, first, stop, num, dims):
    """Numbers for the ends of the edges of the vertices ``first`` to ``stop``.

    ``met`` is what ``examine`` found for the vertices from ``start`` on. The same edge is entered
    at its other end, which need not be shot again. Returns the first vertex that is left, as there
    was no room for all of its ends, and the number of vertices.
    """
    following = np.empty(on.shape[1], dtype=on.dtype)
    for vertex in range(first, stop):
        for edge in range(2 * len(dims) + 2):
            entering = met[vertex - start, edge]
            if entering == NONE or links[vertex, edge] != NONE:
                continue
            if entering == RAY:
                links[vertex, edge] = RAY
                continue
            leaving = on[vertex, edge >> 1]
            place = _swapped(on[vertex], edge >> 1, entering, following, dims)
            code = codes[vertex] ^ marks[leaving] ^ marks[entering]
            end = _number(table, on, codes, num, following, code, dims)
            if end < 0:
                return vertex, num
            num = max(num, end + 1)
            links[vertex, edge] = end
            was_above = (above[vertex, entering >> 6] >> np.uint64(entering & 63)) & np.uint64(1)
            back = 2 * place + np.int64(was_above)
            if links[end, back] == NONE:
                links[end, back] = vertex
    return stop, num


@njit(nogil=True, cache=True)
def advance(
    columns, bias, k, num_experts, upwards, on, above, point, rising, state, links, met, gap,
    codes, table, marks, head, num, most,
):  # fmt: skip
    """``examine`` and ``enter`` by turns, for at most ``most`` vertices from ``head`` on.

    Returns the first vertex whose edges are not entered, the number of vertices, and whether there
    was room for all.
    """
    last = head + most
    while head < min(num, last):
        stop = min(num, head + len(met), last)
        examine(
            columns, bias, k, num_experts, upwards, on, above, point, rising, state, links, met,
            gap, head, stop,
        )  # fmt: skip
        done, num = enter(
            on, above, links, codes, table, marks, met, head, head, stop, num, upwards
        )
        head = done
        if done < stop:
            return head, num, False
    return head, num, True


@njit(nogil=True, cache=True)
def check_links(on, above, state, links, num):
    """Takes the proof from vertices with an edge whose ends differ in more than was exchanged.

    Where both ends have proved signs and differ in the two experts alone, no hyperplane lies
    between them: each is the other's neighbour, whatever rounding did to the shot.
    """
    words, lost = above.shape[1], 0
    expected = np.empty(words, np.uint64)
    for u in range(num):
        if state[u] != PROVED:
            continue
        for edge in range(links.shape[1]):
            v = links[u, edge]
            if v < 0 or state[v] == UNCERTAIN:
                continue
            leaving = on[u, edge // 2]
            for w in range(words):
                expected[w] = above[u, w]
            bit = np.uint64(1) << np.uint64(leaving & 63)
            if edge % 2 == 1:
                expected[leaving >> 6] |= bit
            for c in range(on.shape[1]):
                expected[on[v, c] >> 6] &= ~(np.uint64(1) << np.uint64(on[v, c] & 63))
            fits = state[v] != GONE
            for w in range(words):
                fits &= expected[w] == above[v, w]
            if not fits:
                state[u] = UNCERTAIN
                lost += 1
                break
    return lost


@njit(nogil=True, cache=True)
def fill_table(table, on, codes, num, dims):
    """Puts the first on-sets into the table."""
    for row in range(num):
        table[_place(table, on, codes, on[row], codes[row], dims)] = row


@njit(nogil=True, cache=True)
def entered(table, on, codes, marks, num, row, dims):
    """The number of an on-set, ``num`` for a new one that was put there; -1 without room for it."""
    return _number(table, on, codes, num, row, _code(marks, row), dims)
