"""Vertices of the order-k diagram: proved signs, ends of edges, and a table of known vertices.

Bases of vertices are solved side by side, in the lanes of vector registers, with error bounds.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.core.shapes import Float64, Int16, Int32, Int64, UInt8, UInt32, UInt64
from moegeom.kernels.cpu import COUNTLESS, UNCOUNTED, kernel

#: Unit roundoff.
UNIT = 2.0**-53

#: Vertices that are worked on side by side, in the lanes of vector registers. They are examined
#: before their edges are entered: few, so that most edges are known from their other end.
TURN = 32


class Room(NamedTuple):
    """Work arrays for a turn of vertices: ``squares`` hold bases and their inverses by lane.

    ``columns`` by lane: what is solved for, solutions and their errors of vertices and of an edge,
    and residuals. ``lines`` by lane: bounds of the inverses, whether there are any, and three to
    spare. ``experts``: f, its bounds, 1 / f and h, and their ``bits``. ``vectors``: a point, its
    errors, a direction.
    """

    squares: Float64[np.ndarray, "2 on on turn"]
    columns: Float64[np.ndarray, "6 on turn"]
    lines: Float64[np.ndarray, "5 turn"]
    pivot: Int64[np.ndarray, "on turn"]
    experts: Float64[np.ndarray, "4 lanes"]
    bits: Int64[np.ndarray, "4 lanes"]
    vectors: Float64[np.ndarray, "3 on"]


def aligned(*shape: int) -> Float64[np.ndarray, "..."]:
    """An array that begins where a cache line does: then no vector lies across two of them."""
    size = math.prod(shape)
    room = np.empty(size + 7)
    start = -(room.ctypes.data // 8) % 8
    return room[start : start + size].reshape(shape)


def room_for(size: int, lanes: int) -> Room:
    """Room for vertices with as many experts on the level."""
    shapes = (
        (2, size, size, TURN), (6, size, TURN), (5, TURN), (size, TURN), (4, lanes), (3, size),
    )  # fmt: skip
    # all but the last are whole cache lines
    ends = list(accumulate(map(math.prod, shapes), initial=0))
    whole = aligned(ends[-1])
    parts = [whole[a:b].reshape(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]
    squares, columns, lines, pivot, experts, vectors = parts
    bits = experts.view(np.int64)
    return Room(squares, columns, lines, pivot.view(np.int64), experts, bits, vectors)


@njit(**UNCOUNTED)
def invert(matrix, pivot, factor, is_regular):
    """Gauss-Jordan with row pivots, in place and in each lane; regular where no pivot is 0."""
    size = len(matrix)
    for column in range(size):
        for w in range(TURN):
            pivot[column, w] = column
            factor[w] = abs(matrix[column, column, w])
        for r in range(column + 1, size):
            for w in range(TURN):
                value = abs(matrix[r, column, w])
                is_larger = value > factor[w]
                pivot[column, w] = r if is_larger else pivot[column, w]
                factor[w] = value if is_larger else factor[w]
        for r in range(column + 1, size):
            for c in range(size):
                for w in range(TURN):
                    one, other = matrix[column, c, w], matrix[r, c, w]
                    is_pivot = pivot[column, w] == r
                    matrix[column, c, w] = other if is_pivot else one
                    matrix[r, c, w] = one if is_pivot else other
        for w in range(TURN):
            is_regular[w] = 0.0 if factor[w] == 0.0 else is_regular[w]
            factor[w] = 1.0 / matrix[column, column, w]
            matrix[column, column, w] = 1.0
        for c in range(size):
            for w in range(TURN):
                matrix[column, c, w] *= factor[w]
        for r in range(size):
            if r == column:
                continue
            for w in range(TURN):
                factor[w] = matrix[r, column, w]
                matrix[r, column, w] = 0.0
            for c in range(size):
                for w in range(TURN):
                    matrix[r, c, w] -= factor[w] * matrix[column, c, w]
    for column in range(size - 1, -1, -1):
        for other in range(column + 1, size):
            for r in range(size):
                for w in range(TURN):
                    one, two = matrix[r, column, w], matrix[r, other, w]
                    is_pivot = pivot[column, w] == other
                    matrix[r, column, w] = two if is_pivot else one
                    matrix[r, other, w] = one if is_pivot else two


@njit(**UNCOUNTED)
def spoil(basis, inverse, spoiled, value, reach, total):
    """Bound of the largest column sum of |I - G M|, what rounding hides included."""
    size = len(basis)
    gamma = 2.0 * (size + 3) * UNIT
    for w in range(TURN):
        spoiled[w] = 0.0
    for c in range(size):
        for w in range(TURN):
            total[w] = 0.0
        for r in range(size):
            start = -1.0 if r == c else 0.0
            for w in range(TURN):
                value[w], reach[w] = start, 1.0
            for m in range(size):
                for w in range(TURN):
                    term = inverse[r, m, w] * basis[m, c, w]
                    value[w] += term
                    reach[w] += abs(term)
            for w in range(TURN):
                total[w] += abs(value[w]) + gamma * reach[w]
        for w in range(TURN):
            spoiled[w] = spoiled[w] if total[w] <= spoiled[w] else total[w]


@njit(**UNCOUNTED)
def multiply(inverse, right, out):
    """G times ``right``."""
    size = len(inverse)
    for r in range(size):
        for w in range(TURN):
            out[r, w] = 0.0
        for c in range(size):
            for w in range(TURN):
                out[r, w] += inverse[r, c, w] * right[c, w]


@njit(**UNCOUNTED)
def bound_errors(basis, inverse, spoiled, right, out, error, left, whole):
    """How far each coordinate of ``out`` = G ``right`` may be from the solution of M x = right.

    The error is e = G (right - M x) + E e with E = I - G M, so that |e| is at most |G| times the
    residual and, in each coordinate, |E| / (1 - |E|) times the sum of that.
    """
    size = len(basis)
    gamma = 2.0 * (size + 3) * UNIT
    for r in range(size):
        for w in range(TURN):
            whole[w], left[r, w] = -right[r, w], abs(right[r, w])
        for c in range(size):
            for w in range(TURN):
                term = basis[r, c, w] * out[c, w]
                whole[w] += term
                left[r, w] += abs(term)
        for w in range(TURN):
            left[r, w] = abs(whole[w]) + gamma * left[r, w]
    for w in range(TURN):
        whole[w] = 0.0
    for r in range(size):
        for w in range(TURN):
            error[r, w] = 0.0
        for c in range(size):
            for w in range(TURN):
                error[r, w] += abs(inverse[r, c, w]) * left[c, w]
        for w in range(TURN):
            whole[w] += error[r, w]
    for r in range(size):
        for w in range(TURN):
            error[r, w] = 1.01 * (error[r, w] + 1.5 * spoiled[w] * whole[w])


@njit(**UNCOUNTED)
def load(columns, bias, on, start, stop, basis, inverse, right, is_regular):
    """The bases of the vertices ``start`` to ``stop`` by lane; lanes beyond repeat the last one."""
    d = len(columns) - 1
    for w in range(TURN):
        vertex = start + w if start + w < stop else stop - 1
        for r in range(d + 1):
            expert = on[vertex, r]
            for c in range(d):
                basis[r, c, w] = columns[c, expert]
            basis[r, d, w] = -1.0
            right[r, w] = -bias[expert]
        is_regular[w] = 1.0
    for r in range(d + 1):
        for c in range(d + 1):
            for w in range(TURN):
                inverse[r, c, w] = basis[r, c, w]


# -------------------------------------------------------------------------------------- vertices
#: What is no expert, or no vertex, at the end of an edge.
NONE, RAY = -1, -2

#: An edge at whose end there may be nothing.
_UNSETTLED = -3

#: What is known of a vertex: its signs are not proved, they are, they were found in exact
#: arithmetic; or it is none, because its hyperplanes are parallel.
UNCERTAIN, PROVED, EXACT, GONE = 0, 1, 2, 3

#: What ``advance`` does with vertices.
EXAMINE, ENTER, BOTH, PLACE, WEIGH = 0, 1, 2, 3, 4

#: Set in ``rising`` where the order of the vertex and its neighbours along u is not proved.
UNORDERED = np.uint32(1 << 31)

#: A slot of the table without a vertex.
EMPTY = np.uint64(2**64 - 1)

#: Numbers below or above are not worked with: products and reciprocals stay finite.
_LEAST, _MOST = 1e-140, 1e140

#: The sign bit of a float64.
_SIGN = np.int64(-(2**63))

#: What lets sums be computed in vector registers; not for error bounds.
_FAST: set[str] = {"nnan", "nsz", "reassoc", "contract"}

#: Products and sums in one operation, in the order in which they stand.
_FUSED: set[str] = {"nnan", "nsz", "contract"}


class Level(NamedTuple):
    """A router, padded with experts far below all, and the direction ``upwards`` of its diagram.

    Behind its columns stands one of zeros, so that they can be taken by two.
    """

    columns: Float64[np.ndarray, "on lanes"]
    bias: Float64[np.ndarray, "lanes"]
    k: int
    num_experts: int
    upwards: Float64[np.ndarray, "dims"]


class Vertices(NamedTuple):
    """Room for vertices: the experts ``on`` the level and, as bits, those ``above`` it.

    ``rising`` are the experts of ``on`` as bits whose edge upwards climbs, ``links`` the vertices
    at the ends of edges: at 2 c where ``on[c]`` goes down and 2 c + 1 where it goes up. Nothing is
    written before a vertex is entered, so that room costs no memory. ``on`` has a row to spare, for
    a vertex that is looked for.
    """

    on: Int16[np.ndarray, "vertices+1 on"]
    above: UInt64[np.ndarray, "vertices words"]
    rising: UInt32[np.ndarray, "vertices"]
    state: UInt8[np.ndarray, "vertices"]
    links: Int32[np.ndarray, "vertices edges"]


class Seen(NamedTuple):
    """The hash table from on-sets to vertices.

    A slot holds the upper half of the set's hash and, below it, the number of the vertex.
    ``following`` is room for a set.
    """

    table: UInt64[np.ndarray, "slots"]
    marks: UInt64[np.ndarray, "experts"]
    following: Int16[np.ndarray, "on"]


@njit(**UNCOUNTED, fastmath=_FUSED)
def _levels(columns, bias, y, error, gamma, f, bound):
    """f of every expert at y, and what it may be wrong by: |f - f_computed| < bound.

    ``error`` becomes what a coefficient of each coordinate adds to the bound.
    """
    d = len(columns) - 1
    level = y[d]
    least = _LEAST + 1.01 * error[d] + gamma * abs(level)
    for c in range(d):
        error[c] = 1.01 * error[c] + gamma * abs(y[c])
    # two columns at a time: what is summed up is read and written half as often
    for j in range(len(bias)):
        one, two = columns[0, j], columns[1, j]
        value = bias[j] - level + one * y[0]
        f[j] = value + two * y[1]
        reach = least + gamma * abs(bias[j]) + abs(one) * error[0]
        bound[j] = reach + abs(two) * error[1]
    for c in range(2, d, 2):
        for j in range(len(bias)):
            one, two = columns[c, j], columns[c + 1, j]
            value = f[j] + one * y[c]
            f[j] = value + two * y[c + 1]
            reach = bound[j] + abs(one) * error[c]
            bound[j] = reach + abs(two) * error[c + 1]


@njit(**UNCOUNTED)
def _are_certain(f, bound):
    """Whether every sign is proved; not so where something is not a number."""
    certain = True
    for j in range(len(f)):
        certain &= abs(f[j]) > bound[j]
    return certain


@njit(**UNCOUNTED)
def _first_place(bits, value):
    """The first place of a value that is there."""
    nowhere = np.int64(len(bits))
    place = nowhere
    for j in range(len(bits)):
        here = np.int64(j) if bits[j] == value else nowhere
        place = here if here < place else place
    return place


@njit(**UNCOUNTED, fastmath=_FAST)
def _reciprocals(f, bound, inverse_f, ratio, bits):
    """1 / f, and the largest of bound / |f|."""
    for j in range(len(f)):
        inverse_f[j] = 1.0 / f[j]
        ratio[j] = bound[j] * abs(inverse_f[j])
    # positive floats are ordered as their bits
    most = np.int64(0)
    for j in range(len(f)):
        most = bits[j] if bits[j] > most else most
    return ratio[_first_place(bits, most)]


@njit(**UNCOUNTED, fastmath=_FUSED)
def _shot(columns, direction, inverse_f, h, bits):
    """h = -slope / f along an edge; the bits of its largest and of its least.

    At ``tau`` along the edge f + tau slope = 0, and h = 1 / tau: its largest is the first expert
    that is met upwards, its least the first one downwards, 0 where there is none.
    """
    d = len(columns) - 1
    for j in range(len(h)):
        slope = -direction[d] + columns[0, j] * direction[0]
        h[j] = slope + columns[1, j] * direction[1]
    for c in range(2, d, 2):
        for j in range(len(h)):
            slope = h[j] + columns[c, j] * direction[c]
            h[j] = slope + columns[c + 1, j] * direction[c + 1]
    for j in range(len(h)):
        h[j] = -h[j] * inverse_f[j]
    # floats of one sign are ordered as their bits, and maxima of integers are vector code
    largest, least = np.int64(0), np.int64(0)
    for j in range(len(h)):
        largest = bits[j] if bits[j] > largest else largest
        below = bits[j] ^ _SIGN
        least = below if below > least else least
    return largest, least ^ _SIGN


@njit(**UNCOUNTED)
def _largest(values):
    most = 0.0
    for value in values:
        size = abs(value) if value == value else np.inf
        most = size if size > most else most
    return most


@njit(**UNCOUNTED)
def _are_sloping(columns, room, direction, w, bound):
    """Whether every slope along an edge is known to differ from 0, where nothing is met.

    The bound of a slope is ``bound`` or, where that is negative, what the errors of the edge of
    lane ``w`` make of it.
    """
    d, inverse_f = len(columns) - 1, room.experts[2]
    edge, error, gamma = room.columns[3], room.columns[4], 2.0 * (d + 4) * UNIT
    for j in range(len(inverse_f)):
        if inverse_f[j] == 0.0:  # on the level itself, or nobody
            continue
        slope, most = -direction[d], bound
        for m in range(d):
            slope += columns[m, j] * direction[m]
        if bound < 0.0:
            most = 1.01 * error[d, w] + gamma * abs(edge[d, w])
            for m in range(d):
                most += abs(columns[m, j]) * (1.01 * error[m, w] + gamma * abs(edge[m, w]))
        if not abs(slope) > most:
            return False
    return True


@njit(**UNCOUNTED)
def _settle_rays(level, room, w, ends):
    """Whether nothing is met along the edges that no bound for all slopes decided: one for each."""
    size, proved = len(level.columns), True
    right, direction, inverse = room.columns[0], room.vectors[2], room.squares[1]
    for edge in range(2 * size):
        if ends[edge] != _UNSETTLED:
            continue
        for m in range(size):
            right[m, w] = 1.0 if m == edge >> 1 else 0.0
            direction[m] = inverse[m, edge >> 1, w]
        multiply(inverse, right, room.columns[3])
        bound_errors(
            room.squares[0], inverse, room.lines[0], right, room.columns[3], room.columns[4],
            room.columns[5], room.lines[2],
        )  # fmt: skip
        is_ray = _are_sloping(level.columns, room, direction, w, -1.0)
        ends[edge] = RAY if is_ray else NONE
        proved &= is_ray
    return proved


@njit(**UNCOUNTED)
def num_bits(word):
    """How many bits of 64 are set: one instruction where there is one."""
    ones, twos = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
    word -= (word >> np.uint64(1)) & ones
    word = (word & twos) + ((word >> np.uint64(2)) & twos)
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


# the two take more arrays than a call can hand over quickly
@njit(**UNCOUNTED, forceinline=True)
def _signs(level, own, above, w, room, largest_row):
    """The experts ``above`` the vertex of lane ``w``; how many, and the largest of bound / |f|.

    -1 experts where the signs are not proved. Leaves 1 / f in ``room``, 0 for who is never met.
    """
    columns, bias, num_experts = level.columns, level.bias, level.num_experts
    size, num_lanes = columns.shape
    f, bound, inverse_f, h = room.experts[0], room.experts[1], room.experts[2], room.experts[3]
    y, error, f_bits = room.vectors[0], room.vectors[1], room.bits[0]
    if room.lines[1, w] == 0.0 or not room.lines[0, w] < 0.3:
        return -1, 0.0
    for c in range(size):
        y[c], error[c] = room.columns[1, c, w], room.columns[2, c, w]
    if not _largest(y) * largest_row < _MOST:
        return -1, 0.0
    _levels(columns, bias, y, error, 2.0 * (size + 3) * UNIT, f, bound)
    for r in range(size):
        f[own[r]], bound[own[r]] = _MOST, 0.0
    if not _are_certain(f, bound):
        return -1, 0.0
    worst = _reciprocals(f, bound, inverse_f, h, room.bits[3])
    for r in range(size):
        f[own[r]], inverse_f[own[r]] = -1.0, 0.0  # on the level: never met
    for j in range(num_experts, num_lanes):
        inverse_f[j] = 0.0
    count = 0
    for word in range(len(above)):
        over, last = np.uint64(0), 64 * word + 64
        for j in range(64 * word, last if last < num_lanes else num_lanes):
            over |= np.uint64(f_bits[j] >= 0) << np.uint64(j & 63)
        above[word] = over
        count += num_bits(over)
    return count, worst


@njit(**UNCOUNTED, forceinline=True)
def _edges(level, vertices, met, vertex, count, w, room, reach, largest_row):
    """Shoots the edges of a vertex with ``count`` experts above it; ``met`` becomes their ends.

    Whether no edge is left for ``_settle_rays``.
    """
    columns, k, along = level.columns, level.k, level.upwards
    size, spoiled = len(columns), room.lines[0, w]
    d, links = size - 1, vertices.links
    direction, inverse = room.vectors[2], room.squares[1]
    inverse_f, h, h_bits = room.experts[2], room.experts[3], room.bits[3]
    gamma, bits, is_settled = 2.0 * (size + 3) * UNIT, np.uint32(0), True
    for c in range(size):
        climb, length = 0.0, 0.0
        for m in range(size):
            direction[m] = inverse[m, c, w]
            length += abs(direction[m])
            if m < d:
                climb += along[m] * direction[m]
        if not length * largest_row < _MOST:
            vertices.state[vertex] = UNCERTAIN
            break
        if climb > 0.0:
            bits |= np.uint32(1) << np.uint32(c)
        # M^-1 - G = E M^-1 with E = I - G M
        wrong = length * (spoiled / (1.0 - spoiled) + gamma)
        if not abs(climb) > reach * wrong:
            bits |= UNORDERED
        down = count >= k - d + 1 and links[vertex, 2 * c] == NONE
        up = count <= k - 2 and links[vertex, 2 * c + 1] == NONE
        if not down and not up:
            continue
        largest, least = _shot(columns, direction, inverse_f, h, h_bits)
        for side in range(2):
            nearest = largest if side else least
            if not (up if side else down):
                continue
            if nearest != (0 if side else _SIGN):
                met[2 * c + side] = _first_place(h_bits, nearest)
            elif _are_sloping(columns, room, direction, w, 1.01 * largest_row * wrong):
                met[2 * c + side] = RAY
            else:
                met[2 * c + side], is_settled = _UNSETTLED, False
    vertices.rising[vertex] = bits
    return is_settled


@njit(**UNCOUNTED)
def _code(marks, row):
    """The hash of a set of experts: the exclusive or of their marks."""
    value = np.uint64(0)
    for c in range(len(row)):
        value ^= marks[row[c]]
    return value


@njit(**UNCOUNTED)
def _place(table, on, row, code):
    """The slot of an on-set in the table, or the empty one where it belongs."""
    mask, upper = np.uint64(len(table) - 1), code >> np.uint64(32)
    slot = code & mask
    while table[slot] != EMPTY:
        if table[slot] >> np.uint64(32) == upper:
            vertex, same = table[slot] & np.uint64(0xFFFFFFFF), True
            for c in range(len(row)):
                same &= on[vertex, c] == row[c]
            if same:
                return slot
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit(**UNCOUNTED)
def _number(table, vertices, num, row, code):
    """The number of an on-set, ``num`` for a new one that was put there; -1 without room for it."""
    on = vertices.on
    slot = _place(table, on, row, code)
    if table[slot] == EMPTY:
        if num == len(vertices.state):
            return -1
        for c in range(len(row)):
            on[num, c] = row[c]
        for edge in range(2 * len(row)):
            vertices.links[num, edge] = NONE
        vertices.state[num] = UNCERTAIN
        table[slot] = ((code >> np.uint64(32)) << np.uint64(32)) | np.uint64(num)
    return np.int64(table[slot] & np.uint64(0xFFFFFFFF))


@njit(**UNCOUNTED)
def _swap(own, leaving, entering, out):
    """Writes the on-set without ``own[leaving]``, with ``entering``; returns its index there."""
    size, place = len(own), 0
    for c in range(size):
        place += np.int64((own[c] < entering) & (c != leaving))
    # no branches: which way they went could not be foretold
    for n in range(size):
        left = n - np.int64(n > place)
        left += np.int64(left >= leaving)
        out[n] = own[left if left < size else size - 1]
    out[place] = entering
    return place


@njit(**UNCOUNTED)
def _enter(vertices, seen, met, notes, start, first, stop, num):
    """Numbers for the ends of the edges of the vertices ``first`` to ``stop``.

    ``met`` is what ``examine`` found for the vertices from ``start`` on. The same edge is entered
    at its other end, which need not be shot again; ``notes`` [1] counts the edges that another
    vertex was entered for there. Returns the first vertex that is left, as there was no room for
    all of its ends, and the number of vertices.
    """
    on, above, links = vertices.on, vertices.above, vertices.links
    following = seen.following
    for vertex in range(first, stop):
        code = _code(seen.marks, on[vertex])
        for edge in range(links.shape[1]):
            entering = met[vertex - start, edge]
            if entering == NONE or links[vertex, edge] != NONE:
                continue
            if entering == RAY:
                links[vertex, edge] = RAY
                continue
            leaving = on[vertex, edge >> 1]
            place = _swap(on[vertex], edge >> 1, entering, following)
            exchanged = code ^ seen.marks[leaving] ^ seen.marks[entering]
            end = _number(seen.table, vertices, num, following, exchanged)
            if end < 0:
                return vertex, num
            num = end + 1 if end == num else num
            links[vertex, edge] = end
            was_above = (above[vertex, entering >> 6] >> np.uint64(entering & 63)) & np.uint64(1)
            back = 2 * place + np.int64(was_above)
            if links[end, back] == NONE:
                links[end, back] = vertex
            elif links[end, back] != vertex:
                notes[1] += 1.0
    return stop, num


@njit(**UNCOUNTED)
def _weigh(centre, room, point, head, stop):
    """The rows of ``point``: coordinates, bounds of their errors, multipliers."""
    y, error, weights, inverse = room.columns[1], room.columns[2], room.columns[3], room.squares[1]
    size = len(y)
    d = size - 1
    for r in range(size):
        for w in range(TURN):
            weights[r, w] = 0.0
        for c in range(d):
            for w in range(TURN):
                weights[r, w] += inverse[c, r, w] * (y[c, w] - centre[c])
    for vertex in range(head, stop):
        w = vertex - head
        is_bounded = room.lines[1, w] != 0.0 and room.lines[0, w] < 0.3
        for c in range(d):
            point[vertex, c] = y[c, w]
            point[vertex, d + c] = error[c, w] if is_bounded else np.inf
        for r in range(size):
            point[vertex, 2 * d + r] = weights[r, w]


@kernel(**COUNTLESS)
def advance(level, vertices, seen, met, notes, first, head, num, last, room, point, work):
    """Takes vertices from ``head`` to ``last``, as far as there are any, by turns.

    ``work`` is to EXAMINE them: signs and ends of edges, where ``met`` [vertices from ``first`` on,
    2 (d + 1)] becomes the expert that enters at the end of each edge that the diagram has and the
    links do not know yet, and ``notes`` [0] the least of |f| / bound; to ENTER what is met; to do
    BOTH by turns; or to PLACE them only: ``point`` becomes where they lie, the numbers that signs
    are proved with; or to WEIGH them as well: behind that it becomes bounds of the errors of each
    coordinate, infinite where there are none, and the multipliers of the experts on the level
    whose rows sum to the way from ``upwards``. Returns the first vertex that is not done, the
    number of vertices, and whether there was room for all.
    """
    columns, on = level.columns, vertices.on
    size = len(columns)
    d, largest_row, reach = size - 1, 1.0, _largest(level.upwards)
    basis, inverse = room.squares[0], room.squares[1]
    right, y, error, left = room.columns[0], room.columns[1], room.columns[2], room.columns[5]
    spoiled, is_regular, spare = room.lines[0], room.lines[1], room.lines[2]
    for c in range(d):
        length = _largest(columns[c])
        largest_row = length if length > largest_row else largest_row
    while head < num and head < last:
        stop = head + TURN
        stop = stop if stop < num else num
        stop = stop if stop < last else last
        if work == BOTH:
            first = head
        if work != ENTER:
            load(columns, level.bias, on, head, stop, basis, inverse, right, is_regular)
            invert(inverse, room.pivot, spare, is_regular)
            multiply(inverse, right, y)
        if work == PLACE:
            for c in range(d):
                for vertex in range(head, stop):
                    point[vertex, c] = y[c, vertex - head]
            head = stop
            continue
        if work != ENTER:
            spoil(basis, inverse, spoiled, spare, room.lines[3], room.lines[4])
            bound_errors(basis, inverse, spoiled, right, y, error, left, spare)
        if work == WEIGH:
            _weigh(level.upwards, room, point, head, stop)
            head = stop
            continue
        if work != ENTER:
            for vertex in range(head, stop):
                w, own = vertex - head, on[vertex]
                over, ends = vertices.above[vertex], met[vertex - first]
                vertices.state[vertex] = UNCERTAIN
                for edge in range(2 * size):
                    ends[edge] = NONE
                count, worst = _signs(level, own, over, w, room, largest_row)
                if count >= 0 and level.k - d <= count < level.k:
                    vertices.state[vertex] = PROVED
                    notes[0] = 1.0 / worst if 1.0 / worst < notes[0] else notes[0]
                    is_settled = _edges(
                        level, vertices, ends, vertex, count, w, room, reach, largest_row
                    )
                    if not is_settled and not _settle_rays(level, room, w, ends):
                        vertices.state[vertex] = UNCERTAIN
        if work != EXAMINE:
            done, num = _enter(vertices, seen, met, notes, first, head, stop, num)
            if done < stop:
                return done, num, False
        head = stop
    return head, num, True


@kernel(**COUNTLESS)
def check_links(vertices, num, is_plain, expected):
    """Marks vertices as uncertain where the two ends of an edge differ in more than the exchange.

    Where both ends have proved signs and differ in the two experts alone, no hyperplane lies
    between them: each is the other's neighbour, whatever rounding did to the shot. Where
    ``is_plain``, all vertices are proved and linked from both sides, and each edge is looked at
    from one of them. ``expected`` is room
    for a set of experts. Returns how many lost their proof.
    """
    on, above, state, links = vertices.on, vertices.above, vertices.state, vertices.links
    words, lost = above.shape[1], 0
    for u in range(num):
        if state[u] != PROVED:
            continue
        for edge in range(links.shape[1]):
            v = links[u, edge]
            if v < (u if is_plain else 0) or state[v] == UNCERTAIN:
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


@kernel(**COUNTLESS)
def put(seen, on, start, stop):
    """Puts the on-sets ``start`` to ``stop`` into the table; the number that the last has there.

    That is a lower one where the set has been put there before.
    """
    number = np.int64(NONE)
    for row in range(start, stop):
        code = _code(seen.marks, on[row])
        slot = _place(seen.table, on, on[row], code)
        if seen.table[slot] == EMPTY:
            seen.table[slot] = ((code >> np.uint64(32)) << np.uint64(32)) | np.uint64(row)
        number = np.int64(seen.table[slot] & np.uint64(0xFFFFFFFF))
    return number
