"""Vertices of the order-k diagram: their signs with proof, where the edges end, and those seen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int16, Int32, UInt8, UInt32, UInt64
from numba import njit

from moegeom.kernels.cpu import INNER

#: Unit roundoff.
_UNIT = 2.0**-53

#: What is no expert, or no vertex, at the end of an edge.
NONE, RAY = -1, -2

#: What is known of a vertex: its signs are not proved, they are, they were found in exact
#: arithmetic; or it is none, because its hyperplanes are parallel.
UNCERTAIN, PROVED, EXACT, GONE = 0, 1, 2, 3

#: Set in ``rising`` where the order of the vertex and its neighbours along u is not proved.
UNORDERED = np.uint32(1 << 31)

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

    The direction is a tuple, for its length is a part of its type: kernels are compiled for each.
    """

    columns: Float64[np.ndarray, "dims lanes"]
    bias: Float64[np.ndarray, "lanes"]
    k: int
    num_experts: int
    upwards: tuple[float, ...]


class Vertices(NamedTuple):
    """Room for vertices: the experts ``on`` the level and, as bits, those ``above`` it.

    ``rising`` are the experts of ``on`` as bits whose edge upwards climbs, ``links`` the vertices
    at the ends of edges: at 2 c where ``on[c]`` goes down and 2 c + 1 where it goes up.
    """

    on: Int16[np.ndarray, "vertices on"]
    above: UInt64[np.ndarray, "vertices words"]
    point: Float64[np.ndarray, "vertices dims"]
    rising: UInt32[np.ndarray, "vertices"]
    state: UInt8[np.ndarray, "vertices"]
    links: Int32[np.ndarray, "vertices edges"]


class Seen(NamedTuple):
    """Where a vertex is found by its on-set: a table of numbers, and the hashes of the sets."""

    table: Int32[np.ndarray, "slots"]
    codes: UInt64[np.ndarray, "vertices"]
    marks: UInt64[np.ndarray, "experts"]


@njit(**INNER)
def _inverted(matrix, swapped, dims):
    """Gauss-Jordan with row pivots, in place; False where a pivot is 0."""
    size = len(dims) + 1
    for column in range(size):
        pivot = column
        for r in range(column + 1, size):
            if abs(matrix[r, column]) > abs(matrix[pivot, column]):
                pivot = r
        swapped[column] = pivot
        if matrix[pivot, column] == 0.0:
            return False
        scale = 1.0 / matrix[pivot, column]
        if pivot != column:
            for c in range(size):
                matrix[column, c], matrix[pivot, c] = matrix[pivot, c], matrix[column, c]
        matrix[column, column] = 1.0
        for c in range(size):
            matrix[column, c] *= scale
        for r in range(size):
            if r == column:
                continue
            factor = matrix[r, column]
            matrix[r, column] = 0.0
            for c in range(size):
                matrix[r, c] -= factor * matrix[column, c]
    for column in range(size - 1, -1, -1):
        if swapped[column] != column:
            for r in range(size):
                other = swapped[column]
                matrix[r, column], matrix[r, other] = matrix[r, other], matrix[r, column]
    return True


@njit(**INNER)
def _spoiled(basis, inverse, dims):
    """Bound of the largest column sum of |I - G M|, what rounding hides included."""
    size, most = len(dims) + 1, 0.0
    gamma = 2.0 * (size + 3) * _UNIT
    for c in range(size):
        total = 0.0
        for r in range(size):
            value, reach = -1.0 if r == c else 0.0, 1.0
            for m in range(size):
                term = inverse[r, m] * basis[m, c]
                value += term
                reach += abs(term)
            total += abs(value) + gamma * reach
        most = max(most, total)
    return most


@njit(**INNER)
def _solved(basis, inverse, spoiled, right, out, error, left, dims):
    """G times ``right`` for M x = right, and how far each coordinate may be from the solution.

    The error is e = G (right - M x) + E e with E = I - G M, so that |e| is at most |G| times the
    residual and, in each coordinate, |E| / (1 - |E|) times the sum of that.
    """
    size = len(dims) + 1
    gamma = 2.0 * (size + 3) * _UNIT
    for r in range(size):
        value = 0.0
        for c in range(size):
            value += inverse[r, c] * right[c]
        out[r] = value
    for r in range(size):
        value, reach = -right[r], abs(right[r])
        for c in range(size):
            term = basis[r, c] * out[c]
            value += term
            reach += abs(term)
        left[r] = abs(value) + gamma * reach
    whole = 0.0
    for r in range(size):
        value = 0.0
        for c in range(size):
            value += abs(inverse[r, c]) * left[c]
        error[r] = value
        whole += value
    for r in range(size):
        error[r] = 1.01 * (error[r] + 1.5 * spoiled * whole)


@njit(**INNER, fastmath=_FUSED)
def _levels(columns, bias, y, error, gamma, f, bound, dims):
    """f of every expert at y, and what it may be wrong by: |f - f_computed| < bound."""
    d = len(dims)
    for j in range(len(bias)):
        value = bias[j] - y[d]
        reach = _LEAST + 1.01 * error[d] + gamma * (abs(y[d]) + abs(bias[j]))
        for c in range(d):
            value += columns[c, j] * y[c]
            reach += abs(columns[c, j]) * (1.01 * error[c] + gamma * abs(y[c]))
        f[j], bound[j] = value, reach


@njit(**INNER)
def _are_certain(f, bound):
    """Whether every sign is proved; not so where something is not a number."""
    certain = True
    for j in range(len(f)):
        certain &= abs(f[j]) > bound[j]
    return certain


@njit(**INNER, fastmath=_FAST)
def _reciprocals(f, bound, inverse_f):
    """1 / f, and the largest of bound / |f|."""
    most = 0.0
    for j in range(len(f)):
        inverse_f[j] = 1.0 / f[j]
        most = max(most, bound[j] * abs(inverse_f[j]))
    return most


@njit(**INNER, fastmath=_FUSED)
def _shot(columns, direction, inverse_f, h, bits, dims):
    """h = -slope / f along an edge; the bits of its largest and of its least.

    At ``tau`` along the edge f + tau slope = 0, and h = 1 / tau: its largest is the first expert
    that is met upwards, its least the first one downwards, 0 where there is none.
    """
    d = len(dims)
    for j in range(len(h)):
        slope = -direction[d]
        for c in range(d):
            slope += columns[c, j] * direction[c]
        h[j] = -slope * inverse_f[j]
    # floats of one sign are ordered as their bits, and maxima of integers are vector code
    largest, least = np.int64(0), np.int64(0)
    for j in range(len(h)):
        largest = max(largest, bits[j])
        least = max(least, bits[j] ^ _SIGN)
    return largest, least ^ _SIGN


@njit(**INNER)
def _largest(values):
    most = 0.0
    for value in values:
        most = max(most, abs(value)) if value == value else np.inf
    return most


@njit(**INNER)
def _found(bits, value):
    """The first place of a value that is there."""
    place = np.int64(len(bits))
    for j in range(len(bits)):
        place = min(place, np.int64(j) if bits[j] == value else np.int64(len(bits)))
    return place


@njit(**INNER)
def _is_ray(
    columns, basis, inverse, spoiled, inverse_f, direction, column, scratch, num_experts, dims
):
    """Whether every slope along an edge is known to differ from 0, where nothing is met."""
    size = len(dims) + 1
    edge, error, right, left = scratch[0], scratch[1], scratch[2], scratch[3]
    gamma = 2.0 * (size + 3) * _UNIT
    for m in range(size):
        right[m] = 1.0 if m == column else 0.0
    _solved(basis, inverse, spoiled, right, edge, error, left, dims)
    for j in range(num_experts):
        if inverse_f[j] == 0.0:  # on the level itself
            continue
        bound = 1.01 * error[size - 1] + gamma * abs(edge[size - 1])
        slope = -direction[size - 1]
        for m in range(size - 1):
            slope += columns[m, j] * direction[m]
            bound += abs(columns[m, j]) * (1.01 * error[m] + gamma * abs(edge[m]))
        if not abs(slope) > bound:
            return False
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def examine(level, vertices, met, gap, start, stop):
    """Signs and ends of the edges of the vertices ``start`` to ``stop``.

    ``met`` [vertices - start, 2 (d + 1)] becomes the expert that enters at the end of each edge
    that the diagram has and the links do not know yet. ``gap`` [0] is the least of |f| / bound.
    """
    columns, bias, k, num_experts, upwards = level
    on, above, point, rising, state, links = vertices
    dims, lanes = upwards, columns.shape[1]
    # known to the compiler, which unrolls what runs over it
    d = len(dims)
    size = d + 1
    basis, inverse = np.empty((size, size)), np.empty((size, size))
    y, error, right, left = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    spare = np.empty((4, size))
    f, bound, inverse_f = np.empty(lanes), np.empty(lanes), np.empty(lanes)
    h, direction, along = np.empty(lanes), np.empty(size), np.empty(d)
    f_bits, h_bits, swapped = f.view(np.uint64), h.view(np.int64), np.empty(size, np.int64)
    gamma = 2.0 * (size + 3) * _UNIT
    for c in range(d):
        along[c] = upwards[c]
    reach, largest_row = _largest(along), 1.0
    for c in range(d):
        largest_row = max(largest_row, _largest(columns[c]))
    for vertex in range(start, stop):
        own, ends = on[vertex], met[vertex - start]
        ends[:] = NONE
        state[vertex] = UNCERTAIN
        for r in range(size):
            for c in range(d):
                basis[r, c] = columns[c, own[r]]
            basis[r, d] = -1.0
            right[r] = -bias[own[r]]
        inverse[:] = basis
        if not _inverted(inverse, swapped, dims):
            continue
        spoiled = _spoiled(basis, inverse, dims)
        if not spoiled < 0.3:
            continue
        _solved(basis, inverse, spoiled, right, y, error, left, dims)
        if not _largest(y) * largest_row < _MOST:
            continue
        _levels(columns, bias, y, error, gamma, f, bound, dims)
        for r in range(size):
            f[own[r]], bound[own[r]] = _MOST, 0.0
        if not _are_certain(f, bound):
            continue
        worst = _reciprocals(f, bound, inverse_f)
        count = 0
        for r in range(size):
            f[own[r]], inverse_f[own[r]] = -1.0, 0.0  # on the level: never met
        for j in range(num_experts, lanes):
            inverse_f[j] = 0.0
        for word in range(above.shape[1]):
            over, signs = np.uint64(0), f_bits[64 * word : 64 * word + 64]
            for j in range(len(signs)):
                over |= ((signs[j] >> np.uint64(63)) ^ np.uint64(1)) << np.uint64(j)
            above[vertex, word] = over
            while over:
                over &= over - np.uint64(1)
                count += 1
        if count < k - d or count > k - 1:
            continue
        state[vertex] = PROVED
        gap[0] = min(gap[0], 1.0 / worst)
        for c in range(d):
            point[vertex, c] = y[c]
        bits = np.uint32(0)
        for c in range(size):
            climb, length = 0.0, 0.0
            for m in range(size):
                direction[m] = inverse[m, c]
                length += abs(direction[m])
                if m < d:
                    climb += along[m] * direction[m]
            if not length * largest_row < _MOST:
                state[vertex] = UNCERTAIN
                break
            if climb > 0.0:
                bits |= np.uint32(1) << np.uint32(c)
            # M^-1 - G = E M^-1 with E = I - G M
            if not abs(climb) > reach * length * (spoiled / (1.0 - spoiled) + gamma):
                bits |= UNORDERED
            down = count >= k - d + 1 and links[vertex, 2 * c] == NONE
            up = count <= k - 2 and links[vertex, 2 * c + 1] == NONE
            if not down and not up:
                continue
            largest, least = _shot(columns, direction, inverse_f, h, h_bits, dims)
            for side in range(2):
                nearest = largest if side else least
                if not (up if side else down):
                    continue
                if nearest != (0 if side else _SIGN):
                    ends[2 * c + side] = _found(h_bits, nearest)
                elif _is_ray(
                    columns,
                    basis,
                    inverse,
                    spoiled,
                    inverse_f,
                    direction,
                    c,
                    spare,
                    num_experts,
                    dims,
                ):
                    ends[2 * c + side] = RAY
                else:
                    state[vertex] = UNCERTAIN
        rising[vertex] = bits


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
def enter(vertices, seen, met, start, first, stop, num, dims):
    """Numbers for the ends of the edges of the vertices ``first`` to ``stop``.

    ``met`` is what ``examine`` found for the vertices from ``start`` on. The same edge is entered
    at its other end, which need not be shot again. Returns the first vertex that is left, as there
    was no room for all of its ends, and the number of vertices.
    """
    on, above, links = vertices.on, vertices.above, vertices.links
    table, codes, marks = seen
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
def advance(level, vertices, seen, met, gap, head, num, most):
    """``examine`` and ``enter`` by turns, for at most ``most`` vertices from ``head`` on.

    Returns the first vertex whose edges are not entered, the number of vertices, and whether there
    was room for all.
    """
    last = head + most
    while head < min(num, last):
        stop = min(num, head + len(met), last)
        examine(level, vertices, met, gap, head, stop)
        done, num = enter(vertices, seen, met, head, head, stop, num, level.upwards)
        head = done
        if done < stop:
            return head, num, False
    return head, num, True


@njit(nogil=True, cache=True)
def check_links(vertices, num):
    """Takes the proof from vertices with an edge whose ends differ in more than was exchanged.

    Where both ends have proved signs and differ in the two experts alone, no hyperplane lies
    between them: each is the other's neighbour, whatever rounding did to the shot.
    """
    on, above, state, links = vertices.on, vertices.above, vertices.state, vertices.links
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
def fill_table(seen, on, num, dims):
    """Puts the first on-sets into the table."""
    table, codes, _ = seen
    for row in range(num):
        table[_place(table, on, codes, on[row], codes[row], dims)] = row


@njit(nogil=True, cache=True)
def entered(seen, on, num, row, dims):
    """The number of an on-set, ``num`` for a new one that was put there; -1 without room for it."""
    return _number(seen.table, on, seen.codes, num, row, _code(seen.marks, row), dims)
