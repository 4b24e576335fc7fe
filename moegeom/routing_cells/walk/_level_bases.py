"""Bases of vertices side by side, in the lanes of vector registers, solved with error bounds."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numba import njit

from moegeom.core.shapes import Float64, Int64
from moegeom.kernels.cpu import UNCOUNTED

#: Unit roundoff.
UNIT = 2.0**-53

#: Vertices that are worked on side by side, in the lanes of vector registers. They are examined
#: before their edges are entered: few, so that most edges are known from their other end.
TURN = 32


class Room(NamedTuple):
    """What a turn of vertices is worked out in: ``squares`` hold bases and their inverses by lane.

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
