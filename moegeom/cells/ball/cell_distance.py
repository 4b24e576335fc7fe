r"""Distances from a centre to cells and walls, with proved bounds: the quadratic program, compiled.

The reference is :func:`moegeom.cells.ball.nearest.nearest`, which has the formulas; here the
search ends as soon as the radius is passed, and an answer that float64 cannot prove stays OPEN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8
from numba import njit

from moegeom.cells.ball._cell_answer import BEYOND, EMPTY, MET, OPEN, answer, excluded
from moegeom.cells.ball._cell_bounds import magnitudes
from moegeom.cells.ball._cell_search import ordered


@dataclass(frozen=True, eq=False)
class Distances:
    """What is known of each cell or wall, and proved brackets of its distance.

    ``state`` is OPEN, MET, BEYOND or EMPTY. ``step`` leads from the centre to a point inside each
    that is MET, no farther than ``upper``, NaN elsewhere; with a wall the point may be off the
    hyperplane by rounding. ``pairs`` are the active constraints, -1 where there are fewer, and
    ``multipliers`` their weights: of Farkas where the state is EMPTY.
    """

    state: UInt8[np.ndarray, "cells"]
    lower: Float64[np.ndarray, "cells"]
    upper: Float64[np.ndarray, "cells"]
    step: Float64[np.ndarray, "cells dims"]
    pairs: Int64[np.ndarray, "cells active 2"]
    multipliers: Float64[np.ndarray, "cells active"]


def cell_distance(
    weight: Float64[np.ndarray, "experts dims"],
    shift: Float64[np.ndarray, "experts"],
    error: float,
    inside: Bool[np.ndarray, "cells experts"],
    exchanged: Int64[np.ndarray, "cells 2"],
    radius: float,
    scale: float,
) -> Distances:
    """Distance of each cell, or of its wall where the pair (out, into) ties; (-1, -1) for none.

    ``shift`` are the logits at the centre, ``error`` what any of them may be off by, ``scale`` a
    typical distance. A search that passes the radius ends there with a lower bound beyond it.
    """
    count, dims = len(inside), weight.shape[1]
    state, bracket = np.zeros(count, np.uint8), np.empty((count, 2))
    step = np.full((count, dims), np.nan)
    pairs = np.full((count, dims + 1, 2), -1, np.int64)
    multipliers = np.zeros((count, dims + 1))
    cell_distance_loop(
        np.ascontiguousarray(weight),
        np.ascontiguousarray(shift),
        float(error),
        np.ascontiguousarray(inside),
        np.ascontiguousarray(exchanged),
        float(radius),
        float(scale),
        state,
        bracket,
        step,
        pairs,
        multipliers,
    )
    return Distances(state, bracket[:, 0], bracket[:, 1], step, pairs, multipliers)


@njit(nogil=True, cache=True)
def cell_distance_loop(
    weight,
    values,
    error,
    inside,
    pair,
    radius,
    scale,
    state,
    bracket,
    nearest,
    active,
    multiplier,
):
    """One cell or wall after the other; ``pair`` is (-1, -1) for a cell, or (out, into)."""
    greatest, longest = magnitudes(weight, values)
    experts, dims = weight.shape
    rows, columns = np.empty((experts, dims)), np.empty((dims, experts))
    shift, order, logits = np.empty(experts), np.empty(experts, np.int64), np.empty(experts)
    pairs, multipliers = np.empty((dims + 1, 2), np.int64), np.empty(dims + 1)
    step, moved, direction = np.empty(dims), np.empty(dims), np.empty(dims)
    basis, upper = np.empty((dims, dims)), np.empty((dims, dims))
    height, share, away = np.empty(dims), np.empty(dims), np.empty(dims)
    place = np.empty(experts, np.int64)
    for n in range(len(inside)):
        k = ordered(weight, values, inside[n], rows, columns, shift, order)
        for m in range(experts):
            place[order[m]] = m
        out = place[pair[n, 0]] if pair[n, 0] >= 0 else -1
        into = place[pair[n, 1]] if pair[n, 0] >= 0 else -1
        state[n], bracket[n, 0], bracket[n, 1], q = answer(
            rows,
            columns,
            shift,
            logits,
            pairs,
            multipliers,
            step,
            moved,
            basis,
            upper,
            height,
            share,
            away,
            direction,
            k,
            out,
            into,
            radius,
            scale,
            error,
            greatest,
            longest,
        )
        for c in range(weight.shape[1]):
            nearest[n, c] = moved[c] if state[n] == MET else np.nan
        for m in range(q):
            active[n, m, 0], active[n, m, 1] = order[pairs[m, 0]], order[pairs[m, 1]]
            multiplier[n, m] = multipliers[m]


@njit(nogil=True, cache=True)
def wall_distance_loop(
    weight,
    values,
    error,
    inside,
    first,
    known,
    sure,
    foot,
    radius,
    scale,
    wall,
    state,
    bracket,
    margin,
    tests,
):
    """All walls of cells from ``first`` on that are MET or OPEN; the next cell, and how many.

    Ends before a cell whose walls may be too many for ``wall`` [most, 3], which holds cell, out and
    into. ``known`` has walls of the same form, in order, that are passed over; ``sure[i, j]`` is
    true where i is above j in the whole ball, ``foot`` bounds the distance of the tie of two.
    ``margin[0]`` becomes the least distance of rejected walls from the radius.
    """
    greatest, longest = magnitudes(weight, values)
    experts, dims = weight.shape
    rows, columns = np.empty((experts, dims)), np.empty((dims, experts))
    shift, order, logits = np.empty(experts), np.empty(experts, np.int64), np.empty(experts)
    pairs, multipliers = np.empty((dims + 1, 2), np.int64), np.empty(dims + 1)
    step, moved, direction = np.empty(dims), np.empty(dims), np.empty(dims)
    basis, upper = np.empty((dims, dims)), np.empty((dims, dims))
    height, share, away = np.empty(dims), np.empty(dims), np.empty(dims)
    found, at = 0, 0
    is_known = np.zeros((experts, experts), np.bool_)
    is_free = np.empty(experts, np.bool_)
    while at < len(known) and known[at, 0] < first:
        at += 1
    for n in range(first, len(inside)):
        k = ordered(weight, values, inside[n], rows, columns, shift, order)
        if found + k * (experts - k) > len(wall):
            return n, found
        start = at
        while at < len(known) and known[at, 0] == n:
            is_known[known[at, 1], known[at, 2]] = True
            at += 1
        for m in range(experts):
            own, free = order[m], True
            for l in range(k) if m < k else range(k, experts):
                other = order[l]
                if sure[own, other] if m < k else sure[other, own]:
                    free = False
                    break
            is_free[m] = free
        for m in range(experts):
            if is_free[m]:
                tests[0] += 1
                out, into = (m, -1) if m < k else (-1, m)
                known_of, lower, _, _ = excluded(
                    rows,
                    columns,
                    shift,
                    logits,
                    pairs,
                    multipliers,
                    step,
                    basis,
                    upper,
                    height,
                    share,
                    away,
                    k,
                    out,
                    into,
                    radius,
                    error,
                    greatest,
                    longest,
                )
                if known_of == BEYOND:
                    margin[0] = min(margin[0], lower - radius)
                is_free[m] = known_of == OPEN
        for out in range(k):
            if not is_free[out]:
                continue
            for into in range(k, experts):
                own, other = order[out], order[into]
                if not is_free[into] or foot[own, other] >= radius or is_known[own, other]:
                    continue
                tests[0] += 1
                known_of, lower, reached, _ = answer(
                    rows,
                    columns,
                    shift,
                    logits,
                    pairs,
                    multipliers,
                    step,
                    moved,
                    basis,
                    upper,
                    height,
                    share,
                    away,
                    direction,
                    k,
                    out,
                    into,
                    radius,
                    scale,
                    error,
                    greatest,
                    longest,
                )
                if known_of == BEYOND:
                    margin[0] = min(margin[0], lower - radius)
                if known_of in (BEYOND, EMPTY):
                    continue
                wall[found, 0], wall[found, 1], wall[found, 2] = n, own, other
                state[found] = known_of
                bracket[found, 0], bracket[found, 1] = lower, reached
                found += 1
        for m in range(start, at):
            is_known[known[m, 1], known[m, 2]] = False
    return len(inside), found
