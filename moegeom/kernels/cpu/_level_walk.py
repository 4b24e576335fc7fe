"""The walk over the vertices of the order-k diagram, vertex by vertex, in certified float64."""

from __future__ import annotations

import numpy as np
from numba import njit

from moegeom.kernels.cpu._inner import INNER

#: Unit roundoff, and what a sum of n products of numbers with an error of their own may lose.
_UNIT = 2.0**-53

#: Ends of a walk: all vertices seen, or no room for more.
DONE, FULL = 0, 1

#: What is no vertex at the end of an edge.
NONE, RAY = -1, -2

#: What is known of a vertex: its signs are not proved, they are, they were found in exact
#: arithmetic; or it is none, because its hyperplanes are parallel.
UNCERTAIN, PROVED, EXACT, GONE = 0, 1, 2, 3


@njit(**INNER)
def _inverted(matrix, inverse):
    """Gauss-Jordan with row pivots, in place; False where a pivot is 0."""
    size = len(matrix)
    for r in range(size):
        for c in range(size):
            inverse[r, c] = 1.0 if r == c else 0.0
    for column in range(size):
        pivot = column
        for r in range(column + 1, size):
            if abs(matrix[r, column]) > abs(matrix[pivot, column]):
                pivot = r
        lead = matrix[pivot, column]
        if lead == 0.0:
            return False
        for c in range(size):
            matrix[column, c], matrix[pivot, c] = matrix[pivot, c], matrix[column, c]
            inverse[column, c], inverse[pivot, c] = inverse[pivot, c], inverse[column, c]
        for c in range(size):
            matrix[column, c] /= lead
            inverse[column, c] /= lead
        for r in range(size):
            factor = matrix[r, column]
            if r == column or factor == 0.0:
                continue
            for c in range(size):
                matrix[r, c] -= factor * matrix[column, c]
                inverse[r, c] -= factor * inverse[column, c]
    return True


@njit(**INNER)
def _spoiled(basis, inverse):
    """Largest column sum of |I - G M|: below 0.3 the inverse is one, up to half its size."""
    size, most = len(basis), 0.0
    for c in range(size):
        total = 0.0
        for r in range(size):
            value = -1.0 if r == c else 0.0
            for m in range(size):
                value += inverse[r, m] * basis[m, c]
            total += abs(value)
        most = max(most, total)
    return most


@njit(**INNER)
def _solved(basis, inverse, right, out, error):
    """G times ``right`` for M x = right, and how far each coordinate may be from the solution."""
    size = len(basis)
    gamma = 2.0 * (size + 3) * _UNIT
    for r in range(size):
        value = 0.0
        for c in range(size):
            value += inverse[r, c] * right[c]
        out[r] = value
    left = np.empty(size)
    for r in range(size):
        value, reach = -right[r], abs(right[r])
        for c in range(size):
            value += basis[r, c] * out[c]
            reach += abs(basis[r, c]) * abs(out[c])
        left[r] = abs(value) + gamma * reach
    for r in range(size):
        value = 0.0
        for c in range(size):
            value += abs(inverse[r, c]) * left[c]
        error[r] = 1.5 * value


@njit(**INNER)
def _hash(row):
    value = np.uint64(1469598103934665603)
    for c in range(len(row)):
        value = (value ^ np.uint64(row[c] + 1)) * np.uint64(1099511628211)
        value ^= value >> np.uint64(29)
    return value


@njit(**INNER)
def _place(table, on, row):
    """The slot of an on-set in the table, or the empty one where it belongs."""
    mask = np.uint64(len(table) - 1)
    slot = _hash(row) & mask
    while table[slot] >= 0:
        other, same = on[table[slot]], True
        for c in range(len(row)):
            if other[c] != row[c]:
                same = False
                break
        if same:
            return slot
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit(**INNER)
def _entered(table, on, num, row):
    """The number of an on-set, ``num`` for a new one that was put there; -1 without room for it."""
    slot = _place(table, on, row)
    if table[slot] < 0:
        if num == len(on):
            return -1
        on[num] = row
        table[slot] = num
    return table[slot]


@njit(**INNER)
def _swapped(on, leaving, entering, out):
    """The on-set without ``on[leaving]`` and with ``entering``, in order."""
    n, placed = 0, False
    for c in range(len(on)):
        if c == leaving:
            continue
        if not placed and entering < on[c]:
            out[n] = entering
            n, placed = n + 1, True
        out[n] = on[c]
        n += 1
    if not placed:
        out[n] = entering


@njit(nogil=True, cache=True)
def level_walk_loop(weight, bias, k, on, above, proved, links, gap, table, head, num):
    """Walks from the vertices ``head`` to ``num`` of ``on``; first one left, number, and the end.

    ``above`` [vertices, experts] holds the proved signs. ``links`` [vertices, 2 (d + 1)] is the
    vertex at the end of each edge, at 2 c where ``on[c]`` goes down and 2 c + 1 where it goes up,
    RAY for an edge without end and NONE where there is no edge of the diagram, or it is not known.
    ``gap`` [0] is the least |f| over its error.
    """
    experts, d = weight.shape
    size = d + 1
    basis, scratch, inverse = np.empty((size, size)), np.empty((size, size)), np.empty((size, size))
    y, error, right = np.empty(size), np.empty(size), np.empty(size)
    edge, edge_error = np.empty(size), np.empty(size)
    f, bound = np.empty(experts), np.empty(experts)
    slope, is_on = np.empty((experts, size)), np.zeros(experts, dtype=np.bool_)
    following = np.empty(size, dtype=on.dtype)
    gamma = 2.0 * (size + 3) * _UNIT
    while head < num:
        own = on[head]
        for r in range(size):
            for c in range(d):
                basis[r, c] = weight[own[r], c]
            basis[r, d] = -1.0
            right[r] = -bias[own[r]]
        scratch[:] = basis
        if not _inverted(scratch, inverse) or not _spoiled(basis, inverse) < 0.3:
            proved[head] = UNCERTAIN
            head += 1
            continue
        _solved(basis, inverse, right, y, error)
        is_on[:] = False
        for r in range(size):
            is_on[own[r]] = True
        count, certain = 0, True
        for j in range(experts):
            value, reach, loose = bias[j] - y[d], abs(bias[j]) + abs(y[d]), error[d]
            for c in range(d):
                value += weight[j, c] * y[c]
                reach += abs(weight[j, c] * y[c])
                loose += abs(weight[j, c]) * error[c]
            f[j], bound[j] = value, 1.01 * loose + gamma * reach
            above[head, j] = False
            if is_on[j]:
                continue
            if not abs(value) > bound[j]:
                certain = False
                continue
            gap[0] = min(gap[0], abs(value) / bound[j])
            above[head, j] = value > 0.0
            count += value > 0.0
        if not certain or count < k - d or count > k - 1:
            proved[head] = UNCERTAIN
            head += 1
            continue
        proved[head] = PROVED
        for j in range(experts):
            for c in range(size):
                value = -inverse[d, c]
                for m in range(d):
                    value += weight[j, m] * inverse[m, c]
                slope[j, c] = value
        for c in range(size):
            for upwards in range(2):
                if upwards and count > k - 2:
                    continue
                if not upwards and count < k - d + 1:
                    continue
                nearest, met = np.inf, -1
                sign = 1.0 if upwards else -1.0
                for j in range(experts):
                    if is_on[j]:
                        continue
                    rate = sign * slope[j, c]
                    # above and falling, or below and rising
                    if (rate < 0.0) != above[head, j] or rate == 0.0:
                        continue
                    tau = -f[j] / rate
                    if tau < nearest:
                        nearest, met = tau, j
                if met < 0:
                    # no end: every slope must be known to point away
                    for m in range(size):
                        right[m] = 1.0 if m == c else 0.0
                    _solved(basis, inverse, right, edge, edge_error)
                    for j in range(experts):
                        if is_on[j]:
                            continue
                        loose, reach = edge_error[d], abs(edge[d])
                        for m in range(d):
                            loose += abs(weight[j, m]) * edge_error[m]
                            reach += abs(weight[j, m] * edge[m])
                        if not abs(slope[j, c]) > 1.01 * loose + gamma * reach:
                            proved[head] = UNCERTAIN
                    links[head, 2 * c + upwards] = RAY
                    continue
                _swapped(own, c, met, following)
                end = _entered(table, on, num, following)
                if end < 0:
                    return head, num, FULL
                num = max(num, end + 1)
                links[head, 2 * c + upwards] = end
        head += 1
    return head, num, DONE


@njit(nogil=True, cache=True)
def check_links(on, above, proved, links, num):
    """Takes the proof from vertices with an edge whose ends differ in more than was exchanged.

    Where both ends have proved signs and differ in the two experts alone, no hyperplane lies
    between them: each is the other's neighbour, whatever rounding did to the shot.
    """
    experts, lost = above.shape[1], 0
    for u in range(num):
        if proved[u] != PROVED:
            continue
        for edge in range(links.shape[1]):
            v = links[u, edge]
            if v < 0 or proved[v] == UNCERTAIN:
                continue
            leaving, upwards = on[u, edge // 2], edge % 2 == 1
            fits = proved[v] != GONE
            for j in range(experts):
                expected = above[u, j]
                if j == leaving:
                    expected = upwards
                for c in range(on.shape[1]):
                    if on[v, c] == j:
                        expected = False
                if above[v, j] != expected:
                    fits = False
                    break
            if not fits:
                proved[u] = UNCERTAIN
                lost += 1
                break
    return lost


@njit(nogil=True, cache=True)
def fill_table(table, on, num):
    """Puts the first on-sets into the table."""
    for row in range(num):
        table[_place(table, on, on[row])] = row


@njit(nogil=True, cache=True)
def entered(table, on, num, row):
    """The number of an on-set, ``num`` for a new one that was put there; -1 without room for it."""
    return _entered(table, on, num, row)
